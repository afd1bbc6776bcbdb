// What the row-wise operators share: element types, exact lane-wise sums, exp, and splitting rows over threads.
//
// Written to give the same bits on every x86-64 and with any number of threads (which is tested): sums go to kLanes partial sums
// by position, which are added as a tree, and multiply-adds are written out (std::fma has one rounding everywhere).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "simd.h"

namespace hybridpar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kLanes = 32;  // two AVX-512 registers of float: enough additions in flight
constexpr int64_t kGrain = 16384;  // elements worth a thread

// --- element types: memory holds T, arithmetic is in Wide<T> ---

struct BFloat16 {
  uint16_t bits;
};
using Half = _Float16;

template <class T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <class T>
using Wide = typename WideOf<T>::type;

HYBRIDPAR_INLINE float wide(float x) { return x; }
HYBRIDPAR_INLINE double wide(double x) { return x; }
HYBRIDPAR_INLINE float wide(Half x) { return static_cast<float>(x); }
HYBRIDPAR_INLINE float wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
HYBRIDPAR_INLINE T narrow(Wide<T> x) {
  return static_cast<T>(x);
}
// rounds to nearest even, keeps NaN
template <>
inline __attribute__((always_inline)) BFloat16 narrow<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}

HYBRIDPAR_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HYBRIDPAR_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// What a macro defines for one type, for all: functions that exist for several instruction sets cannot be templates.
#define HYBRIDPAR_EACH_TYPE(DEFINE) DEFINE(float) DEFINE(double) DEFINE(BFloat16) DEFINE(Half)

// --- loops ---

// Asks for the kLanes elements that a pass will come to 1 KiB later: alone, a core spends half of a pass over memory waiting, as
// its own prefetching stops at every page. Beyond an array's end this does nothing.
template <class T>
HYBRIDPAR_INLINE void prefetch(const T* x) {
  constexpr int kAhead = 1024 / sizeof(T), kLine = 64 / sizeof(T);
  for (int i = 0; i < kLanes; i += kLine) __builtin_prefetch(x + kAhead + i);
}

// f(i, lane) for i in [0, n), by kLanes at a time: what a loop that sums by lane or only maps elements is made of. `streams`: the
// arrays that f goes through, where they are too large for the caches.
template <class F, class... T>
HYBRIDPAR_INLINE void each(int64_t n, const F& f, const T*... streams) {
  constexpr int kShort = 8;  // what is left goes by this many: a head's half may be all there is
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    (prefetch(streams + i), ...);
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) f(i + lane, lane);
  }
  int at = 0;
  for (; i + at + kShort <= n; at += kShort) {
#pragma omp simd
    for (int lane = 0; lane < kShort; ++lane) f(i + at + lane, at + lane);
  }
  for (; i + at < n; ++at) f(i + at, at);
}

// Writes kLanes elements past the caches, where what is there need not be read first. Call `stored` at the end.
template <class T>
HYBRIDPAR_INLINE void store(T* to, const T* from) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (size_t i = 0; i < kLanes * sizeof(T) / sizeof(__m128i); ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
    return;
  }
#endif
  std::memcpy(to, from, kLanes * sizeof(T));
}

// From here on other threads see what `store` wrote.
HYBRIDPAR_INLINE void stored() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

template <class W>
HYBRIDPAR_INLINE W sum_lanes(W* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

template <class W>
HYBRIDPAR_INLINE W max_lanes(W* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
  return lanes[0];
}

// --- functions ---

// e^x for x from -87 to 88, to 1 ulp or so; NaN for NaN. No branch, so that loops vectorise.
HYBRIDPAR_INLINE float exponential_within(float x) {
  const float shifted = multiply_add(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: the fraction drops out
  const float n = shifted - 12582912.0f;
  float r = multiply_add(n, -0.693359375f, x);  // ln 2 in two parts: exact
  r = multiply_add(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p, r * r, r) + 1.0f;
  uint32_t bits;  // n is in the lowest bits of `shifted`
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127u) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
HYBRIDPAR_INLINE double exponential_within(double x) { return std::exp(x); }

// e^x where x is at most 0, or at most 88: 0 below -87.
template <class W>
HYBRIDPAR_INLINE W exponential(W x) {
  const W y = exponential_within(x < W(-87) ? W(-87) : x);
  return x < W(-87) ? W(0) : y;
}

template <class W>
struct Sigmoid {
  W value, rest;  // 1 / (1 + e^-x) and 1 less that, which no cancellation makes inexact
};

template <class W>
HYBRIDPAR_INLINE Sigmoid<W> sigmoid(W x) {
  const W high = x > W(80) ? W(80) : x;  // beyond, nothing changes, and e^-x stays a normal number
  const W power = exponential_within(high < W(-80) ? W(80) : -high);
  const W value = W(1) / (W(1) + power);
  return {value, value * power};
}

// --- tensors ---

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}
template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? static_cast<const T*>(x->data_ptr()) : nullptr;
}

// Calls f with a value of the element type of x.
template <class F>
void by_type(const char* op, const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return f(float());
    case ScalarType::Double:
      return f(double());
    case ScalarType::BFloat16:
      return f(BFloat16());
    case ScalarType::Half:
      return f(Half());
    default:
      STD_TORCH_CHECK(false, op, ": needs float32, float64, bfloat16 or float16");
  }
}

inline ScalarType wide_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Rows of x are all but its last dimension.
inline int64_t num_rows(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) rows *= x.size(dim);
  return rows;
}

inline void check_contiguous(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), op, ": ", name, " must be contiguous");
}

// f(begin, end) over [0, rows), in the threads that their elements are worth.
template <class F>
void over_rows(int64_t rows, int64_t cols, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols));
  torch::stable::parallel_for(0, rows, grain, f);
}

// Sums of columns that do not depend on the number of threads: rows go in fixed blocks to partial sums of their own,
// which are added in order.
class ColumnSums {
 public:
  ColumnSums(int64_t rows, int64_t cols, int num_sums)
      : rows_(rows), cols_(cols), block_(std::max<int64_t>(32, (rows + 63) / 64)), num_sums_(num_sums) {
    num_blocks_ = (rows + block_ - 1) / block_;
  }

  // f(begin, end, partial): adds rows [begin, end) to partial [num_sums, cols], which begins as zeros of W.
  template <class W, class F>
  void run(std::vector<W>& partial, const F& f) {
    const int64_t size = num_sums_ * cols_;
    partial.assign(std::max<int64_t>(num_blocks_, 1) * size, W(0));
    W* base = partial.data();
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols_ * block_));
    torch::stable::parallel_for(0, num_blocks_, grain, [&, base](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) f(b * block_, std::min(rows_, (b + 1) * block_), base + b * size);
    });
    for (int64_t b = 1; b < num_blocks_; ++b)
      for (int64_t i = 0; i < size; ++i) base[i] += base[b * size + i];
  }

 private:
  int64_t rows_, cols_, block_, num_blocks_;
  int num_sums_;
};

}  // namespace hybridpar
