/* Products of float rows with a block-quantised matrix on AVX-512 VNNI: the arithmetic of a prototype, without threads.
 *
 * In: rows, and a matrix as MatMulNBits holds it. Out: what MatMulNBits computes at accuracy_level 4: each block of 32
 * activations becomes int8 with one scale, and y is the sum over blocks of scale_x * scale_w * (x . w) + sum_x * sum_w.
 * There sum_w is -scale_w * zero_point, and the block's minimum where a GGUF file has one. No bundle uses it.
 *
 * A matrix lies in tiles of 32 columns, whose blocks are records: codes, four of a column's values side by side, then
 * scales and sums. One vpdpbusd multiplies 4 values of a row by those of 16 columns, so no sum has to be taken across a
 * register, and what is loaded and unpacked serves up to ROWS rows. 4-bit codes are unpacked in registers where ROWS
 * suffice, else once a tile for all rows, DEPTH blocks at a time.
 */
#include "block_product.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, ROWS = 6, DEPTH = 16, QUAD = 4, QUADS = BLOCK / QUAD, LINE = TILE * QUAD, CODES = TILE * BLOCK };
enum { CACHE_LINE = 64, AHEAD = 3072 }; /* bytes by which loads are announced */

typedef struct {
  const Matrix* matrix;
  const Rounded* rounded;
  int64_t tile, first, count; /* blocks [first, first + count) */
  const uint8_t* codes;       /* of block `first`; each block's lie `stride` bytes behind those before */
  int64_t stride;
  float* out;
} Part;

static int64_t whole(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t code_bytes(const Matrix* matrix) { return TILE * BLOCK * matrix->bits / 8; }

static uint8_t* record(const Matrix* matrix, int64_t tile, int64_t block) {
  return matrix->records + (tile * matrix->blocks + block) * matrix->stride;
}

int matrix_pack(Matrix* matrix, const uint8_t* codes, const float* scales, const float* sums) {
  int64_t bytes = BLOCK * matrix->bits / 8, all;
  matrix->tiles = (matrix->columns + TILE - 1) / TILE;
  matrix->stride = code_bytes(matrix) + 2 * TILE * sizeof(float);
  all = matrix->tiles * matrix->blocks * matrix->stride;
  matrix->records = aligned_alloc(64, all);
  if (!matrix->records) return 0;
  memset(matrix->records, 0, all);
  for (int64_t column = 0; column < matrix->columns; column++)
    for (int64_t block = 0; block < matrix->blocks; block++) {
      int64_t from = column * matrix->blocks + block, lane = column % TILE;
      uint8_t *to = record(matrix, column / TILE, block), *packed = to + lane * QUAD;
      float* factors = (float*)(to + code_bytes(matrix));
      const uint8_t* code = codes + from * bytes;
      factors[lane] = scales[from], factors[TILE + lane] = sums[from];
      for (int i = 0; i < BLOCK; i++) {
        int quad = i / QUAD, half = QUADS / 2;
        if (matrix->bits == 8)
          packed[quad * LINE + i % QUAD] = code[i];
        else /* quads q and q + 4 of a column share bytes */
          packed[quad % half * LINE + i % QUAD] |= (code[i / 2] >> i % 2 * 4 & 15) << quad / half * 4;
      }
    }
  return 1;
}

void matrix_free(Matrix* matrix) { free(matrix->records); }

int64_t rounded_bytes(int64_t rows, int64_t blocks) { return whole(rows * blocks * (BLOCK + 2 * sizeof(float))); }

Rounded rounded_place(void* memory, int64_t rows, int64_t blocks) {
  float* scales = (float*)((int8_t*)memory + rows * blocks * BLOCK);
  return (Rounded){.blocks = blocks, .codes = memory, .scales = scales, .sums = scales + rows * blocks};
}

void round_row(const float* x, int64_t row, const Rounded* rounded) {
  for (int64_t block = 0; block < rounded->blocks; block++, x += BLOCK) {
    int64_t place = row * rounded->blocks + block;
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + LANES);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    float scale = largest / 127;
    __m512 inverse = _mm512_set1_ps(largest ? 127 / largest : 0);
    __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128((__m128i*)(rounded->codes + place * BLOCK), _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i*)(rounded->codes + place * BLOCK + LANES), _mm512_cvtepi32_epi8(second));
    rounded->scales[place] = scale;
    rounded->sums[place] = scale * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
  }
}

/* Have the processor fetch what lies AHEAD of a record. */
static inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += CACHE_LINE) _mm_prefetch((const char*)from + AHEAD + i, _MM_HINT_T0);
}

/* 16 columns' codes of quads q and q + 4. */
static inline void unpack(const uint8_t* packed, __m512i* low, __m512i* high) {
  __m512i mask = _mm512_set1_epi8(15), both = _mm512_load_si512(packed);
  *low = _mm512_and_si512(both, mask);
  *high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}

/* Multiply `rows` rows from `row` on by a tile. `rows` and `is_packed` are constants wherever this is called. */
__attribute__((always_inline)) static inline void multiply(
    const int rows, const int is_packed, const Part* part, int64_t row) {
  const Matrix* matrix = part->matrix;
  int64_t blocks = matrix->blocks, place = row * blocks + part->first;
  int64_t left = matrix->columns - part->tile * TILE;
  const uint8_t* codes = part->codes;
  const int8_t* x = part->rounded->codes + place * BLOCK;
  const float *x_scales = part->rounded->scales + place, *x_sums = part->rounded->sums + place;
  const uint8_t* factors = record(matrix, part->tile, part->first) + code_bytes(matrix);
  float* out = part->out + row * matrix->columns + part->tile * TILE;
  __mmask16 masks[2] = {left < LANES ? (1 << left) - 1 : 0xffff, 0};
  if (left > LANES) masks[1] = left < TILE ? (1 << (left - LANES)) - 1 : 0xffff;
  __m512 total[ROWS][2];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++)
      total[r][c] = part->first ? _mm512_maskz_loadu_ps(masks[c], out + r * matrix->columns + c * LANES)
                                : _mm512_setzero_ps();
  for (int64_t block = 0; block < part->count; block++) {
    __m512i dots[ROWS][2];
    if (!row) fetch(factors - code_bytes(matrix), matrix->stride); /* later groups find it in the cache */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) dots[r][0] = dots[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int q = 0; q < QUADS / 2; q++) {
      __m512i code[2][2];
      for (int c = 0; c < 2; c++) {
        if (is_packed) {
          unpack(codes + q * LINE + c * 64, &code[0][c], &code[1][c]);
        } else {
          code[0][c] = _mm512_load_si512(codes + q * LINE + c * 64);
          code[1][c] = _mm512_load_si512(codes + (q + QUADS / 2) * LINE + c * 64);
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          int32_t quad;
          memcpy(&quad, x + r * blocks * BLOCK + (q + half * QUADS / 2) * QUAD, sizeof(quad));
          __m512i four = _mm512_set1_epi32(quad);
          dots[r][0] = _mm512_dpbusd_epi32(dots[r][0], code[half][0], four);
          dots[r][1] = _mm512_dpbusd_epi32(dots[r][1], code[half][1], four);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      __m512 scale = _mm512_set1_ps(x_scales[r * blocks + block]), sum = _mm512_set1_ps(x_sums[r * blocks + block]);
      for (int c = 0; c < 2; c++) {
        const float* lanes = (const float*)factors + c * LANES;
        total[r][c] = _mm512_fmadd_ps(sum, _mm512_load_ps(lanes + TILE), total[r][c]);
        __m512 scaled = _mm512_mul_ps(scale, _mm512_load_ps(lanes));
        total[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][c]), scaled, total[r][c]);
      }
    }
    x += BLOCK, codes += part->stride, factors += matrix->stride;
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) _mm512_mask_storeu_ps(out + r * matrix->columns + c * LANES, masks[c], total[r][c]);
}

#define CASE(number) \
  case number: is_packed ? multiply(number, 1, part, row) : multiply(number, 0, part, row); break;

static void multiply_rows(int rows, int is_packed, const Part* part, int64_t row) {
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* All rows, in the fewest groups of at most ROWS, all nearly as large. */
static void multiply_groups(int64_t rows, int is_packed, const Part* part) {
  int64_t groups = (rows + ROWS - 1) / ROWS;
  for (int64_t group = 0; group < groups; group++) {
    int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
    multiply_rows(end - begin, is_packed, part, begin);
  }
}

void multiply_tile(const Matrix* matrix, const Rounded* rounded, int64_t rows, int64_t tile, float* out) {
  int64_t blocks = matrix->blocks;
  Part part = {.matrix = matrix, .rounded = rounded, .tile = tile, .count = blocks, .out = out};
  part.codes = record(matrix, tile, 0), part.stride = matrix->stride;
  if (rows <= ROWS || matrix->bits == 8) {
    multiply_groups(rows, matrix->bits == 4, &part);
    return;
  }
  _Alignas(64) uint8_t wide[DEPTH * CODES];
  part.codes = wide, part.stride = CODES;
  for (part.first = 0; part.first < blocks; part.first += DEPTH) {
    part.count = blocks - part.first < DEPTH ? blocks - part.first : DEPTH;
    for (int64_t block = 0; block < part.count; block++) {
      const uint8_t* packed = record(matrix, tile, part.first + block);
      fetch(packed, matrix->stride);
      for (int i = 0; i < CODES / 2; i += 64) {
        __m512i low, high;
        unpack(packed + i, &low, &high);
        _mm512_store_si512(wide + block * CODES + i, low);
        _mm512_store_si512(wide + block * CODES + CODES / 2 + i, high);
      }
    }
    multiply_groups(rows, 0, &part);
  }
}

/* The whole product in this thread. Returns 0 without memory. */
int block_product(const float* x, int64_t rows, int64_t columns, int64_t blocks, int64_t bits, const uint8_t* codes,
                  const float* scales, const float* sums, float* out) {
  Matrix matrix = {.columns = columns, .blocks = blocks, .bits = bits};
  void* memory = aligned_alloc(64, rounded_bytes(rows, blocks));
  int has_memory = memory && matrix_pack(&matrix, codes, scales, sums);
  if (has_memory) {
    Rounded rounded = rounded_place(memory, rows, blocks);
    for (int64_t row = 0; row < rows; row++) round_row(x + row * blocks * BLOCK, row, &rounded);
    for (int64_t tile = 0; tile < matrix.tiles; tile++) multiply_tile(&matrix, &rounded, rows, tile, out);
  }
  free(memory);
  matrix_free(&matrix);
  return has_memory;
}

/* Runs `repeats` rounds of vpdpbusd on registers alone, all that the processor can do; returns the operations. */
double vnni_operations(int64_t repeats) {
  enum { CHAINS = 16 };
  __m512i chains[CHAINS], code = _mm512_set1_epi8(3), x = _mm512_set1_epi8(1);
  for (int i = 0; i < CHAINS; i++) chains[i] = _mm512_set1_epi32(i);
  for (int64_t n = 0; n < repeats; n++) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) chains[i] = _mm512_dpbusd_epi32(chains[i], code, x);
    __asm__ volatile("" : "+v"(code)); /* not the same product again and again */
  }
  int32_t kept = 0;
  for (int i = 0; i < CHAINS; i++) kept ^= _mm512_reduce_add_epi32(chains[i]);
  __asm__ volatile("" ::"r"(kept));
  return 2.0 * 64 * CHAINS * (double)repeats;
}
