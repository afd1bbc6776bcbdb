// Dropout alone. Random bits and normal numbers stay on the CPU: they make parameters, once.

#include "operators.h"

namespace hybridpar {
namespace {

Tensor philox_dropout(const Tensor& x, int64_t key0, int64_t key1, const Optional& counter, int64_t threshold,
                      double scale, int64_t stride, int64_t start) {
  const char* op = "philox_dropout";
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous(), op, ": x must be contiguous [samples, rows, cols]");
  const Type type = type_of(op, x);
  Tensor out = torch::stable::empty_like(x);
  int64_t rows = x.size(1), cols = x.size(2);
  if (stride == cols) {  // rows follow each other without a gap
    cols *= rows;
    rows = 1;
  }
  const Mask mask = make_mask(op, x, x.size(0) * rows, key0, key1, counter, threshold, scale, stride, start);
  STD_TORCH_CHECK(mask.counter, op, ": needs a counter");
  const OnDevice on(x);
  launch_drop(type, {x.data_ptr(), out.data_ptr(), nullptr, x.size(0) * rows, cols, mask}, on.stream);
  return out;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) { library.impl("philox_dropout", TORCH_BOX(&philox_dropout)); }
