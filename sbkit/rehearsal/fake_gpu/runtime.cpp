// CUDA's runtime without a card. Memory is mapped lazily from the host's and begins as zeros, copies are made, kernels
// are checked and counted but not run, streams and captures are kept as states, and events have the time of the host.
#include "card.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <cxxabi.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#define API EXPORT cudaError_t

using Guard = std::lock_guard<std::recursive_mutex>;

namespace {

constexpr size_t kBlock = 2 << 20;       // the smallest mapping of the driver
constexpr size_t kContext = 550ul << 20; // memory of a process besides its tensors
constexpr size_t kCopied = 1 << 20;      // larger copies on a card are skipped: they would fill the host
constexpr size_t kReplayed = 1 << 12;    // and in graphs, whose launches take no time of the host
constexpr int kMaxCards = 64;

const char* variable(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
size_t number(const char* name, size_t otherwise) {
  const char* value = variable(name, "");
  return *value ? strtoull(value, nullptr, 10) : otherwise;
}

int visible(int count) {
  const char* listed = getenv("CUDA_VISIBLE_DEVICES");
  if (!listed) return count;
  int found = 0;
  for (const char* at = listed; *at && *at != '-'; at = strchr(at, ',') ? strchr(at, ',') + 1 : "") found++;
  return std::min(found, count);
}

struct Region { size_t size; int device; bool host; };
std::map<uintptr_t, Region> regions;
size_t used[kMaxCards];

struct Graph { std::vector<std::function<void()>> copies; uint64_t kernels = 0; };
struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Graph* graph;
  bool open = true, broken = false;
};
struct Stream { int priority = 0; std::shared_ptr<Capture> capture; card::Waits waits; };
struct Event { std::chrono::steady_clock::time_point at; std::shared_ptr<Capture> capture; card::Waits waits; };
Stream defaults[kMaxCards];
card::Waits device_waits;  // of all streams
std::vector<std::shared_ptr<Capture>> open_captures;

thread_local int current = 0;
thread_local cudaStream_t library_stream = nullptr;  // the one that this thread's libraries were given last
thread_local cudaError_t last = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::atomic<uint64_t> launches, copies, allocations, synchronisations, captures;
std::vector<std::string> errors, missing;
std::unordered_map<const void*, const char*> names;
std::unordered_map<const void*, size_t> shared_allowed;

bool started = false, forked = false;
__attribute__((constructor)) void loaded() {
  pthread_atfork(nullptr, nullptr, [] { forked = started; });
  if (size_t bytes = number("SBKIT_CARD_ADDRESS_SPACE", 0)) {  // stops allocations whose size no kernel has computed
    rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
  }
}

cudaError_t record_error(cudaError_t code) {
  if (code != cudaSuccess && code != cudaErrorNotReady) last = code;
  return code;
}

Stream* of(cudaStream_t stream) {
  bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &defaults[current] : reinterpret_cast<Stream*>(stream);
}
Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
bool capturing(const Stream* stream) { return stream->capture && stream->capture->open; }

// Whether a running capture forbids this call, which can't be captured; as on a real card, the capture then fails.
bool forbidden(const char* what) {
  Guard guard(card::lock);
  for (auto& capture : open_captures) {
    bool own = capture->thread == std::this_thread::get_id();
    bool strict = own ? capture->mode != cudaStreamCaptureModeRelaxed
                      : capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (!strict || capture_mode == cudaStreamCaptureModeRelaxed) continue;
    capture->broken = true;
    card::error("%s while a CUDA graph is captured", what);
    return true;
  }
  return false;
}

std::map<uintptr_t, Region>::iterator region_of(const void* address) {
  auto next = regions.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == regions.begin()) return regions.end();
  auto found = std::prev(next);
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second.size ? found : regions.end();
}
bool on_card(const void* address) {
  auto found = region_of(address);
  return found != regions.end() && !found->second.host;
}

cudaError_t allocate(void** address, size_t bytes, bool host) {
  Guard guard(card::lock);
  if (forked) return record_error(cudaErrorInitializationError);
  started = true;
  allocations++;
  size_t unit = host ? 4096 : kBlock, size = std::max<size_t>((bytes + unit - 1) / unit, 1) * unit;
  bool fits = host || kContext + used[current] + size <= card::settings().memory;
  if (!fits) return record_error(cudaErrorMemoryAllocation);
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return record_error(cudaErrorMemoryAllocation);
  regions[reinterpret_cast<uintptr_t>(mapped)] = {size, current, host};
  if (!host) used[current] += size;
  *address = mapped;
  return cudaSuccess;
}
cudaError_t release(void* address) {
  Guard guard(card::lock);
  auto found = regions.find(reinterpret_cast<uintptr_t>(address));
  if (!address) return cudaSuccess;
  if (found == regions.end()) return record_error(cudaErrorInvalidValue);
  if (!found->second.host) used[found->second.device] -= found->second.size;
  munmap(address, found->second.size);
  regions.erase(found);
  return cudaSuccess;
}

void move(void* to, const void* from, size_t bytes, size_t most = kCopied) {
  { Guard guard(card::lock); if (bytes > most && on_card(to) && on_card(from)) return; }
  memmove(to, from, bytes);
}
void fill(void* to, int value, size_t bytes, size_t most = kCopied) {
  auto begin = (reinterpret_cast<uintptr_t>(to) + 4095) & ~4095ul;
  auto end = (reinterpret_cast<uintptr_t>(to) + bytes) & ~4095ul;
  if (bytes <= most) memset(to, value, bytes);
  else if (!value && most == kCopied) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // zeros without memory
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  copies++;
  if (capturing(of(stream))) {
    Guard guard(card::lock);
    if (region_of(to) == regions.end() || region_of(from) == regions.end()) {
      of(stream)->capture->broken = true;
      card::error("a copy from or to pageable memory while a CUDA graph is captured");
      return record_error(cudaErrorStreamCaptureUnsupported);
    }
  }
  size_t most = capturing(of(stream)) ? kReplayed : kCopied;
  return card::run(stream, [=] { move(to, from, bytes, most); });
}
cudaError_t synchronise(card::Waits& waits, const char* what) {
  synchronisations++;
  if (forbidden(what)) return record_error(cudaErrorStreamCaptureUnsupported);
  return record_error(card::wait_for_all(waits));
}

const char* name_of(const void* kernel) {
  auto found = names.find(kernel);
  return found == names.end() ? "an unnamed kernel" : found->second;
}
std::string readable(const char* name) {
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  std::string text = plain ? plain : name;
  free(plain);
  return text;
}

}  // namespace

// ---- functions for the other files and Python

namespace card {

std::recursive_mutex lock;

const Settings& settings() {
  static const Settings made = [] {
    Settings card;
    card.name = variable("SBKIT_CARD_NAME", "fake GPU");
    card.memory = number("SBKIT_CARD_MEMORY", 16ul << 30);
    card.shared_memory = number("SBKIT_CARD_SHARED_MEMORY", 64 << 10);
    card.count = visible(std::min<size_t>(number("SBKIT_CARD_COUNT", 1), kMaxCards));
    card.multiprocessors = number("SBKIT_CARD_MULTIPROCESSORS", 80);
    card.major = number("SBKIT_CARD_MAJOR", 8);
    card.minor = number("SBKIT_CARD_MINOR", 0);
    card.threads = number("SBKIT_CARD_THREADS", 2048);
    card.patience = number("SBKIT_CARD_PATIENCE", 120);
    return card;
  }();
  return made;
}

int attribute(int number, int device) {
  const Settings& card = settings();
  switch (number) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card.shared_memory;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card.shared_memory + 1024;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrTotalConstantMemory: case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return card.multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return card.threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return card.major;
    case cudaDevAttrComputeCapabilityMinor: return card.minor;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrClockRate: return 1500000;
    case cudaDevAttrMemoryClockRate: return 2000000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrPciBusId: return 16 + device;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    default: return 0;
  }
}

void error(const char* format, ...) {
  char text[1024];
  va_list given;
  va_start(given, format);
  vsnprintf(text, sizeof text, format, given);
  va_end(given);
  Guard guard(lock);
  errors.push_back(text);
}

void lacks(const char* name) { Guard guard(lock); missing.push_back(name); }

void name_kernel(const void* kernel, const char* name) { Guard guard(lock); names[kernel] = name; }

void use_stream(cudaStream_t stream) { library_stream = stream; }

// Autograd's threads launch into the stream that another thread captures.
void launch_library() {
  Guard guard(lock);
  if (capturing(of(library_stream))) of(library_stream)->capture->graph->kernels++;
  else launches++;
}

cudaError_t run(cudaStream_t stream, std::function<void()> work) {
  if (capturing(of(stream))) of(stream)->capture->graph->copies.push_back(std::move(work));
  else work();
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  Guard guard(lock);
  auto allowed = shared_allowed.find(kernel);
  size_t max_shared = allowed == shared_allowed.end() ? 48 << 10 : std::max<size_t>(allowed->second, 48 << 10);
  bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  bool large = grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535;
  bool wide = block.x > 1024 || block.y > 1024 || block.z > 64 || size_t(block.x) * block.y * block.z > 1024;
  if (empty || large || wide || shared > max_shared) {
    error("invalid launch of %s: a grid of %u x %u x %u blocks of %u x %u x %u threads with %zu bytes of shared memory "
          "each; %s", readable(name_of(kernel)).c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
          empty ? "nothing to launch" : large ? "at most 2147483647 x 65535 x 65535 blocks" :
          wide ? "at most 1024 threads, 64 in the last dimension" : "more shared memory than the kernel may use");
    return record_error(empty || large || wide ? cudaErrorInvalidConfiguration : cudaErrorInvalidValue);
  }
  if (capturing(of(stream))) of(stream)->capture->graph->kernels++;
  else launches++;
  return cudaSuccess;
}

cudaError_t allow_shared(const void* kernel, size_t bytes) {
  Guard guard(lock);
  if (bytes > settings().shared_memory) {
    error("%s wants %zu bytes of shared memory for each block; %s has %zu", readable(name_of(kernel)).c_str(), bytes,
          settings().name.c_str(), settings().shared_memory);
    return record_error(cudaErrorInvalidValue);
  }
  shared_allowed[kernel] = bytes;
  return cudaSuccess;
}

int blocks_per_multiprocessor(int threads, size_t shared) {
  int by_threads = settings().threads / std::max(threads, 1);
  int by_memory = (settings().shared_memory + 1024) / (shared + 1024);
  return std::min({by_threads, by_memory, 32});
}

void wait_on(cudaStream_t stream, Wait wait) {
  Guard guard(lock);
  of(stream)->waits.push_back(wait);
  all_finished(device_waits);
  device_waits.push_back(wait);
}

}  // namespace card

EXPORT uint64_t sbkit_card_count(const char* what) {
  if (!strcmp(what, "launches")) return launches;
  if (!strcmp(what, "copies")) return copies;
  if (!strcmp(what, "allocations")) return allocations;
  if (!strcmp(what, "synchronisations")) return synchronisations;
  return captures;
}
EXPORT void sbkit_card_errors(void (*visit)(const char*)) {
  Guard guard(card::lock);
  for (auto& text : errors) visit(text.c_str());
}
EXPORT void sbkit_card_lacks(void (*visit)(const char*)) {
  Guard guard(card::lock);
  for (auto& name : missing) visit(name.c_str());
}

// ---- devices

API cudaGetDeviceCount(int* count) {
  if (forked) return record_error(cudaErrorInitializationError);
  started = true;
  *count = card::settings().count;
  return *count ? cudaSuccess : record_error(cudaErrorNoDevice);
}
API cudaSetDevice(int device) {
  if (forked) return record_error(cudaErrorInitializationError);
  if (device < 0 || device >= card::settings().count) return record_error(cudaErrorInvalidDevice);
  started = true;
  current = device;
  return cudaSuccess;
}
API cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
API cudaDeviceSynchronize() { return synchronise(device_waits, "cudaDeviceSynchronize"); }
API cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaPeekAtLastError() { return last; }
EXPORT const char* cudaGetErrorString(cudaError_t code) { return card::error_text(code); }
EXPORT const char* cudaGetErrorName(cudaError_t code) { return card::error_text(code); }
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int device) {
  *value = card::attribute(number, device);
  return cudaSuccess;
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  const card::Settings& card = card::settings();
  auto get = [&](cudaDeviceAttr number) { return card::attribute(number, device); };
  if (device < 0 || device >= card.count) return record_error(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card.name.c_str());
  memset(&p->uuid, device + 1, sizeof p->uuid);
  p->totalGlobalMem = card.memory;
  p->major = card.major;
  p->minor = card.minor;
  p->multiProcessorCount = card.multiprocessors;
  p->maxThreadsPerMultiProcessor = card.threads;
  p->maxThreadsPerBlock = 1024;
  p->warpSize = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = get(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = card.shared_memory;
  p->sharedMemPerMultiprocessor = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = get(cudaDevAttrL2CacheSize);
  p->textureAlignment = 512;
  p->pciBusID = get(cudaDevAttrPciBusId);
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 16 + device);
  return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }

// ---- memory

API cudaMalloc(void** address, size_t bytes) {
  return forbidden("cudaMalloc") ? record_error(cudaErrorStreamCaptureUnsupported) : allocate(address, bytes, false);
}
API cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return allocate(address, bytes, false); }
API cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes, true); }
API cudaFree(void* address) { return release(address); }
API cudaFreeAsync(void* address, cudaStream_t) { return release(address); }
API cudaFreeHost(void* address) { return release(address); }
API cudaHostRegister(void* address, size_t bytes, unsigned) {
  Guard guard(card::lock);
  regions[reinterpret_cast<uintptr_t>(address)] = {bytes, current, true};
  return cudaSuccess;
}
API cudaHostUnregister(void* address) {
  Guard guard(card::lock);
  regions.erase(reinterpret_cast<uintptr_t>(address));
  return cudaSuccess;
}
API cudaMemGetInfo(size_t* free, size_t* total) {
  Guard guard(card::lock);
  *total = card::settings().memory;
  *free = *total - std::min(*total, used[current] + kContext);
  return cudaSuccess;
}
API cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Guard guard(card::lock);
  auto region = region_of(address);
  bool known = region != regions.end(), host = !known || region->second.host;
  memset(found, 0, sizeof *found);
  found->type = !known ? cudaMemoryTypeUnregistered : host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = known ? region->second.device : -2;
  found->devicePointer = known ? const_cast<void*>(address) : nullptr;
  found->hostPointer = host ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}
API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  cudaError_t code = synchronise(of(cudaStream_t(nullptr))->waits, "cudaMemcpy");
  return code ? code : copy(to, from, bytes, nullptr);
}
API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream) {
  copies++;
  return card::run(stream, [=] {
    for (size_t row = 0; row < height; row++)
      move(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
}
API cudaGetSymbolAddress(void** address, const void*) {
  static char constants[65536];
  *address = constants;
  return cudaSuccess;
}
API cudaMemset(void* to, int value, size_t bytes) { fill(to, value, bytes); return cudaSuccess; }
API cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  size_t most = capturing(of(stream)) ? kReplayed : kCopied;
  return card::run(stream, [=] { fill(to, value, bytes, most); });
}
API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(&used[device]);
  return cudaSuccess;
}
API cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

// ---- streams and events

API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}
API cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) { delete of(stream); return cudaSuccess; }
API cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = of(stream)->priority; return cudaSuccess; }
API cudaStreamSynchronize(cudaStream_t stream) { return synchronise(of(stream)->waits, "cudaStreamSynchronize"); }
API cudaStreamQuery(cudaStream_t stream) {
  if (forbidden("cudaStreamQuery")) return record_error(cudaErrorStreamCaptureUnsupported);
  return card::all_finished(of(stream)->waits) ? cudaSuccess : cudaErrorNotReady;
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Guard guard(card::lock);
  auto& waits = of(stream)->waits;
  waits.insert(waits.end(), of(event)->waits.begin(), of(event)->waits.end());
  if (of(event)->capture && of(event)->capture->open) of(stream)->capture = of(event)->capture;  // it joins the capture
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return card::run(stream, [=] { function(data); });
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{});
  return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) { delete of(event); return cudaSuccess; }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Guard guard(card::lock);
  card::all_finished(of(stream)->waits);
  *of(event) = {std::chrono::steady_clock::now(), of(stream)->capture, of(stream)->waits};
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaEventQuery(cudaEvent_t event) {
  if (of(event)->capture && of(event)->capture->open) {
    card::error("cudaEventQuery of an event that a CUDA graph captures");
    return record_error(cudaErrorCapturedEvent);
  }
  return card::all_finished(of(event)->waits) ? cudaSuccess : cudaErrorNotReady;
}
API cudaEventSynchronize(cudaEvent_t event) { return synchronise(of(event)->waits, "cudaEventSynchronize"); }
API cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = std::chrono::duration<float, std::milli>(of(to)->at - of(from)->at).count();
  return cudaSuccess;
}

// ---- CUDA graphs: the copies of a captured graph run at each launch

API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Guard guard(card::lock);
  of(stream)->capture = std::make_shared<Capture>(Capture{++captures, mode, std::this_thread::get_id(), new Graph});
  open_captures.push_back(of(stream)->capture);
  return cudaSuccess;
}
API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Guard guard(card::lock);
  auto capture = std::exchange(of(stream)->capture, nullptr);
  if (!capture || !capture->open) return record_error(cudaErrorIllegalState);
  capture->open = false;
  open_captures.erase(std::find(open_captures.begin(), open_captures.end(), capture));
  *graph = capture->broken ? nullptr : reinterpret_cast<cudaGraph_t>(capture->graph);
  return capture->broken ? record_error(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
static cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  if (!capturing(of(stream))) return cudaStreamCaptureStatusNone;
  return of(stream)->capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = status_of(stream);
  return cudaSuccess;
}
static cudaError_t describe(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                            cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* count) {
  *status = status_of(stream);
  bool active = *status == cudaStreamCaptureStatusActive;
  if (id && active) *id = of(stream)->capture->id;
  if (graph && active) *graph = reinterpret_cast<cudaGraph_t>(of(stream)->capture->graph);
  if (nodes) *nodes = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
API cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData**, size_t* count) {
  return describe(stream, status, id, graph, nodes, count);
}
API cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}
#else
API cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* count) {
  return describe(stream, status, id, graph, nodes, count);
}
API cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, size_t* count) { *count = 0; return cudaSuccess; }
#endif
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  launches++;
  for (auto& work : reinterpret_cast<Graph*>(graph)->copies) work();
  return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) { delete reinterpret_cast<Graph*>(graph); return cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t graph) { delete reinterpret_cast<Graph*>(graph); return cudaSuccess; }
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  auto captured = reinterpret_cast<Graph*>(graph);
  *count = captured->kernels + captured->copies.size();
  return cudaSuccess;
}

// ---- kernels

API cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = card::settings().major * 10 + card::settings().minor;
  found->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute number, int value) {
  return number == cudaFuncAttributeMaxDynamicSharedMemorySize ? card::allow_shared(kernel, value) : cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int threads, size_t shared,
    unsigned) {
  *count = card::blocks_per_multiprocessor(threads, shared);
  return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* kernel, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, kernel, threads, shared, 0);
}
API cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return card::launch(kernel, grid, block, shared, stream);
}
API cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return card::launch(kernel, grid, block, shared, stream);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void**) {
  return card::launch(kernel, how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}

// Functions that the compiler calls from each object file with kernels.
EXPORT void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*,
    void*, int*) {
  card::name_kernel(kernel, name);
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return card::launch(kernel, grid, block, shared, stream);
}
struct Configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Configuration> configurations;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto [g, b, n, s] = configurations.back();
  configurations.pop_back();
  *grid = g, *block = b, *shared = n, *static_cast<cudaStream_t*>(stream) = s;
  return cudaSuccess;
}
