// Parts that the row-wise operators share: element types, exact lane-wise sums, exp, and splitting rows over threads.
//
// Written to give the same bits on every x86-64 (but for attention of bfloat16, attention_pairs.cpp) and with any number of
// threads (which is tested): sums go to kLanes partial sums by position, which are added as a tree, and multiply-adds are
// written out (std::fma has one rounding everywhere).
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
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "simd.h"

namespace hybridpar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

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
HYBRIDPAR_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
HYBRIDPAR_INLINE float wide(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

template <class T>
HYBRIDPAR_INLINE T narrow(Wide<T> x) {
  return static_cast<T>(x);
}
// Rounded to nearest even, in the upper half of a word; keeps NaN.
HYBRIDPAR_INLINE uint32_t rounded_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}
template <>
inline __attribute__((always_inline)) BFloat16 narrow<BFloat16>(float x) {
  return {static_cast<uint16_t>(rounded_bits(x) >> 16)};
}

HYBRIDPAR_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HYBRIDPAR_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// What a macro defines for one type, for all: functions that exist for several instruction sets cannot be templates.
#define HYBRIDPAR_EACH_TYPE(DEFINE) DEFINE(float) DEFINE(double) DEFINE(BFloat16) DEFINE(Half)

// --- loops ---

// f(std::integral_constant<int, i>()) for i in [0, n).
template <class F, int... i>
HYBRIDPAR_INLINE void repeat(const F& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, class F>
HYBRIDPAR_INLINE void repeat(const F& f) {
  repeat(f, std::make_integer_sequence<int, n>());
}

// Asks for kLanes elements that a pass will come to: alone, a core spends half of a pass over memory waiting, as its own
// prefetching stops at every page. Beyond an array's end this does nothing.
template <class T>
HYBRIDPAR_INLINE void prefetch(const T* x) {
  for (int i = 0; i < kLanes; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
}

// What a pass over x comes to 1 KiB later.
template <class T>
HYBRIDPAR_INLINE const T* ahead(const T* x) {
  return x + 1024 / sizeof(T);
}

// R rows, that are asked for together.
template <int R, class T>
struct Later {
  const T* first;
  int64_t cols;
};
template <class T>
HYBRIDPAR_INLINE void ask(const T* later, int64_t i) { prefetch(later + i); }
template <int R, class T>
HYBRIDPAR_INLINE void ask(const Later<R, T>& later, int64_t i) {
  repeat<R>([&](auto r) { prefetch(later.first + r * later.cols + i); });
}

namespace numbers {  // beside it, vectors.h has a namespace with the same for 16 numbers at once

// Elements of memory: in the type of the arithmetic, and rounded to theirs.
template <class T>
HYBRIDPAR_INLINE Wide<T> load(const T* x, int64_t i) { return wide(x[i]); }
template <class T>
HYBRIDPAR_INLINE void put(T* to, int64_t i, Wide<T> x) { to[i] = narrow<T>(x); }

// f(i, lane) for i in [0, n), by kLanes at a time: what a loop that sums by lane or only maps elements is made of. `later`: what
// to ask for meanwhile, as far on as f is, where arrays are too large for the caches.
template <class F, class... S>
HYBRIDPAR_INLINE void each(int64_t n, const F& f, const S&... later) {
  constexpr int kShort = 8;  // what is left goes by twice this many, then by this many: a head's half may be all there is
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    (ask(later, i), ...);
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) f(i + lane, lane);
  }
  int at = 0;
  if (i + 2 * kShort <= n) {
#pragma omp simd
    for (int lane = 0; lane < 2 * kShort; ++lane) f(i + lane, lane);
    at = 2 * kShort;
  }
  if (i + at + kShort <= n) {
#pragma omp simd
    for (int lane = 0; lane < kShort; ++lane) f(i + at + lane, at + lane);
    at += kShort;
  }
  for (; i + at < n; ++at) f(i + at, at);
}

// to[i] = f(x[i]), in the type of the arithmetic, for i in [0, n); `to` may be x. Bfloat16 goes by pairs, which are widened and
// narrowed in the word they are in: moving elements to lanes of twice the size takes longer.
template <class T, class F>
HYBRIDPAR_INLINE void map(int64_t n, const T* x, T* to, const F& f) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; i + kLanes <= n; i += kLanes) {
      prefetch(ahead(x + i));
      prefetch(ahead(to + i));
#pragma omp simd
      for (int pair = 0; pair < kLanes; pair += 2) {
        uint32_t both;
        std::memcpy(&both, x + i + pair, sizeof both);
        const uint32_t low = rounded_bits(f(from_bits(both << 16))), high = rounded_bits(f(from_bits(both & 0xffff0000u)));
        both = (low >> 16) | (high & 0xffff0000u);
        std::memcpy(to + i + pair, &both, sizeof both);
      }
    }
  }
  const int64_t pairs = i;
  each(n - pairs, [=](int64_t at, int) __attribute__((always_inline)) { to[pairs + at] = narrow<T>(f(wide(x[pairs + at]))); },
       ahead(x), ahead(to));
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

template <int kWidth = kLanes / 2, class W>
HYBRIDPAR_INLINE W sum_lanes(W* lanes) {
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] += lanes[lane + kWidth];
  if constexpr (kWidth > 1) return sum_lanes<kWidth / 2>(lanes);
  return lanes[0];
}

template <int kWidth = kLanes / 2, class W>
HYBRIDPAR_INLINE W max_lanes(W* lanes) {
  for (int lane = 0; lane < kWidth; ++lane)
    lanes[lane] = lanes[lane + kWidth] > lanes[lane] ? lanes[lane + kWidth] : lanes[lane];
  if constexpr (kWidth > 1) return max_lanes<kWidth / 2>(lanes);
  return lanes[0];
}

// --- functions ---

// What functions.h needs, of numbers.
template <class W>
HYBRIDPAR_INLINE W at_most(W x, W limit) { return x > limit ? limit : x; }  // both keep NaN
template <class W>
HYBRIDPAR_INLINE W at_least(W x, W limit) { return x < limit ? limit : x; }
// 0 where x is below the limit, whatever y is.
template <class W>
HYBRIDPAR_INLINE W zero_below(W x, W limit, W y) { return x < limit ? W(0) : y; }
// 2^n, where x has n, with the exponent's bias, in its lowest bits.
HYBRIDPAR_INLINE float power_of_two(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return from_bits(bits << 23);
}
HYBRIDPAR_INLINE double exponential_within(double x) { return std::exp(x); }

#include "functions.h"

}  // namespace numbers

using namespace numbers;

// --- tensors ---

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}
template <class T>
const T* data(const Optional& x) {
  return x ? static_cast<const T*>(x->data_ptr()) : nullptr;
}

// A vector that all rows share, in the type of the arithmetic: converted once. Null where there is none.
template <class T>
class Widened {
 public:
  Widened(const T* x, int64_t n) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
      values_ = x;
    } else if (x) {
      own_.resize(static_cast<size_t>(n));
      std::transform(x, x + n, own_.begin(), [](T value) { return wide(value); });
      values_ = own_.data();
    }
  }
  operator const Wide<T>*() const { return values_; }

 private:
  std::vector<Wide<T>> own_;
  const Wide<T>* values_ = nullptr;
};

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

// A new tensor without gaps. torch::stable::empty finds its operator by name at each call, which takes four times as long.
inline Tensor make(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t numel = 1;
  for (size_t dim = sizes.size(); dim-- > 0; numel *= std::max<int64_t>(1, sizes[dim])) strides[dim] = numel;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), aoti_torch_device_type_cpu(), -1, &made));
  return Tensor(made);
}

inline Tensor make_like(const Tensor& x) {
  const auto sizes = x.sizes();
  return make({sizes.begin(), sizes.end()}, x.scalar_type());
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
template <class W>
class ColumnSums {
 public:
  ColumnSums(int64_t rows, int64_t cols, int num_sums)
      : rows_(rows), cols_(cols), block_(std::max<int64_t>(32, (rows + 63) / 64)), size_(num_sums * cols),
        num_blocks_(std::max<int64_t>(1, (rows + block_ - 1) / block_)) {}

  // f(begin, end, partial): adds rows [begin, end) to partial [num_sums, cols], which begins as zeros. -> the sums.
  template <class F>
  std::unique_ptr<W[]> run(const F& f) {
    std::unique_ptr<W[]> sums(new W[static_cast<size_t>(num_blocks_ * size_)]);
    W* base = sums.get();
    int64_t done = 0;  // blocks that are in the first sums
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols_ * block_));
    torch::stable::parallel_for(0, num_blocks_, grain, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const bool at_once = first == 0 && b > 0;  // those before are added already: one place does for all
        W* partial = base + (at_once ? 1 : b) * size_;
        std::fill_n(partial, size_, W(0));
        f(b * block_, std::min(rows_, (b + 1) * block_), partial);
        if (at_once) add(base, partial);
      }
      if (first == 0) done = last;
    });
    for (int64_t b = done; b < num_blocks_; ++b) add(base, base + b * size_);
    return sums;
  }

 private:
  void add(W* to, const W* partial) const {
    for (int64_t i = 0; i < size_; ++i) to[i] += partial[i];
  }

  int64_t rows_, cols_, block_, size_, num_blocks_;
};

}  // namespace hybridpar
