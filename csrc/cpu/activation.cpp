// gelu(x + bias) in its tanh form, and silu or gelu of gate + bias, times up + bias; forward and backward.
//
// The activations keep x for the backward pass and compute everything again: one read, one write each way. The bias
// gradient is the column sums of dx before rounding.

#include "philox.h"

namespace hybridpar {
namespace {

template <class T>
struct Rows {
  using Element = T;
  const T *x, *dy;  // dy: may be null
  const Wide<T>* bias;  // may be null
  T* out;
  int64_t cols;  // of y
};

}  // namespace

#define HYBRIDPAR_ACTIVATION(ATTRIBUTES, T)                                                            \
  ATTRIBUTES void gelu_rows(const Rows<T>& a, int64_t begin, int64_t end) { gelu_any(a, begin, end); } \
  ATTRIBUTES void gelu_backward_rows(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {    \
    gelu_backward_any(a, begin, end, sums);                                                            \
  }                                                                                                    \
  ATTRIBUTES void swiglu_rows(const Rows<T>& a, int64_t begin, int64_t end) {                          \
    swiglu_any(a, begin, end);                                                                         \
  }                                                                                                    \
  ATTRIBUTES void swiglu_backward_rows(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {  \
    swiglu_backward_any(a, begin, end, sums);                                                          \
  }                                                                                                    \
  ATTRIBUTES void geglu_rows(const Rows<T>& a, int64_t begin, int64_t end) { geglu_any(a, begin, end); } \
  ATTRIBUTES void geglu_backward_rows(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {   \
    geglu_backward_any(a, begin, end, sums);                                                           \
  }
#define HYBRIDPAR_ACTIVATION_CLONES(T) HYBRIDPAR_ACTIVATION(HYBRIDPAR_CLONES, T)

namespace numbers {
namespace {
#include "activation_rows.h"
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_ACTIVATION_CLONES)
}  // namespace
}  // namespace numbers
}  // namespace hybridpar

#ifdef HYBRIDPAR_HAS_CLONES
#include "vectors.h"
namespace hybridpar::vectors {
namespace {
#include "activation_rows.h"
HYBRIDPAR_ACTIVATION(HYBRIDPAR_FLATTEN, BFloat16)
}  // namespace
}  // namespace hybridpar::vectors
#include "vectors_end.h"
#endif

namespace hybridpar {
namespace {

void check(const char* op, const Tensor& x, const Optional& bias) {
  check_contiguous(op, "x", x);
  STD_TORCH_CHECK(x.dim() > 0, op, ": x needs a dimension");
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->dim() == 1 && bias->size(0) == x.size(x.dim() - 1) &&
                            bias->scalar_type() == x.scalar_type()),
                  op, ": bias must be of the last size of x, and of its type");
}

Tensor empty_rows(const Tensor& x, int64_t cols) {
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) shape.push_back(x.size(dim));
  shape.push_back(cols);
  return make(shape, x.scalar_type());
}

// Runs backward(args, begin, end, sums) over the rows; returns dx and the gradient of the bias, empty without one.
template <class F>
std::tuple<Tensor, Tensor> run_backward(const char* op, const Tensor& dy, const Tensor& x,
                                        const Optional& bias, int64_t cols, const F& backward) {
  check(op, x, bias);
  check_contiguous(op, "dy", dy);
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type() && dy.dim() == x.dim() && dy.size(dy.dim() - 1) == cols &&
                      num_rows(dy) == num_rows(x),
                  op, ": dy must be like y");
  const int64_t rows = num_rows(x), width = x.size(x.dim() - 1);
  Tensor dx = make_like(x);
  Tensor dbias = bias ? make_like(*bias) : make({0}, x.scalar_type());
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const Widened<T> shared(data<T>(bias), width);
    const Rows<T> a{data<T>(x), data<T>(dy), shared, data<T>(dx), cols};
    if (!bias) {
      over_rows(rows, width, [&](int64_t begin, int64_t end) { backward(a, begin, end, static_cast<W*>(nullptr)); });
      return;
    }
    const auto partial = ColumnSums<W>(rows, width, 1).run([&](int64_t begin, int64_t end, W* to) {
      backward(a, begin, end, to);
    });
    for (int64_t i = 0; i < width; ++i) data<T>(dbias)[i] = narrow<T>(partial[i]);
  });
  return {dx, dbias};
}

Tensor bias_gelu(const Tensor& x, const Optional& bias) {
  check("bias_gelu", x, bias);
  Tensor y = make_like(x);
  const int64_t cols = x.size(x.dim() - 1);
  by_type("bias_gelu", x, [&](auto element) {
    using T = decltype(element);
    const Widened<T> shared(data<T>(bias), cols);
    const Rows<T> a{data<T>(x), nullptr, shared, data<T>(y), cols};
    over_rows(num_rows(x), cols, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_bfloat16(), T, gelu_rows, a, begin, end);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& dy, const Tensor& x, const Optional& bias) {
  return run_backward("bias_gelu_backward", dy, x, bias, x.size(x.dim() - 1),
                      [](const auto& a, int64_t begin, int64_t end, auto* sums) {
                        using T = typename std::decay_t<decltype(a)>::Element;
                        HYBRIDPAR_RUN(has_bfloat16(), T, gelu_backward_rows, a, begin, end, sums);
                      });
}

Tensor bias_swiglu(const Tensor& x, const Optional& bias) {
  check("bias_swiglu", x, bias);
  const int64_t width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(width % 2 == 0, "bias_swiglu: the last size of x must be even");
  Tensor y = empty_rows(x, width / 2);
  by_type("bias_swiglu", x, [&](auto element) {
    using T = decltype(element);
    const Widened<T> shared(data<T>(bias), width);
    const Rows<T> a{data<T>(x), nullptr, shared, data<T>(y), width / 2};
    over_rows(num_rows(x), width, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_bfloat16(), T, swiglu_rows, a, begin, end);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_swiglu_backward(const Tensor& dy, const Tensor& x, const Optional& bias) {
  return run_backward("bias_swiglu_backward", dy, x, bias, x.size(x.dim() - 1) / 2,
                      [](const auto& a, int64_t begin, int64_t end, auto* sums) {
                        using T = typename std::decay_t<decltype(a)>::Element;
                        HYBRIDPAR_RUN(has_bfloat16(), T, swiglu_backward_rows, a, begin, end, sums);
                      });
}

Tensor bias_geglu(const Tensor& x, const Optional& bias) {
  check("bias_geglu", x, bias);
  const int64_t width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(width % 2 == 0, "bias_geglu: the last size of x must be even");
  Tensor y = empty_rows(x, width / 2);
  by_type("bias_geglu", x, [&](auto element) {
    using T = decltype(element);
    const Widened<T> shared(data<T>(bias), width);
    const Rows<T> a{data<T>(x), nullptr, shared, data<T>(y), width / 2};
    over_rows(num_rows(x), width, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_bfloat16(), T, geglu_rows, a, begin, end);
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_geglu_backward(const Tensor& dy, const Tensor& x, const Optional& bias) {
  return run_backward("bias_geglu_backward", dy, x, bias, x.size(x.dim() - 1) / 2,
                      [](const auto& a, int64_t begin, int64_t end, auto* sums) {
                        using T = typename std::decay_t<decltype(a)>::Element;
                        HYBRIDPAR_RUN(has_bfloat16(), T, geglu_backward_rows, a, begin, end, sums);
                      });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("bias_gelu(Tensor x, Tensor? bias) -> Tensor");
  library.def("bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor, Tensor)");
  library.def("bias_swiglu(Tensor x, Tensor? bias) -> Tensor");
  library.def("bias_swiglu_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor, Tensor)");
  library.def("bias_geglu(Tensor x, Tensor? bias) -> Tensor");
  library.def("bias_geglu_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  library.impl("bias_swiglu", TORCH_BOX(&bias_swiglu));
  library.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
  library.impl("bias_geglu", TORCH_BOX(&bias_geglu));
  library.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
}
