// The local passes of the vocabulary-parallel cross-entropy: over this rank's columns of the logits, between which the
// ranks exchange a few numbers a row. The exponentials are made twice rather than kept: logits are read once forward, and
// read backward, where their gradient may overwrite them.

#include "rows.h"

namespace hybridpar {
namespace {

constexpr int64_t kChunk = 2048;  // columns whose maximum is found before their exponentials are summed: 8 KiB

template <class T>
struct Forward {
  const T* logits;
  const int64_t* column;  // of the row's label; negative: on another rank
  int64_t cols, real;  // columns beyond `real` are padding
  Wide<T>*top, *total, *target, *sum;  // sum: of what all logits are above top; null unless asked for
};

// The largest of `top` and n elements; if one is NaN, that or NaN.
template <class T>
HYBRIDPAR_INLINE Wide<T> largest(const T* x, int64_t n, Wide<T> top) {
  Wide<T> tops[kLanes];
  std::fill_n(tops, kLanes, top);
  each(n, [&](int64_t i, int lane) { tops[lane] = x[i] > tops[lane] ? x[i] : tops[lane]; });
  return max_lanes(tops);
}
// Integers that are ordered as the numbers are: 32 in a register, and none of them needs widening.
HYBRIDPAR_INLINE float largest(const BFloat16* x, int64_t n, float top) {
  const auto ordered = [](int16_t bits) { return static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff)); };
  int16_t tops[kLanes];
  std::fill_n(tops, kLanes, ordered(static_cast<int16_t>(narrow<BFloat16>(top).bits)));  // one of them, or infinite: exact
  each(n, [&](int64_t i, int lane) {
    const int16_t value = ordered(static_cast<int16_t>(x[i].bits));
    tops[lane] = value > tops[lane] ? value : tops[lane];
  });
  return wide(BFloat16{static_cast<uint16_t>(ordered(max_lanes(tops)))});
}

template <class T>
struct Backward {
  const T* logits;
  T* gradient;  // may be the logits
  const int64_t* column;
  int64_t cols, real;
  const Wide<T>*top, *factor, *target, *level;  // of a row; dx = exp(x - top) * factor - level, less target at column
};

}  // namespace

#define HYBRIDPAR_CROSS_ENTROPY(ATTRIBUTES, T)                                       \
  ATTRIBUTES void forward_rows(const Forward<T>& a, int64_t begin, int64_t end) {   \
    forward_any(a, begin, end);                                                     \
  }                                                                                 \
  ATTRIBUTES void backward_rows(const Backward<T>& a, int64_t begin, int64_t end) { \
    backward_any(a, begin, end);                                                    \
  }
#define HYBRIDPAR_CROSS_ENTROPY_CLONES(T) HYBRIDPAR_CROSS_ENTROPY(HYBRIDPAR_CLONES, T)

namespace numbers {
namespace {
#include "cross_entropy_rows.h"
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_CROSS_ENTROPY_CLONES)
}  // namespace
}  // namespace numbers
}  // namespace hybridpar

#ifdef HYBRIDPAR_HAS_CLONES
#include "vectors.h"
namespace hybridpar::vectors {
namespace {
#include "cross_entropy_rows.h"
HYBRIDPAR_CROSS_ENTROPY(HYBRIDPAR_FLATTEN, BFloat16)
}  // namespace
}  // namespace hybridpar::vectors
#include "vectors_end.h"
#endif

namespace hybridpar {
namespace {

void check(const char* op, const Tensor& logits, const Tensor& column, int64_t num_real) {
  check_contiguous(op, "logits", logits);
  check_contiguous(op, "column", column);
  STD_TORCH_CHECK(logits.dim() == 2 && column.dim() == 1 && column.size(0) == logits.size(0) &&
                      column.scalar_type() == ScalarType::Long,
                  op, ": needs logits [rows, columns] and column int64 [rows]");
  STD_TORCH_CHECK(num_real >= 0 && num_real <= logits.size(1), op, ": num_real is not within the columns");
}

// [4 (3 without the sum), rows]: maximum, sum of exponentials of what is below it, the label's logit, sum of what the logits are
// below it
Tensor cross_entropy(const Tensor& logits, const Tensor& column, int64_t num_real, bool with_sum) {
  check("cross_entropy", logits, column, num_real);
  const int64_t rows = logits.size(0), cols = logits.size(1);
  Tensor out = make({with_sum ? 4 : 3, rows}, wide_type(logits));
  by_type("cross_entropy", logits, [&](auto element) {
    using T = decltype(element);
    auto* to = data<Wide<T>>(out);
    const Forward<T> a{data<T>(logits), data<int64_t>(column), cols,          num_real, to, to + rows,
                       to + 2 * rows,   with_sum ? to + 3 * rows : nullptr};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_bfloat16(), T, forward_rows, a, begin, end);
    });
  });
  return out;
}

// numbers [4, rows]: top, factor, target, level; gradient may be logits
void cross_entropy_backward_(const Tensor& gradient, const Tensor& logits, const Tensor& column, const Tensor& numbers,
                             int64_t num_real) {
  check("cross_entropy_backward_", logits, column, num_real);
  check_contiguous("cross_entropy_backward_", "gradient", gradient);
  check_contiguous("cross_entropy_backward_", "numbers", numbers);
  const int64_t rows = logits.size(0), cols = logits.size(1);
  STD_TORCH_CHECK(numbers.dim() == 2 && numbers.size(0) == 4 && numbers.size(1) == rows &&
                      numbers.scalar_type() == wide_type(logits),
                  "cross_entropy_backward_: numbers must be [4, rows], in the type of the arithmetic");
  STD_TORCH_CHECK(gradient.numel() == logits.numel() && gradient.scalar_type() == logits.scalar_type(),
                  "cross_entropy_backward_: gradient must be like logits");
  by_type("cross_entropy_backward_", logits, [&](auto element) {
    using T = decltype(element);
    const auto* from = data<Wide<T>>(numbers);
    const Backward<T> a{data<T>(logits), data<T>(gradient), data<int64_t>(column), cols, num_real,
                        from, from + rows, from + 2 * rows, from + 3 * rows};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_bfloat16(), T, backward_rows, a, begin, end);
    });
  });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("cross_entropy(Tensor logits, Tensor column, SymInt num_real, bool with_sum) -> Tensor");
  library.def(
      "cross_entropy_backward_(Tensor(a!) gradient, Tensor logits, Tensor column, Tensor numbers, SymInt "
      "num_real) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  library.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}
