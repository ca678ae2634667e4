/* Grouped-query attention of single new tokens over an int8 KV cache, as a custom op of ONNX Runtime: a prototype.
 *
 * In: packed queries, keys and values, past caches, lengths, rotary tables, scales. Out: what is attended to, and the
 * caches with the new row, in place where past and present are one buffer. Built by decode_step.py for one shape of head
 * (-DGROUP query heads a key/value head, -DHEAD channels); x86 with AVX2. Nothing of graphport's runtime loads it.
 *
 * Each task attends from the GROUP heads of one key/value head to SPLIT cached rows: a row is widened once for all of
 * them, scores of TILE rows stay in the first cache, and the softmax is rescaled as its maximum grows (Milakov and
 * Gimelshein, "Online normalizer calculation for softmax"). The parts are joined at the end (flash decoding).
 */
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "custom_op.h"

enum { LANES = 8, TILE = 64, SPLIT = 256, VECTORS = HEAD / LANES, HALF = 4, PART = HEAD + 2 };
_Static_assert(HEAD % (HALF * LANES) == 0, "HEAD must be a multiple of 32");

typedef struct {
  int64_t query_heads, key_heads;
  float scale;
} Kernel;

typedef struct {
  int64_t rows, query_heads, key_heads, capacity, rotated, splits;
  const float *packed, *cosines, *sines;
  const int32_t* last;
  int8_t *keys, *values;
  float scale, key_scale, value_scale;
  float *queries, *parts, *out;
} Step;

static inline __m256 widen(const int8_t* q) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
}

static inline float sum(__m256 lanes) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* exp(x) for x <= 0: 2^n * 2^f with |f| <= 1/2, the power series of 2^f to the sixth term; relative error 1e-7. */
static inline __m256 exponential(__m256 x) {
  const float terms[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022649e-1f, 6.9314718e-1f, 1};
  __m256 z = _mm256_max_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _mm256_set1_ps(-126));
  __m256 n = _mm256_round_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(z, n);
  __m256 p = _mm256_set1_ps(terms[0]);
  for (int i = 1; i < 7; i++) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(terms[i]));
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

static void rotate(const float* x, float* y, const float* c, const float* s, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    y[i] = x[i] * c[i] - x[i + half] * s[i];
    y[i + half] = x[i + half] * c[i] + x[i] * s[i];
  }
  memcpy(y + 2 * half, x + 2 * half, (HEAD - 2 * half) * sizeof(float));
}

static void quantise(const float* x, int8_t* q, float scale) {
  for (int i = 0; i < HEAD; i++) q[i] = (int8_t)fmaxf(-128, fminf(127, rintf(x[i] / scale)));
}

/* Rotate the queries of a row, scaled; put its new key and value into the caches. */
static void append(const Step* step, int64_t row) {
  const float* x = step->packed + row * (step->query_heads + 2 * step->key_heads) * HEAD;
  const float *c = step->cosines + step->last[row] * step->rotated, *s = step->sines + step->last[row] * step->rotated;
  float* queries = step->queries + row * step->query_heads * HEAD;
  for (int64_t n = 0; n < step->query_heads; n++, x += HEAD, queries += HEAD) {
    rotate(x, queries, c, s, step->rotated);
    for (int i = 0; i < HEAD; i++) queries[i] *= step->scale * step->key_scale;
  }
  for (int64_t n = 0; n < step->key_heads; n++, x += HEAD) {
    int64_t place = ((row * step->key_heads + n) * step->capacity + step->last[row]) * HEAD;
    float key[HEAD];
    rotate(x, key, c, s, step->rotated);
    quantise(key, step->keys + place, step->key_scale);
    quantise(x + step->key_heads * HEAD, step->values + place, step->value_scale);
  }
}

/* scores[GROUP][TILE] of `count` rows of keys; what is left of the last vector is -inf. */
static void score(const float* queries, const int8_t* keys, int count, float scores[GROUP][TILE]) {
  for (int t = 0; t < count; t++, keys += HEAD) {
    __m256 dot[GROUP];
    for (int g = 0; g < GROUP; g++) dot[g] = _mm256_setzero_ps();
    for (int i = 0; i < VECTORS; i++) {
      __m256 key = widen(keys + i * LANES);
      for (int g = 0; g < GROUP; g++)
        dot[g] = _mm256_fmadd_ps(_mm256_loadu_ps(queries + g * HEAD + i * LANES), key, dot[g]);
    }
    for (int g = 0; g < GROUP; g++) scores[g][t] = sum(dot[g]);
  }
  for (int t = count; t % LANES; t++)
    for (int g = 0; g < GROUP; g++) scores[g][t] = -INFINITY;
}

/* Turn scores into exp(score - top), where top is the largest so far; rescale what was added up under a smaller one. */
static void normalise(float* scores, int count, float* top, float* total, __m256* attended) {
  float highest = *top;
  for (int t = 0; t < count; t++) highest = fmaxf(highest, scores[t]);
  float factor = expf(*top - highest);
  for (int i = 0; i < VECTORS; i++) attended[i] = _mm256_mul_ps(attended[i], _mm256_set1_ps(factor));
  __m256 added = _mm256_setzero_ps();
  for (int t = 0; t < count; t += LANES) {
    __m256 weight = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), _mm256_set1_ps(highest)));
    _mm256_storeu_ps(scores + t, weight);
    added = _mm256_add_ps(added, weight);
  }
  *total = *total * factor + sum(added);
  *top = highest;
}

/* Half of the channels at a time, so that all sums of a group stay in registers. */
static void add_values(float weights[GROUP][TILE], const int8_t* values, int count, __m256 attended[GROUP][VECTORS]) {
  for (int i = 0; i < VECTORS; i += HALF) {
    __m256 sums[GROUP][HALF];
    for (int g = 0; g < GROUP; g++) memcpy(sums[g], attended[g] + i, sizeof(sums[g]));
    for (int t = 0; t < count; t++) {
      __m256 value[HALF];
      for (int k = 0; k < HALF; k++) value[k] = widen(values + t * HEAD + (i + k) * LANES);
      for (int g = 0; g < GROUP; g++) {
        __m256 weight = _mm256_set1_ps(weights[g][t]);
        for (int k = 0; k < HALF; k++) sums[g][k] = _mm256_fmadd_ps(weight, value[k], sums[g][k]);
      }
    }
    for (int g = 0; g < GROUP; g++) memcpy(attended[g] + i, sums[g], sizeof(sums[g]));
  }
}

/* One task: task = (row * key_heads + head) * splits + split. A part is [HEAD] sums, the maximum and the total. */
static void attend(void* data, size_t task) {
  const Step* step = data;
  int64_t head = task / step->splits, begin = task % step->splits * SPLIT, row = head / step->key_heads;
  int64_t count = step->last[row] + 1 - begin;
  if (count <= 0) return;
  if (count > SPLIT) count = SPLIT;
  int64_t place = (head * step->capacity + begin) * HEAD;
  float scores[GROUP][TILE], top[GROUP], total[GROUP];
  __m256 attended[GROUP][VECTORS];
  memset(attended, 0, sizeof(attended));
  for (int g = 0; g < GROUP; g++) top[g] = -INFINITY, total[g] = 0;
  for (int64_t first = 0; first < count; first += TILE) {
    int some = count - first < TILE ? (int)(count - first) : TILE;
    score(step->queries + head * GROUP * HEAD, step->keys + place + first * HEAD, some, scores);
    for (int g = 0; g < GROUP; g++) normalise(scores[g], some, top + g, total + g, attended[g]);
    add_values(scores, step->values + place + first * HEAD, some, attended);
  }
  float* part = step->parts + task * GROUP * PART;
  for (int g = 0; g < GROUP; g++, part += PART) {
    memcpy(part, attended[g], sizeof(attended[g]));
    part[HEAD] = top[g], part[HEAD + 1] = total[g];
  }
}

static void join(const Step* step, int64_t row, int64_t head, int g) {
  const float* parts = step->parts + ((row * step->key_heads + head) * step->splits * GROUP + g) * PART;
  float* out = step->out + ((row * step->key_heads + head) * GROUP + g) * HEAD;
  int64_t used = (step->last[row] + SPLIT) / SPLIT;
  float top = -INFINITY, total = 0;
  for (int64_t i = 0; i < used; i++) top = fmaxf(top, parts[i * GROUP * PART + HEAD]);
  memset(out, 0, HEAD * sizeof(float));
  for (int64_t i = 0; i < used; i++) {
    const float* part = parts + i * GROUP * PART;
    float factor = expf(part[HEAD] - top);
    total += factor * part[HEAD + 1];
    for (int h = 0; h < HEAD; h++) out[h] += factor * part[h];
  }
  for (int h = 0; h < HEAD; h++) out[h] *= step->value_scale / total;
}

static void run(const Step* step, const OrtKernelContext* context) {
  size_t tasks = step->rows * step->key_heads * step->splits;
  for (int64_t row = 0; row < step->rows; row++) append(step, row);
  if (tasks <= (size_t)step->key_heads)
    for (size_t task = 0; task < tasks; task++) attend((void*)step, task);
  else
    (void)!api->KernelContext_ParallelFor(context, attend, tasks, 0, (void*)step);
  for (int64_t row = 0; row < step->rows; row++)
    for (int64_t head = 0; head < step->key_heads; head++)
      for (int g = 0; g < GROUP; g++) join(step, row, head, g);
}

static OrtStatus* compute(void* state, OrtKernelContext* context) {
  const Kernel* kernel = state;
  Step step = {.query_heads = kernel->query_heads, .key_heads = kernel->key_heads, .scale = kernel->scale};
  int64_t packed[3], cache[4], tables[2];
  const void *past[2], *scales[2];
  void* inputs[] = {&step.packed, &past[0], &past[1], &step.last, &step.cosines, &step.sines, &scales[0], &scales[1]};
  int64_t* shapes[] = {packed, cache, NULL, NULL, tables, NULL, NULL, NULL};
  OrtStatus* failed = NULL;
  for (size_t i = 0; i < 8 && !failed; i++) failed = input(context, i, inputs[i], shapes[i], NULL);
  if (failed) return failed;
  if (packed[1] != 1 || cache[3] != HEAD || step.query_heads != step.key_heads * GROUP)
    return api->CreateStatus(ORT_INVALID_ARGUMENT, "built for one new token a row and another shape of heads");
  int64_t attended[] = {packed[0], 1, step.query_heads * HEAD};
  failed = output(context, 0, attended, 3, &step.out);
  if (!failed) failed = output(context, 1, cache, 4, &step.keys);
  if (!failed) failed = output(context, 2, cache, 4, &step.values);
  if (failed) return failed;
  size_t bytes = cache[0] * cache[1] * cache[2] * HEAD;
  if (step.keys != past[0]) memcpy(step.keys, past[0], bytes);
  if (step.values != past[1]) memcpy(step.values, past[1], bytes);
  step.rows = packed[0], step.capacity = cache[2], step.rotated = tables[1];
  step.key_scale = *(const float*)scales[0], step.value_scale = *(const float*)scales[1];
  int32_t longest = 0;
  for (int64_t row = 0; row < step.rows; row++) longest = step.last[row] > longest ? step.last[row] : longest;
  step.splits = longest / SPLIT + 1;
  size_t queries = step.rows * step.query_heads * HEAD;
  size_t parts = step.rows * step.key_heads * step.splits * GROUP * PART;
  step.queries = malloc((queries + parts) * sizeof(float));
  if (!step.queries) return api->CreateStatus(ORT_FAIL, "no memory for partial sums");
  step.parts = step.queries + queries;
  run(&step, context);
  free(step.queries);
  return NULL;
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* given, const OrtKernelInfo* info, void** state) {
  Kernel* kernel = malloc(sizeof(*kernel));
  if (!kernel) return given->CreateStatus(ORT_FAIL, "no memory for a kernel");
  OrtStatus* failed = given->KernelInfoGetAttribute_int64(info, "num_heads", &kernel->query_heads);
  if (!failed) failed = given->KernelInfoGetAttribute_int64(info, "kv_num_heads", &kernel->key_heads);
  if (!failed) failed = given->KernelInfoGetAttribute_float(info, "scale", &kernel->scale);
  *state = kernel;
  return failed;
}

static const char* name(const OrtCustomOp* op) { return "DecodeAttention"; }
static size_t num_inputs(const OrtCustomOp* op) { return 8; }
static size_t num_outputs(const OrtCustomOp* op) { return 3; }
static ONNXTensorElementDataType input_type(const OrtCustomOp* op, size_t i) {
  if (i == 3) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
  return i == 1 || i == 2 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}
static ONNXTensorElementDataType output_type(const OrtCustomOp* op, size_t i) {
  return i ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

static OrtCustomOp decode_attention = {
    OP_DEFAULTS,
    .GetName = name,
    .GetInputType = input_type,
    .GetInputTypeCount = num_inputs,
    .GetOutputType = output_type,
    .GetOutputTypeCount = num_outputs,
    .KernelDestroy = free,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
};

OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return register_op(options, base, &decode_attention);
}
