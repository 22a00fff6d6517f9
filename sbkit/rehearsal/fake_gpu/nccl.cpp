// NCCL between processes of one machine. A call finishes once every rank has called it. Ranks count their calls in a
// file that all map, and that is unlinked once all have. Small broadcasts and gathers really exchange data, because
// sizes and objects are sent with them; after a reduction each rank keeps its own values.
#include "card.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>
#define API EXPORT int

namespace {

constexpr size_t kSmall = 1 << 16;  // bytes of each rank
struct Rank { std::atomic<uint64_t> joined, calls, published, released; char latest[64], data[kSmall]; };
const char* const kTypes[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                              "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"};
const size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

}  // namespace

struct card::Communicator {
  std::string name;
  int rank, size;
  Rank* ranks;
  uint64_t calls = 0, exchanges = 0, splits = 0;
  bool failed = false;
  std::atomic<bool> aborted{false};
};

namespace {

using card::Communicator;
struct Id { char bytes[128]; };

bool all(Communicator* c, const std::function<bool(Rank&)>& holds) {
  for (int i = 0; i < c->size; i++)
    if (!holds(c->ranks[i])) return false;
  return true;
}

// Waits for other ranks; if they don't join in time, records which ranks wait for which.
bool wait_for(Communicator* c, const std::function<bool(Rank&)>& holds) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(card::settings().patience);
  while (!c->aborted && !all(c, holds)) {
    if (std::chrono::steady_clock::now() > end) {
      std::string late;
      for (int i = 0; i < c->size; i++) {
        Rank& other = c->ranks[i];
        if (holds(other)) continue;
        late += (late.empty() ? "" : ", ") + std::to_string(i) + " (" + std::to_string(other.calls) + " calls";
        late += other.calls ? std::string(", the latest ") + other.latest + ")" : ")";
      }
      if (!c->failed)
        card::error("rank %d of %d waits in its call %lu of NCCL, %s, for rank %s, which did not join in %d seconds",
                    c->rank, c->size, c->calls, c->ranks[c->rank].latest, late.c_str(), card::settings().patience);
      c->failed = true;
      return false;
    }
    usleep(200);
  }
  return true;
}

Communicator* join(const std::string& name, int size, int rank) {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder ? folder : "/tmp") + "/sbkit-nccl-" + name;
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, size * sizeof(Rank))) return nullptr;
  void* mapped = mmap(nullptr, size * sizeof(Rank), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return nullptr;
  auto created = new Communicator{name, rank, size, static_cast<Rank*>(mapped)};
  created->ranks[rank].joined = 1;
  if (all(created, [](Rank& r) -> bool { return r.joined; })) unlink(path.c_str());
  return created;
}

// Publishes this rank's data (nullptr: none). Each rank's data can then be fetched until release().
bool publish(Communicator* c, const void* data, size_t bytes) {
  uint64_t turn = ++c->exchanges;
  Rank& own = c->ranks[c->rank];
  if (!data) return true;
  if (!wait_for(c, [=](Rank& r) { return r.released >= turn - 1; })) return false;
  memcpy(own.data, data, bytes);
  own.published = turn;
  return true;
}
bool fetch(Communicator* c, int from, void* data, size_t bytes) {
  Rank* sender = &c->ranks[from];
  uint64_t turn = c->exchanges;
  if (!wait_for(c, [=](Rank& r) { return &r != sender || r.published >= turn; })) return false;
  memcpy(data, sender->data, bytes);
  return true;
}
void release(Communicator* c) { c->ranks[c->rank].released = c->exchanges; }

int record_call(const char* kind, size_t count, int type, Communicator* c, cudaStream_t stream, bool by_all = true) {
  card::use_stream(stream);
  card::launch_library();
  snprintf(c->ranks[c->rank].latest, sizeof Rank::latest, "%s of %zu %s", kind, count, kTypes[type]);
  if (by_all) card::run(stream, [=] {
    c->ranks[c->rank].calls = ++c->calls;
    card::wait_on(stream, {c, c->calls});
  });
  return 0;
}

}  // namespace

namespace card {

bool all_finished(Waits& waits) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto left = std::remove_if(waits.begin(), waits.end(), [](Wait& w) {
    return w.communicator->aborted || all(w.communicator, [&](Rank& r) { return r.calls >= w.order; });
  });
  waits.erase(left, waits.end());
  return waits.empty();
}
cudaError_t wait_for_all(Waits& waits) {
  Waits all;
  { std::lock_guard<std::recursive_mutex> guard(lock); all_finished(waits); all = waits; }
  for (Wait& wait : all)
    if (!wait_for(wait.communicator, [&](Rank& r) { return r.calls >= wait.order; })) return cudaErrorLaunchTimeout;
  all_finished(waits);
  return cudaSuccess;
}

}  // namespace card

API ncclGetUniqueId(Id* id) { return getrandom(id->bytes, sizeof id->bytes, 0) < 0; }
API ncclCommInitRank(Communicator** created, int size, Id id, int rank) {
  char name[17];
  for (int i = 0; i < 8; i++) snprintf(name + 2 * i, 3, "%02x", static_cast<unsigned char>(id.bytes[i]));
  *created = join(name, size, rank);
  return *created ? 0 : 2;
}
API ncclCommInitRankConfig(Communicator** created, int size, Id id, int rank, void*) {
  return ncclCommInitRank(created, size, id, rank);
}
API ncclCommInitRankScalable(Communicator** created, int size, int rank, int, Id* ids, void*) {
  return ncclCommInitRank(created, size, ids[0], rank);
}
API ncclCommSplit(Communicator* c, int color, int key, Communicator** created, void*) {
  struct Choice { int color, key; } own{color, key}, other;
  int rank = 0, size = 0;
  if (!publish(c, &own, sizeof own)) return 2;
  for (int i = 0; i < c->size; i++) {
    if (!fetch(c, i, &other, sizeof other)) return 2;
    if (other.color != color) continue;
    size++;
    rank += other.key < key || (other.key == key && i < c->rank);
  }
  release(c);
  std::string name = c->name + "-" + std::to_string(++c->splits) + "." + std::to_string(color);
  *created = color < 0 ? nullptr : join(name, size, rank);
  return color < 0 || *created ? 0 : 2;
}
API ncclCommCount(Communicator* c, int* count) { *count = c->size; return 0; }
API ncclCommUserRank(Communicator* c, int* rank) { *rank = c->rank; return 0; }
API ncclCommGetAsyncError(Communicator* c, int* error) { *error = c->failed ? 6 : 0; return 0; }
API ncclCommAbort(Communicator* c) { c->aborted = true; return 0; }
EXPORT const char* ncclGetLastError(Communicator*) { return ""; }
API ncclMemAlloc(void** address, size_t bytes) { return cudaMalloc(address, bytes); }
API ncclMemFree(void* address) { return cudaFree(address); }
API ncclRedOpCreatePreMulSum(int* operation, void*, int, int, Communicator*) { *operation = 5; return 0; }

API ncclAllReduce(const void* from, void* to, size_t count, int type, int, Communicator* c,
    cudaStream_t stream) {
  record_call("all_reduce", count, type, c, stream);
  return from == to ? 0 : cudaMemcpyAsync(to, from, count * kBytes[type], cudaMemcpyDeviceToDevice, stream);
}
API ncclReduce(const void*, void*, size_t count, int type, int, int, Communicator* c, cudaStream_t stream) {
  return record_call("reduce", count, type, c, stream);
}
API ncclReduceScatter(const void*, void*, size_t count, int type, int, Communicator* c, cudaStream_t stream) {
  return record_call("reduce_scatter", count, type, c, stream);
}
API ncclAlltoAll(const void*, void*, size_t count, int type, Communicator* c, cudaStream_t stream) {
  return record_call("all_to_all", count, type, c, stream);
}
API ncclSend(const void*, size_t count, int type, int, Communicator* c, cudaStream_t stream) {
  return record_call("send", count, type, c, stream, false);
}
API ncclRecv(void*, size_t count, int type, int, Communicator* c, cudaStream_t stream) {
  return record_call("recv", count, type, c, stream, false);
}
API ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* c, cudaStream_t stream) {
  size_t bytes = count * kBytes[type];
  record_call("all_gather", count, type, c, stream);
  if (bytes > kSmall) return 0;
  if (!publish(c, from, bytes)) return 2;
  for (int i = 0; i < c->size; i++)
    if (!fetch(c, i, static_cast<char*>(to) + i * bytes, bytes)) return 2;
  release(c);
  return 0;
}
API ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* c, cudaStream_t stream) {
  size_t bytes = count * kBytes[type];
  record_call("broadcast", count, type, c, stream);
  if (bytes > kSmall) return 0;
  if (!publish(c, c->rank == root ? from : nullptr, bytes)) return 2;
  if (c->rank == root ? from != to && !memmove(to, from, bytes) : !fetch(c, root, to, bytes)) return 2;
  release(c);
  return 0;
}
API ncclBcast(void* data, size_t count, int type, int root, Communicator* c, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, c, stream);
}
