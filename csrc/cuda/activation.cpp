// gelu(x + bias) in its tanh form and silu(gate + bias) * (up + bias).

#include "operators.h"

namespace hybridpar {
namespace {

using Launch = void (*)(Type, const Activation&, void*);

void check(const char* op, const Tensor& x, const Optional& bias) {
  check_contiguous(op, "x", x);
  check_vector(op, "bias", bias, x);
}

Tensor run_forward(const char* op, const Tensor& x, const Optional& bias, int64_t cols, Launch forward) {
  const Type type = type_of(op, x);
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) shape.push_back(x.size(dim));
  shape.push_back(cols);
  Tensor y = empty(x, shape, x.scalar_type());
  const OnDevice on(x);
  forward(type, {x.data_ptr(), data(bias), nullptr, y.data_ptr(), nullptr, num_rows(x), cols}, on.stream);
  return y;
}

// dx and the gradient of the bias, empty without one
std::tuple<Tensor, Tensor> run_backward(const char* op, const Tensor& dy, const Tensor& x, const Optional& bias,
                                        int64_t cols, Launch backward) {
  check(op, x, bias);
  check_contiguous(op, "dy", dy);
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type() && dy.device() == x.device() && dy.dim() == x.dim() &&
                      num_cols(dy) == cols && num_rows(dy) == num_rows(x),
                  op, ": dy must be like y");
  const Type type = type_of(op, x);
  const int64_t rows = num_rows(x);
  const int width = columns(op, num_cols(x));
  const int64_t parts = bias ? parts_of_elements(rows, cols).count : 0;
  Tensor dx = torch::stable::empty_like(x), dbias = bias ? torch::stable::empty_like(*bias) : none(x);
  Tensor partial = empty(x, {parts, width}, wide_type(x));
  const OnDevice on(x);
  backward(type,
           {x.data_ptr(), data(bias), dy.data_ptr(), dx.data_ptr(), bias ? partial.data_ptr() : nullptr, rows, cols},
           on.stream);
  if (bias) launch_column_sums(type, {partial.data_ptr(), parts, 1, width, {dbias.data_ptr()}}, on.stream);
  return {dx, dbias};
}

Tensor bias_gelu(const Tensor& x, const Optional& bias) {
  check("bias_gelu", x, bias);
  return run_forward("bias_gelu", x, bias, num_cols(x), launch_gelu);
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& dy, const Tensor& x, const Optional& bias) {
  return run_backward("bias_gelu_backward", dy, x, bias, num_cols(x), launch_gelu_backward);
}

Tensor bias_swiglu(const Tensor& x, const Optional& bias) {
  check("bias_swiglu", x, bias);
  STD_TORCH_CHECK(num_cols(x) % 2 == 0, "bias_swiglu: the last size of x must be even");
  return run_forward("bias_swiglu", x, bias, num_cols(x) / 2, launch_swiglu);
}

std::tuple<Tensor, Tensor> bias_swiglu_backward(const Tensor& dy, const Tensor& x, const Optional& bias) {
  return run_backward("bias_swiglu_backward", dy, x, bias, num_cols(x) / 2, launch_swiglu_backward);
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  library.impl("bias_swiglu", TORCH_BOX(&bias_swiglu));
  library.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
}
