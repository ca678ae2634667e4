/* What the prototypes of kernels share: tensors of a custom op of ONNX Runtime's C interface, and its registration. */
#pragma once
#include <stdlib.h>

#include "onnxruntime_c_api.h"

enum { API = 17 }; /* ONNX Runtime 1.17: the first with all that is used here */

static const OrtApi* api;

/* Address and, where asked for, shape and number of dimensions of a tensor. */
static OrtStatus* tensor(const OrtValue* value, void* data, int64_t* shape, size_t* rank) {
  OrtTensorTypeAndShapeInfo* info = NULL;
  size_t count = 0;
  OrtStatus* failed = api->GetTensorMutableData((OrtValue*)value, data);
  if (failed || !shape) return failed;
  failed = api->GetTensorTypeAndShape(value, &info);
  if (!failed) failed = api->GetDimensionsCount(info, &count);
  if (!failed) failed = api->GetDimensions(info, shape, count);
  if (rank) *rank = count;
  api->ReleaseTensorTypeAndShapeInfo(info);
  return failed;
}

static OrtStatus* input(const OrtKernelContext* context, size_t index, void* data, int64_t* shape, size_t* rank) {
  const OrtValue* value = NULL;
  OrtStatus* failed = api->KernelContext_GetInput(context, index, &value);
  return failed ? failed : tensor(value, data, shape, rank);
}

static OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, void* data) {
  OrtValue* value = NULL;
  OrtStatus* failed = api->KernelContext_GetOutput(context, index, shape, rank, &value);
  return failed ? failed : api->GetTensorMutableData(value, data);
}

static const char* provider(const OrtCustomOp* op) { return "CPUExecutionProvider"; }
static OrtCustomOpInputOutputCharacteristic required(const OrtCustomOp* op, size_t i) { return INPUT_OUTPUT_REQUIRED; }
static OrtMemType memory(const OrtCustomOp* op, size_t i) { return OrtMemTypeDefault; }
static int one(const OrtCustomOp* op) { return 1; }

/* What every op here answers alike. */
#define OP_DEFAULTS                                                                               \
  .version = API, .GetExecutionProviderType = provider, .GetInputCharacteristic = required,       \
  .GetOutputCharacteristic = required, .GetInputMemoryType = memory,                              \
  .GetVariadicInputMinArity = one, .GetVariadicInputHomogeneity = one,                            \
  .GetVariadicOutputMinArity = one, .GetVariadicOutputHomogeneity = one

static OrtStatus* register_op(OrtSessionOptions* options, const OrtApiBase* base, const OrtCustomOp* op) {
  OrtCustomOpDomain* domain = NULL;
  api = base->GetApi(API);
  OrtStatus* failed = api->CreateCustomOpDomain("graphport.prototype", &domain);
  if (!failed) failed = api->CustomOpDomain_Add(domain, op);
  return failed ? failed : api->AddCustomOpDomain(options, domain);
}
