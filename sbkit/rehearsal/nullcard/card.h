// What the stand-ins for CUDA's runtime, driver, NCCL and the libraries of kernels share.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>
#include <cuda_runtime_api.h>
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace card {

// The card, as environment() of __init__.py describes it.
struct Settings {
  std::string name, log;
  size_t memory, shared_memory;
  int count, multiprocessors, major, minor, threads, patience, rank;
};
const Settings& settings();
int attribute(int number, int device);  // cudaDeviceAttr and CUdevice_attribute have the same numbers

extern std::recursive_mutex lock;
void write_log(const std::string& json);              // a line of the log of this rank
void error(const char* format, ...);                  // what a real card would refuse, for log and Python
std::string quoted(const std::string& text);          // as a string of JSON

// Launches. Functions of libraries, such as cublasGemmEx, count as one kernel of that name.
void name_kernel(const void* kernel, const char* name);
cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
void launch_library(const char* name);
cudaError_t allow_shared(const void* kernel, size_t bytes);
int blocks_per_multiprocessor(int threads, size_t shared);

// A collective is over once every rank of its communicator has called it.
struct Communicator;
struct Wait { Communicator* communicator; uint64_t order; };
using Waits = std::vector<Wait>;
bool over(Waits& waits);          // whether nothing is waited for; what is over is dropped
cudaError_t settle(Waits& waits); // waits; an error if another rank doesn't come
void wait_on(cudaStream_t stream, Wait wait);

}  // namespace card
