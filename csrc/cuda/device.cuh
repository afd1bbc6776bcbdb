// Parts that kernels share: 16 bytes of elements at a time, sums over threads, the choice of a kernel.
//
// A kernel is a template of the element type T and of the number V of elements that a thread reads at once: as many as
// 16 bytes hold where the columns allow it, otherwise 1. (double: always 1; a warp then reads 256 bytes.)
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"
#include "platform.cuh"

namespace hybridpar {

// --- element types: memory holds T, arithmetic is in Wide<T> ---

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

HYBRIDPAR_DEVICE float wide(float x) { return x; }
HYBRIDPAR_DEVICE double wide(double x) { return x; }

// N elements as they are in memory; pack[k] is in Wide<T>. Those of 16 bits stay two to a register until they are used:
// a pack that is taken apart where it is loaded waits there, and is stored in parts.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  static constexpr bool kPairs = sizeof(T) == 2 && N > 1;
  std::conditional_t<kPairs, uint32_t, T> at[kPairs ? N / 2 : N];

  HYBRIDPAR_DEVICE_MEMBER auto operator[](int k) const {
    if constexpr (kPairs)
      return wide(T{static_cast<uint16_t>(at[k / 2] >> 16 * (k % 2))});
    else
      return wide(at[k]);
  }
};

template <int N, class T>
HYBRIDPAR_DEVICE Pack<T, N> load(const T* from) {
  return load_bytes<Pack<T, N>>(from);
}

// Rounds.
template <class T, int N>
HYBRIDPAR_DEVICE Pack<T, N> narrow(const Wide<T> (&x)[N]) {
  Pack<T, N> y;
  if constexpr (Pack<T, N>::kPairs) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) y.at[k] = narrow_two(T(), x[2 * k], x[2 * k + 1]);
  } else if constexpr (sizeof(T) == 2) {
    y.at[0].bits = static_cast<uint16_t>(narrow_two(T(), x[0], 0.0f));
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) y.at[k] = x[k];
  }
  return y;
}

template <class T, int N>
HYBRIDPAR_DEVICE void store(T* to, const Wide<T> (&x)[N]) {
  store_bytes(to, narrow<T, N>(x));
}

// --- sums over threads ---

constexpr int kMostThreads = 512;  // of a row

HYBRIDPAR_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
HYBRIDPAR_DEVICE double larger(double a, double b) { return fmax(a, b); }

// Combines a number of each thread of the block, a multiple of 32 of them; all get the result, the same each time.
// Every thread must call it.
template <class W>
class OverBlock {
 public:
  using Slots = W[2][kMostThreads / 32];

  HYBRIDPAR_DEVICE_MEMBER explicit OverBlock(Slots& slots) : slots_(slots) {}

  HYBRIDPAR_DEVICE_MEMBER W sum(W x) {
    return reduce(x, [](W a, W b) { return a + b; });
  }
  HYBRIDPAR_DEVICE_MEMBER W largest(W x) {
    return reduce(x, [](W a, W b) { return larger(a, b); });
  }

 private:
  template <class F>
  HYBRIDPAR_DEVICE_MEMBER W reduce(W x, const F& combine) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lane));
    if (blockDim.x == 32) return x;
    // Calls take turns with two sets of slots: who passes this call's barrier has read what the last one left.
    turn_ ^= 1;
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) slots_[turn_][threadIdx.x / 32] = x;
    __syncthreads();
    x = slots_[turn_][0];
    for (int warp = 1; warp < warps; ++warp) x = combine(x, slots_[turn_][warp]);
    return x;
  }

  Slots& slots_;
  int turn_ = 0;
};

// a / b for numbers from 0 on; a division of 64 bits takes a hundred instructions
HYBRIDPAR_DEVICE int64_t divide(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// --- the choice of a kernel ---

constexpr int round_up(int64_t x, int multiple) { return static_cast<int>((x + multiple - 1) / multiple * multiple); }

template <class T>
constexpr int kVector = sizeof(T) == 8 ? 1 : 16 / sizeof(T);

// Calls f(T(), V) for the element type, V a constant. Vectors need rows of whole ones, and aligned memory.
template <class F>
void choose(Type type, int64_t cols, std::initializer_list<const void*> memory, const F& f) {
  const auto with = [&](auto element) {
    constexpr int kMost = kVector<decltype(element)>;
    bool aligned = cols % kMost == 0;
    for (const void* pointer : memory) aligned &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    if (aligned)
      f(element, std::integral_constant<int, kMost>());
    else if constexpr (kMost > 1)
      f(element, std::integral_constant<int, 1>());
  };
  switch (type) {
    case Type::Float:
      return with(float());
    case Type::Double:
      return with(double());
    case Type::BFloat16:
      return with(BFloat16());
    case Type::Half:
      return with(Half());
  }
}

}  // namespace hybridpar
