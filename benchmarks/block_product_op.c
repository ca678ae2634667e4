/* The products of block_product.c as a custom op of ONNX Runtime, for steps of one row and of many: a prototype.
 *
 * In: x [..., K] float; codes, scales and sums of the matrix, constants that are packed once when the session opens.
 * Out: [..., N] float. Threads share the columns; above FEW rows they share rounding the rows, too.
 */
#include "block_product.h"
#include "custom_op.h"

enum { FEW = 16, MOST_DIMENSIONS = 8 };

typedef struct {
  const Matrix* matrix;
  Rounded rounded;
  int64_t rows;
  const float* x;
  float* out;
} Product;

static void round_one(void* data, size_t row) {
  const Product* product = data;
  round_row(product->x + row * product->matrix->blocks * BLOCK, row, &product->rounded);
}

static void multiply_one(void* data, size_t tile) {
  const Product* product = data;
  multiply_tile(product->matrix, &product->rounded, product->rows, tile, product->out);
}

static OrtStatus* compute(void* state, OrtKernelContext* context) {
  const Matrix* matrix = state;
  Product product = {.matrix = matrix, .rows = 1};
  int64_t shape[MOST_DIMENSIONS];
  size_t rank = 0;
  OrtStatus* failed = input(context, 0, &product.x, shape, &rank);
  if (failed) return failed;
  if (shape[rank - 1] != matrix->blocks * BLOCK)
    return api->CreateStatus(ORT_INVALID_ARGUMENT, "the last dimension of x must be the matrix's whole blocks");
  for (size_t i = 0; i + 1 < rank; i++) product.rows *= shape[i];
  shape[rank - 1] = matrix->columns;
  failed = output(context, 0, shape, rank, &product.out);
  if (failed || !product.rows) return failed;
  void* place = aligned_alloc(64, rounded_bytes(product.rows, matrix->blocks));
  if (!place) return api->CreateStatus(ORT_FAIL, "no memory for rounded rows");
  product.rounded = rounded_place(place, product.rows, matrix->blocks);
  if (product.rows > FEW)
    failed = api->KernelContext_ParallelFor(context, round_one, product.rows, 0, &product);
  else
    for (int64_t row = 0; row < product.rows; row++) round_one(&product, row);
  if (!failed) failed = api->KernelContext_ParallelFor(context, multiply_one, matrix->tiles, 0, &product);
  free(place);
  return failed;
}

static OrtStatus* constant(const OrtKernelInfo* info, size_t index, void* data, int64_t* shape) {
  int is_constant = 0;
  const OrtValue* value = NULL;
  OrtStatus* failed = api->KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value);
  if (!failed && !is_constant) return api->CreateStatus(ORT_INVALID_ARGUMENT, "the matrix must be constant");
  return failed ? failed : tensor(value, data, shape, NULL);
}

static void destroy(void* state) {
  matrix_free(state);
  free(state);
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* given, const OrtKernelInfo* info, void** state) {
  const uint8_t* codes;
  const float *scales, *sums;
  int64_t shape[3];
  Matrix* matrix = calloc(1, sizeof(*matrix));
  if (!matrix) return given->CreateStatus(ORT_FAIL, "no memory for a kernel");
  OrtStatus* failed = constant(info, 1, &codes, shape);
  if (!failed) failed = constant(info, 2, &scales, NULL);
  if (!failed) failed = constant(info, 3, &sums, NULL);
  if (!failed) failed = given->KernelInfoGetAttribute_int64(info, "bits", &matrix->bits);
  if (!failed) {
    matrix->columns = shape[0], matrix->blocks = shape[1];
    if (shape[2] * 8 != BLOCK * matrix->bits || (matrix->bits != 4 && matrix->bits != 8))
      failed = given->CreateStatus(ORT_INVALID_ARGUMENT, "blocks of 32 codes of 4 or 8 bits are needed");
    else if (!matrix_pack(matrix, codes, scales, sums))
      failed = given->CreateStatus(ORT_FAIL, "no memory for a packed matrix");
  }
  if (failed) destroy(matrix);
  *state = failed ? NULL : matrix;
  return failed;
}

static const char* name(const OrtCustomOp* op) { return "BlockProduct"; }
static size_t num_inputs(const OrtCustomOp* op) { return 4; }
static size_t num_outputs(const OrtCustomOp* op) { return 1; }
static ONNXTensorElementDataType input_type(const OrtCustomOp* op, size_t i) {
  return i == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}
static ONNXTensorElementDataType output_type(const OrtCustomOp* op, size_t i) {
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

static OrtCustomOp block_product_op = {
    OP_DEFAULTS,
    .GetName = name,
    .GetInputType = input_type,
    .GetInputTypeCount = num_inputs,
    .GetOutputType = output_type,
    .GetOutputTypeCount = num_outputs,
    .KernelDestroy = destroy,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
};

OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return register_op(options, base, &block_product_op);
}
