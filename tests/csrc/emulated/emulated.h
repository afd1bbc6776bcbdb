// The part of CUDA that csrc/cuda uses, on the CPU: a kernel's threads are coroutines, a block at a time, that take
// turns at barriers and shuffles, in an order that changes each time. So what a kernel reads and writes is what it
// would on a GPU, and a barrier that is missing shows. Barriers that not every thread comes to, and misaligned vectors
// (-fsanitize), end the process.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define HYBRIDPAR_DEVICE static inline
#define HYBRIDPAR_DEVICE_MEMBER inline

namespace emulated {

enum class Waits { Nowhere, AtBarrier, AtShuffle, Finished };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Waits waits = Waits::Nowhere;
  uint64_t value = 0;  // of a shuffle: given, then received
  int lane_mask = 0;
};

constexpr size_t kStack = 64 * 1024;
inline std::vector<Thread> threads(1024);
inline ucontext_t scheduler;
inline Thread* running;
inline const std::function<void()>* body;
inline std::mt19937 order(1);

inline void fail(const char* why) {
  std::fprintf(stderr, "emulated CUDA: %s\n", why);
  std::abort();
}

inline void wait(Waits where) {
  running->waits = where;
  swapcontext(&running->context, &scheduler);
}

inline void start() {
  (*body)();
  wait(Waits::Finished);
}

inline bool all(const Thread* first, unsigned n, Waits where, Waits or_where) {
  for (unsigned i = 0; i < n; ++i)
    if (first[i].waits != where && first[i].waits != or_where) return false;
  return true;
}

inline void shuffle(Thread* warp) {
  uint64_t given[32];
  for (int lane = 0; lane < 32; ++lane) given[lane] = warp[lane].value;
  for (int lane = 0; lane < 32; ++lane) {
    warp[lane].value = given[lane ^ warp[lane].lane_mask];
    warp[lane].waits = Waits::Nowhere;
  }
}

inline void run_block(unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.waits = Waits::Nowhere;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  std::vector<unsigned> turns(count);
  std::iota(turns.begin(), turns.end(), 0u);
  while (true) {
    std::shuffle(turns.begin(), turns.end(), order);
    bool moved = false;
    for (const unsigned i : turns) {
      if (threads[i].waits != Waits::Nowhere) continue;
      moved = true;
      running = &threads[i];
      threadIdx = dim3(i % blockDim.x, i / blockDim.x, 0);
      swapcontext(&scheduler, &running->context);
    }
    for (unsigned warp = 0; warp + 32 <= count; warp += 32)
      if (all(&threads[warp], 32, Waits::AtShuffle, Waits::AtShuffle)) {
        shuffle(&threads[warp]);
        moved = true;
      }
    if (all(threads.data(), count, Waits::Finished, Waits::Finished)) return;
    if (all(threads.data(), count, Waits::AtBarrier, Waits::Finished)) {
      for (unsigned i = 0; i < count; ++i)
        if (threads[i].waits == Waits::AtBarrier) threads[i].waits = Waits::Nowhere;
      moved = true;
    }
    if (!moved) fail("threads wait for others that never come");
  }
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait(emulated::Waits::AtBarrier); }

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int lane_mask) {
  if (lanes != 0xffffffffu) emulated::fail("a shuffle of some lanes");
  emulated::Thread& self = *emulated::running;
  std::memcpy(&self.value, &value, sizeof value);
  self.lane_mask = lane_mask;
  emulated::wait(emulated::Waits::AtShuffle);
  std::memcpy(&value, &self.value, sizeof value);
  return value;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline void sincospi(double x, double* sin, double* cos) {
  *sin = std::sin(3.141592653589793 * x);
  *cos = std::cos(3.141592653589793 * x);
}

namespace hybridpar {

inline float wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline float wide(Half x) {
  _Float16 y;
  std::memcpy(&y, &x, sizeof y);
  return static_cast<float>(y);
}

inline uint16_t narrow_one(BFloat16, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline uint16_t narrow_one(Half, float x) {
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  return bits;
}
template <class T>
uint32_t narrow_two(T type, float first, float second) {
  return narrow_one(type, first) | static_cast<uint32_t>(narrow_one(type, second)) << 16;
}

template <class P>
P load_bytes(const void* from) {
  return *static_cast<const P*>(from);
}
template <class P>
void store_bytes(void* to, const P& x) {
  *static_cast<P*>(to) = x;
}

inline float power_of_two(float x) { return exp2f(x); }

template <class... Parameters, class... Arguments>
void launch(const char*, void (*kernel)(Parameters...), dim3 grid, dim3 block, void*, const Arguments&... arguments) {
  const unsigned count = block.x * block.y;
  if (!grid.x || !grid.y || grid.y > 65535 || !count || count > 1024) emulated::fail("a launch that CUDA refuses");
  const std::function<void()> body = [&] { kernel(arguments...); };
  emulated::body = &body;
  gridDim = grid;
  blockDim = block;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      emulated::run_block(count);
    }
}

}  // namespace hybridpar
