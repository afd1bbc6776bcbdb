// softmax(scale * x) over the last dimension with causal and padding masks.

#include "operators.h"

namespace hybridpar {
namespace {

void check(const char* op, const Tensor& x) {
  check_contiguous(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 4, op, ": x must be [samples, heads, queries, keys]");
}

Softmax scores(const char* op, const Tensor& x, double scale, bool causal) {
  return {x.data_ptr(), nullptr, nullptr, nullptr, num_rows(x), x.size(1) * x.size(2), x.size(2),
          columns(op, x.size(3)), scale, causal};
}

Tensor masked_softmax(const Tensor& x, const Optional& real, double scale, bool causal) {
  const char* op = "masked_softmax";
  check(op, x);
  STD_TORCH_CHECK(!real || (real->is_contiguous() && real->scalar_type() == ScalarType::Bool &&
                            real->numel() == x.size(0) * x.size(3) && real->device() == x.device()),
                  op, ": the padding mask must be bool [samples, keys], on the device of x");
  const Type type = type_of(op, x);
  Tensor y = torch::stable::empty_like(x);
  Softmax a = scores(op, x, scale, causal);
  a.real = static_cast<const uint8_t*>(data(real));
  a.out = y.data_ptr();
  const OnDevice on(x);
  launch_softmax(type, a, on.stream);
  return y;
}

Tensor masked_softmax_backward(const Tensor& dy, const Tensor& y, double scale, bool causal) {
  const char* op = "masked_softmax_backward";
  check(op, y);
  check(op, dy);
  check_like(op, "dy", dy, y);
  const Type type = type_of(op, y);
  Tensor dx = torch::stable::empty_like(y);
  Softmax a = scores(op, y, scale, causal);
  a.dy = dy.data_ptr();
  a.out = dx.data_ptr();
  const OnDevice on(y);
  launch_softmax_backward(type, a, on.stream);
  return dx;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) {
  library.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  library.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
}
