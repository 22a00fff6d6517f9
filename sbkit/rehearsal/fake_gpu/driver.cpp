// The functions of CUDA's driver that Triton, Inductor and torch's memory snapshots call; all others are refused.
#include "card.h"
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#define API EXPORT CUresult

static CUresult code(cudaError_t of_runtime) { return static_cast<CUresult>(of_runtime); }  // the same numbers

API cuInit(unsigned) {
  int count;
  return code(cudaGetDeviceCount(&count));
}
API cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { return code(cudaGetDeviceCount(count)); }
API cuDeviceGet(CUdevice* device, int index) { *device = index; return CUDA_SUCCESS; }
API cuDeviceGetName(char* name, int size, CUdevice) {
  strncpy(name, card::settings().name.c_str(), size);
  return CUDA_SUCCESS;
}
API cuDeviceTotalMem(size_t* bytes, CUdevice) { *bytes = card::settings().memory; return CUDA_SUCCESS; }
API cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice device) {
  *value = card::attribute(number, device);
  return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }

// A context is the number of its device plus one.
static CUcontext context(intptr_t device) { return reinterpret_cast<CUcontext>(device + 1); }
API cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) { *found = context(device); return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API cuCtxGetDevice(CUdevice* device) { return code(cudaGetDevice(device)); }
API cuCtxGetCurrent(CUcontext* found) {
  int device;
  cudaGetDevice(&device);
  *found = context(device);
  return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext of) {
  return of ? code(cudaSetDevice(reinterpret_cast<intptr_t>(of) - 1)) : CUDA_SUCCESS;
}
API cuCtxPushCurrent(CUcontext of) { return cuCtxSetCurrent(of); }
API cuCtxPopCurrent(CUcontext* found) { return cuCtxGetCurrent(found); }
API cuCtxSynchronize() { return code(cudaDeviceSynchronize()); }
API cuCtxGetLimit(size_t* value, CUlimit) { *value = 8 << 20; return CUDA_SUCCESS; }
API cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
API cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
API cuStreamSynchronize(CUstream stream) { return code(cudaStreamSynchronize(stream)); }

API cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return code(cudaGraphGetNodes(graph, nodes, count));
}

// A function is a copy of its name; a module is empty, since its code is never run.
API cuModuleLoadData(CUmodule* made, const void*) { *made = reinterpret_cast<CUmodule>(1); return CUDA_SUCCESS; }
API cuModuleLoadDataEx(CUmodule* made, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(made, image);
}
API cuModuleLoad(CUmodule* made, const char*) { return cuModuleLoadData(made, nullptr); }
API cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* found, CUmodule, const char* name) {
  char* copy = strdup(name);
  card::name_kernel(copy, copy);
  *found = reinterpret_cast<CUfunction>(copy);
  return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute number, int value) {
  bool shared = number == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  return shared ? code(card::allow_shared(kernel, value)) : CUDA_SUCCESS;
}
API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int threads, size_t shared) {
  *count = card::blocks_per_multiprocessor(threads, shared);
  return CUDA_SUCCESS;
}
API cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) { *count = 1; return CUDA_SUCCESS; }
API cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

API cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, CUstream stream, void**, void**) {
  return code(card::launch(kernel, {gx, gy, gz}, {bx, by, bz}, shared, stream));
}
API cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction kernel, void**, void**) {
  dim3 grid{how->gridDimX, how->gridDimY, how->gridDimZ}, block{how->blockDimX, how->blockDimY, how->blockDimZ};
  return code(card::launch(kernel, grid, block, how->sharedMemBytes, how->hStream));
}
API cuLaunchCooperativeKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, CUstream stream, void**) {
  return cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, nullptr, nullptr);
}
API cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr address) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, reinterpret_cast<void*>(address));
  if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  bool pointer = number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || number == CU_POINTER_ATTRIBUTE_HOST_POINTER;
  if (pointer) *static_cast<CUdeviceptr*>(value) = address;
  else if (number == CU_POINTER_ATTRIBUTE_CONTEXT) *static_cast<CUcontext*>(value) = context(found.device);
  else *static_cast<int*>(value) = number == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? found.type : found.device;
  return CUDA_SUCCESS;
}
API cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}

static CUresult refused() { return CUDA_ERROR_NOT_SUPPORTED; }
static void* entry(const char* symbol) {
  void* found = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
  if (!found) found = dlsym(RTLD_DEFAULT, symbol);
  return found ? found : reinterpret_cast<void*>(refused);
}
API cuGetProcAddress(const char* symbol, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *found = entry(symbol);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  *found = entry(symbol);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
