// The planned arena as an allocator of torch's for CUDA (torch.cuda.memory.CUDAPluggableAllocator): for one stream of
// one device. Requests that have no place there, and those of other streams, go to the driver's pool, which keeps what
// is given back (cudaMallocAsync).
//
// Memory that is given back is used again by the same stream, so kernels that were launched before are through by then.
// Where other streams were told of (record_stream), that stream waits for these first.
#include "planned.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace hybridpar {
namespace {

struct Front {
  std::mutex mutex;
  std::unordered_map<void*, std::vector<cudaStream_t>> others;  // streams that use a block besides its own
  bool has_stream = false;
  int device = 0;
  cudaStream_t stream = nullptr;
};

Front& front() {
  static auto* one = new Front;
  return *one;
}

bool is_planned(int device, cudaStream_t stream) {
  auto& f = front();
  const std::lock_guard lock(f.mutex);
  return f.has_stream && f.device == device && f.stream == stream;
}

// Has `stream` wait for all that uses the block elsewhere.
void join(void* block, cudaStream_t stream) {
  std::vector<cudaStream_t> others;
  {
    auto& f = front();
    const std::lock_guard lock(f.mutex);
    const auto found = f.others.find(block);
    if (found == f.others.end()) return;
    others = std::move(found->second);
    f.others.erase(found);
  }
  for (auto* other : others) {
    cudaEvent_t event;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, other);
    cudaStreamWaitEvent(stream, event, 0);
    cudaEventDestroy(event);  // once it is over
  }
}

class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    device_ = device;
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0, device_ = 0;
};

}  // namespace

void* map_arena(size_t bytes) {
  const OnDevice guard(front().device);
  void* base = nullptr;
  if (cudaMalloc(&base, bytes) == cudaSuccess) return base;
  cudaGetLastError();
  return nullptr;
}

// Blocks may have been given back by the host before kernels on them are through; cudaFree waits for these.
void unmap_arena(void* base, size_t) { cudaFree(base); }

}  // namespace hybridpar

using namespace hybridpar;

HYBRIDPAR_EXPORT void hybridpar_planned_turn_to(int64_t span) { planned().turn_to(span); }

// The stream whose requests are planned. Has the driver keep what is given back.
HYBRIDPAR_EXPORT int hybridpar_planned_install(int device, void* stream) {
  auto& f = front();
  const std::lock_guard lock(f.mutex);
  f.has_stream = true;
  f.device = device;
  f.stream = static_cast<cudaStream_t>(stream);
  return 1;
}

HYBRIDPAR_EXPORT void* hybridpar_planned_alloc(size_t bytes, int device, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  const bool planned_here = is_planned(device, stream);
  if (planned_here) {
    if (void* place = planned().take(bytes)) return place;
  }
  const OnDevice guard(device);
  static const bool keeps = [device] {
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    return cudaDeviceGetDefaultMemPool(&pool, device) == cudaSuccess &&
           cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all) == cudaSuccess;
  }();
  (void)keeps;
  void* block = nullptr;
  if (cudaMallocAsync(&block, bytes, stream) != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error("CUDA out of memory: " + std::to_string(bytes) + " bytes beside a planned arena");
  }
  if (planned_here) planned().note(block, bytes);
  return block;
}

HYBRIDPAR_EXPORT void hybridpar_planned_free(void* block, size_t, int device, cudaStream_t stream) {
  if (block == nullptr) return;
  const OnDevice guard(device);
  join(block, stream);
  if (!planned().give_back(block)) cudaFreeAsync(block, stream);
}

HYBRIDPAR_EXPORT void hybridpar_planned_record_stream(void* block, cudaStream_t stream) {
  auto& f = front();
  const std::lock_guard lock(f.mutex);
  f.others[block].push_back(stream);
}
