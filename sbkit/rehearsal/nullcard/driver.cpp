// CUDA's driver, as Triton, Inductor and torch's graphs of memory call it; what is not here is refused.
#include "card.h"
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>

static CUresult code(cudaError_t of_runtime) { return static_cast<CUresult>(of_runtime); }  // the same numbers

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* count) { return code(cudaGetDeviceCount(count)); }
EXPORT CUresult cuDeviceGet(CUdevice* device, int index) { *device = index; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice) { strncpy(name, card::settings().name.c_str(), size); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { *bytes = card::settings().memory; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice device) { *value = card::attribute(number, device); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }

// A context is the number of its device plus one.
static CUcontext context(intptr_t device) { return reinterpret_cast<CUcontext>(device + 1); }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) { *found = context(device); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { return code(cudaGetDevice(device)); }
EXPORT CUresult cuCtxGetCurrent(CUcontext* found) {
  int device;
  cudaGetDevice(&device);
  *found = context(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext of) { return of ? code(cudaSetDevice(reinterpret_cast<intptr_t>(of) - 1)) : CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext of) { return cuCtxSetCurrent(of); }
EXPORT CUresult cuCtxPopCurrent(CUcontext* found) { return cuCtxGetCurrent(found); }
EXPORT CUresult cuCtxSynchronize() { return code(cudaDeviceSynchronize()); }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) { *value = 8 << 20; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) { *text = cudaGetErrorString(static_cast<cudaError_t>(error)); return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) { *text = cudaGetErrorName(static_cast<cudaError_t>(error)); return CUDA_SUCCESS; }
EXPORT CUresult cuStreamSynchronize(CUstream stream) { return code(cudaStreamSynchronize(stream)); }

// A function is a copy of its name; a module is nothing, since its code is never run.
EXPORT CUresult cuModuleLoadData(CUmodule* made, const void*) { *made = reinterpret_cast<CUmodule>(1); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* made, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(made, image); }
EXPORT CUresult cuModuleLoad(CUmodule* made, const char*) { return cuModuleLoadData(made, nullptr); }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* found, CUmodule, const char* name) {
  char* copy = strdup(name);
  card::name_kernel(copy, copy);
  *found = reinterpret_cast<CUfunction>(copy);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute number, int value) {
  return number == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? code(card::allow_shared(kernel, value)) : CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int threads, size_t shared) {
  *count = card::blocks_per_multiprocessor(threads, shared);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) { *count = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void**, void**) {
  return code(card::launch(kernel, {gx, gy, gz}, {bx, by, bz}, shared, stream));
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction kernel, void**, void**) {
  return code(card::launch(kernel, {how->gridDimX, how->gridDimY, how->gridDimZ}, {how->blockDimX, how->blockDimY, how->blockDimZ}, how->sharedMemBytes, how->hStream));
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void**) {
  return cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, nullptr, nullptr);
}
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr address) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, reinterpret_cast<void*>(address));
  if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  if (number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || number == CU_POINTER_ATTRIBUTE_HOST_POINTER) *static_cast<CUdeviceptr*>(value) = address;
  else if (number == CU_POINTER_ATTRIBUTE_CONTEXT) *static_cast<CUcontext*>(value) = context(found.device);
  else *static_cast<int*>(value) = number == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? found.type : found.device;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *bytes = 2 << 20; return CUDA_SUCCESS; }

static CUresult refused() { return CUDA_ERROR_NOT_SUPPORTED; }
static void* entry(const char* symbol) {
  void* found = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
  if (!found) found = dlsym(RTLD_DEFAULT, symbol);
  return found ? found : reinterpret_cast<void*>(refused);
}
EXPORT CUresult cuGetProcAddress(const char* symbol, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *found = entry(symbol);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *found = entry(symbol);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
