// x W^T + b for a few rows x, as when a token of each text is generated: the time that it takes to read W once.
// MKL and oneDNN read W in the order that suits many rows. A thread here reads several rows of W at once, each far apart, as
// a core alone waits for memory between one page and the next. An element is the sum of kParts partial sums by position,
// whatever the other rows, and the number of threads. Results of bfloat16 have other last bits where the CPU multiplies pairs
// of it.

#include "rows.h"

namespace hybridpar {
namespace {

constexpr int kParts = 16;  // partial sums of an element: an AVX-512 register of float
template <class T>
constexpr int kBlock = kParts * sizeof(Wide<T>) / sizeof(T);  // elements of a row that are added to them at once
constexpr int kStreams = 4;  // rows of W that are read at once
constexpr int64_t kMostRows = 16;

template <class T>
struct Product {
  const T *x, *weight, *bias;  // bias: may be null
  const Wide<T>* arranged;  // see Arranged
  T* y;
  int64_t rows, depth, cols;
};

// x in the type of the arithmetic. Of bfloat16 each block has its even elements first: a word of W then gives two numbers
// where they are, as moving elements to lanes of twice the size takes longer.
template <class T>
class Arranged {
 public:
  Arranged(const T* x, int64_t rows, int64_t depth) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
      values_ = x;
    } else {
      static_assert(kBlock<T> == 2 * kParts);
      own_.resize(static_cast<size_t>(rows * depth));
      for (int64_t row = 0; row < rows; ++row, x += depth) {
        Wide<T>* to = own_.data() + row * depth;
        int64_t k = 0;
        for (; k + kBlock<T> <= depth; k += kBlock<T>) {
          for (int i = 0; i < kParts; ++i) {
            to[k + i] = wide(x[k + 2 * i]);
            to[k + kParts + i] = wide(x[k + 2 * i + 1]);
          }
        }
        for (; k < depth; ++k) to[k] = wide(x[k]);
      }
      values_ = own_.data();
    }
  }
  operator const Wide<T>*() const { return values_; }

 private:
  std::vector<Wide<T>> own_;
  const Wide<T>* values_;
};

// Adds the products of a block to partial sums.
template <class T>
HYBRIDPAR_INLINE void add_block(const T* x, const T* w, T* sum) {
#pragma omp simd
  for (int i = 0; i < kParts; ++i) sum[i] = multiply_add(x[i], w[i], sum[i]);
}
HYBRIDPAR_INLINE void add_block(const float* x, const BFloat16* w, float* sum) {
#pragma omp simd
  for (int i = 0; i < kParts; ++i) {
    uint32_t both;
    std::memcpy(&both, w + 2 * i, sizeof both);
    const float even = multiply_add(x[i], from_bits(both << 16), sum[i]);
    sum[i] = multiply_add(x[kParts + i], from_bits(both & 0xffff0000u), even);
  }
}

}  // namespace

namespace numbers {
namespace {

template <int R, class T>
HYBRIDPAR_INLINE void dot_products(const Product<T>& p, int64_t row, int64_t col, int64_t step) {
  Wide<T> sum[R][kStreams][kParts] = {};
  const Wide<T>* x = p.arranged + row * p.depth;
  const T* w = p.weight + col * p.depth;
  const int64_t apart = step * p.depth;
  int64_t k = 0;
  for (; k + kBlock<T> <= p.depth; k += kBlock<T>) {
#pragma GCC unroll 4
    for (int c = 0; c < kStreams; ++c) {
      __builtin_prefetch(ahead(w + c * apart + k));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) add_block(x + r * p.depth + k, w + c * apart + k, sum[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kStreams; ++c) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Wide<T>* parts = sum[r][c];
      for (int64_t i = 0; k + i < p.depth; ++i)
        parts[i % kParts] = multiply_add(x[r * p.depth + k + i], wide(w[c * apart + k + i]), parts[i % kParts]);
      for (int half = kParts / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
      const int64_t at = col + c * step;
      p.y[(row + r) * p.cols + at] = narrow<T>(p.bias ? parts[0] + wide(p.bias[at]) : parts[0]);
    }
  }
}

#include "few_rows_columns.h"

#define HYBRIDPAR_FEW_ROWS(T)                                                                   \
  HYBRIDPAR_CLONES void few_rows_columns(const Product<T>& p, int64_t begin, int64_t end) {     \
    few_rows_any(p, begin, end);                                                                \
  }
HYBRIDPAR_FEW_ROWS(float)
HYBRIDPAR_FEW_ROWS(double)
HYBRIDPAR_FEW_ROWS(BFloat16)
}  // namespace
}  // namespace numbers
}  // namespace hybridpar

#ifdef HYBRIDPAR_HAS_CLONES
#include "vectors.h"

namespace hybridpar::vectors {
namespace {

HYBRIDPAR_INLINE __m512bh load_pairs(const BFloat16* x, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, x);
}

// Pairs of bfloat16 by one instruction, which rounds otherwise than two multiply-adds of float.
template <int R, class T>
HYBRIDPAR_INLINE void dot_products(const Product<T>& p, int64_t row, int64_t col, int64_t step) {
  __m512 sum[R][kStreams];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kStreams; ++c) sum[r][c] = _mm512_setzero_ps();
  const T* x = p.x + row * p.depth;
  const T* w = p.weight + col * p.depth;
  const int64_t apart = step * p.depth;
  for (int64_t k = 0; k < p.depth; k += kBlock<T>) {
    const int64_t rest = p.depth - k;
    const auto mask = static_cast<__mmask32>(rest < kBlock<T> ? (1u << rest) - 1 : 0xffffffffu);
    __m512bh pairs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) pairs[r] = load_pairs(x + r * p.depth + k, mask);
#pragma GCC unroll 4
    for (int c = 0; c < kStreams; ++c) {
      __builtin_prefetch(ahead(w + c * apart + k));
      const __m512bh factor = load_pairs(w + c * apart + k, mask);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pairs[r], factor);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kStreams; ++c) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = col + c * step;
      const float total = _mm512_reduce_add_ps(sum[r][c]);
      p.y[(row + r) * p.cols + at] = narrow<T>(p.bias ? total + wide(p.bias[at]) : total);
    }
  }
}

#include "few_rows_columns.h"

void few_rows_columns(const Product<BFloat16>& p, int64_t begin, int64_t end) { few_rows_any(p, begin, end); }

}  // namespace
}  // namespace hybridpar::vectors
#include "vectors_end.h"
#endif

namespace hybridpar {
namespace {

// x [.., depth], weight [cols, depth], bias [cols] -> [.., cols]
Tensor few_rows_linear(const Tensor& x, const Tensor& weight, const Optional& bias) {
  const char* op = "few_rows_linear";
  check_contiguous(op, "x", x);
  check_contiguous(op, "weight", weight);
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 2 && x.size(x.dim() - 1) == weight.size(1) &&
                      weight.scalar_type() == x.scalar_type(),
                  op, ": weight must be [cols, the last size of x], and of x's type");
  const int64_t rows = num_rows(x), depth = weight.size(1), cols = weight.size(0);
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->dim() == 1 && bias->size(0) == cols &&
                            bias->scalar_type() == x.scalar_type()),
                  op, ": bias must be [cols], and of x's type");
  STD_TORCH_CHECK(rows <= kMostRows && cols >= kStreams, op, ": is for up to ", kMostRows, " rows of x, and ", kStreams,
                  " of weight at least");
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) shape.push_back(x.size(dim));
  shape.push_back(cols);
  Tensor y = make(shape, x.scalar_type());
  const auto run = [&](auto element) {
    using T = decltype(element);
    const bool has_pairs = std::is_same_v<T, BFloat16> && has_fast_bfloat16();
    const Arranged<T> arranged(data<T>(x), has_pairs ? 0 : rows, depth);
    const Product<T> p{data<T>(x), data<T>(weight), data<T>(bias), arranged, data<T>(y), rows, depth, cols};
    const int64_t steps = cols / kStreams, grain = kGrain / std::max<int64_t>(1, depth * kStreams);
    torch::stable::parallel_for(0, steps, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_pairs, T, few_rows_columns, p, begin * kStreams, end == steps ? cols : end * kStreams);
    });
  };
  if (x.scalar_type() == ScalarType::Float) {
    run(float());
  } else if (x.scalar_type() == ScalarType::BFloat16) {
    run(BFloat16());
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Double, op, ": x must be float32, bfloat16 or float64");
    run(double());
  }
  return y;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) { library.impl("few_rows_linear", TORCH_BOX(&few_rows_linear)); }
