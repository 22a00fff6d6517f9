// Functions of cuBLAS, cuDNN and cuFFT with which torch chooses a kernel. library.py generates all others: a function
// that creates returns a block of zeros, one that computes counts as a launch, others do nothing.
#include "card.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#define API EXPORT int

static int create(void** made) { *made = calloc(1, 512); return 0; }

#define TAKES_STREAM(name) API name(void*, cudaStream_t stream) { card::use_stream(stream); return 0; }
TAKES_STREAM(cublasSetStream_v2)
TAKES_STREAM(cudnnSetStream)
TAKES_STREAM(cusolverDnSetStream)
TAKES_STREAM(cusparseSetStream)
API cufftSetStream(int, cudaStream_t stream) { card::use_stream(stream); return 0; }

API cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
API cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  memset(results, 0, 8 * sizeof(uint64_t) + sizeof(size_t) + 6 * sizeof(int));  // cublasLtMatmulHeuristicResult_t
  *found = 1;
  return 0;
}

API cudnnGetStream(void*, cudaStream_t* stream) { *stream = nullptr; return 0; }
API cudnnDropoutGetStatesSize(void*, size_t* bytes) { *bytes = 1 << 20; return 0; }

// Recurrent layers: each has gate matrices for inputs and for states, a projection, and biases of both, in this order.
// Buffers hold gates and states of all steps; cuDNN's real sizes are unknown.
namespace {

struct Rnn {
  int64_t mode, directions, type, input, hidden, out, layers;
  int64_t gates() const { return mode == 2 ? 4 : mode == 3 ? 3 : 1; }  // LSTM, GRU
  int64_t bytes() const { return type == 0 ? 4 : type == 1 ? 8 : 2; }
  int64_t columns(int64_t layer) const { return layer < directions ? input : directions * out; }
  int64_t projection() const { return out == hidden ? 0 : out * hidden; }
  int64_t matrices(int64_t layer) const { return gates() * hidden * (columns(layer) + out) + projection(); }
  int64_t begin(int64_t layer) const {
    return layer ? begin(layer - 1) + matrices(layer - 1) + 2 * gates() * hidden : 0;
  }
};
struct Steps { int64_t count; };
struct Shape { int type, rows, columns; };

}  // namespace

API cudnnSetRNNDescriptor_v8(Rnn* rnn, int, int mode, int, int bidirectional, int, int type, int, int, int32_t input,
    int32_t hidden, int32_t out, int32_t layers, void*, uint32_t) {
  *rnn = {mode, 1 + bidirectional, type, input, hidden, out, layers};
  return 0;
}
API cudnnGetRNNWeightSpaceSize(void*, const Rnn* rnn, size_t* bytes) {
  *bytes = rnn->begin(rnn->layers * rnn->directions) * rnn->bytes();
  return 0;
}
API cudnnGetRNNWeightParams(void*, const Rnn* rnn, int32_t layer, size_t, char* weights, int32_t number, Shape* matrix,
    char** at, Shape* bias, char** bias_at) {
  int64_t inputs = std::min<int64_t>(number, rnn->gates()), states = number - inputs;
  bool projects = number == 2 * rnn->gates(), of_state = number >= rnn->gates();
  int64_t columns = rnn->columns(layer), begin = rnn->begin(layer);
  int rows = projects ? rnn->out : rnn->hidden, across = projects ? rnn->hidden : of_state ? rnn->out : columns;
  if (matrix) *matrix = {static_cast<int>(rnn->type), rows, across};
  if (at) *at = weights + (begin + rnn->hidden * (inputs * columns + states * rnn->out)) * rnn->bytes();
  if (bias) *bias = {static_cast<int>(rnn->type), rows, 1};
  if (bias_at) *bias_at = weights + (begin + rnn->matrices(layer) + number * rnn->hidden) * rnn->bytes();
  return 0;
}
API cudnnGetTensorNdDescriptor(const Shape* shape, int, int* type, int* dimensions, int* sizes, int*) {
  *type = shape->type, *dimensions = 3;
  sizes[0] = 1, sizes[1] = shape->rows, sizes[2] = shape->columns;
  return 0;
}
API cudnnSetRNNDataDescriptor(Steps* steps, int, int, int most, int rows, int, const int*, void*) {
  steps->count = int64_t(most) * rows;
  return 0;
}
API cudnnGetRNNTempSpaceSizes(void*, const Rnn* rnn, int, const Steps* steps, size_t* work, size_t* reserve) {
  int64_t states = steps->count * rnn->directions * rnn->hidden * rnn->bytes();
  if (work) *work = states * rnn->gates();
  if (reserve) *reserve = states * rnn->layers * (rnn->gates() + 2);
  return 0;
}

// Batch norms and cuDNN's CTC loss: the sizes of their workspaces are unknown, and counted as 0.
#define ASKS_NOTHING(name, ...) API name(void*, __VA_ARGS__, size_t* bytes) { *bytes = 0; return 0; }
ASKS_NOTHING(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, int, int, void*, void*, void*, void*, void*)
ASKS_NOTHING(cudnnGetBatchNormalizationBackwardExWorkspaceSize, int, int, void*, void*, void*, void*, void*, void*, void*)
ASKS_NOTHING(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, int, int, void*, void*)
ASKS_NOTHING(cudnnGetCTCLossWorkspaceSize_v8, int, void*, void*, void*)

API cudnnBackendCreateDescriptor(int, void** made) { return create(made); }
// A plan has one engine, without workspace or shared memory; other attributes are zeros.
API cudnnBackendGetAttribute(void*, int, int type, int64_t asked, int64_t* count, void* values) {
  constexpr int kInt64 = 3, kDescriptor = 15, kInt32 = 23;
  size_t bytes = type == kInt64 ? 8 : type == kInt32 ? 4 : 0;
  if (count) *count = bytes || type == kDescriptor;
  if (values && asked > 0) memset(values, 0, bytes);
  return 0;
}

API cufftCreate(int* plan) { *plan = 1; return 0; }
API cufftXtMakePlanMany(int, int, long long*, long long*, long long, long long, int, long long*, long long, long long,
    int, long long, size_t* bytes, int) {
  *bytes = 0;
  return 0;
}
