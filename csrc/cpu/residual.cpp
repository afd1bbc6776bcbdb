// residual + dropout(x + bias), forward and backward.

#include "residual.h"

namespace hybridpar {
namespace {

template <class T>
HYBRIDPAR_INLINE void add_any(const Addition<T>& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) add_row(a, row);
}

template <class T>
struct Subtraction {  // the backward of an addition
  const T* dsum;
  T* dropped;
  int64_t cols;
  bool with_bias;
  Mask mask;
};

template <class T>
HYBRIDPAR_INLINE void drop_any(const Subtraction<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {
  for (int64_t row = begin; row < end; ++row)
    drop_row(a.mask, row, a.cols, a.dsum + row * a.cols, a.dropped + row * a.cols, a.with_bias ? sums : nullptr);
}

#define HYBRIDPAR_RESIDUAL(T)                                                                                  \
  HYBRIDPAR_CLONES void add_rows(const Addition<T>& a, int64_t begin, int64_t end) { add_any(a, begin, end); } \
  HYBRIDPAR_CLONES void drop_rows(const Subtraction<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {        \
    drop_any(a, begin, end, sums);                                                                             \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_RESIDUAL)

Tensor bias_dropout_add(const Tensor& x, const Optional& bias, const Tensor& residual, int64_t key0,
                        int64_t key1, const Optional& counter, int64_t threshold, double scale, int64_t stride,
                        int64_t start) {
  const char* op = "bias_dropout_add";
  const Mask mask = make_mask(op, x, key0, key1, counter, threshold, scale, stride, start);
  check_addition(op, x, bias, residual);
  Tensor out = make_like(x);
  const int64_t cols = x.size(x.dim() - 1);
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    const Widened<T> shared(data<T>(bias), cols);
    const Addition<T> a{data<T>(x), data<T>(residual), shared, data<T>(out), cols, mask};
    over_rows(num_rows(x), cols, [&](int64_t begin, int64_t end) { add_rows(a, begin, end); });
  });
  return out;
}

// the gradients of x (empty without dropout: the sum's) and of the bias (empty without one)
std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& dsum, bool with_bias, int64_t key0, int64_t key1,
                                                     const Optional& counter, int64_t threshold, double scale,
                                                     int64_t stride, int64_t start) {
  const char* op = "bias_dropout_add_backward";
  check_contiguous(op, "dsum", dsum);
  const Mask mask = make_mask(op, dsum, key0, key1, counter, threshold, scale, stride, start);
  const int64_t cols = dsum.size(dsum.dim() - 1);
  const Tensor none = make({0}, dsum.scalar_type());
  Tensor dropped = threshold ? make_like(dsum) : none, dbias = none;
  by_type(op, dsum, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const Subtraction<T> a{data<T>(dsum), data<T>(dropped), cols, with_bias, mask};
    const auto sums = ColumnSums<W>(num_rows(dsum), cols, with_bias).run([&](int64_t begin, int64_t end, W* to) {
      drop_rows(a, begin, end, to);
    });
    if (with_bias) dbias = narrowed<T>(sums.get(), cols, dsum.scalar_type());
  });
  return {dropped, dbias};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, " HYBRIDPAR_MASK ") -> Tensor");
  library.def("bias_dropout_add_backward(Tensor dsum, bool with_bias, " HYBRIDPAR_MASK ") -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}
