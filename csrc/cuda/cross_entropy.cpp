// The local passes of the vocabulary-parallel cross-entropy.

#include "operators.h"

namespace hybridpar {
namespace {

CrossEntropy arguments(const char* op, const void* logits, const Tensor& gradient, const Tensor& column,
                       const Tensor& numbers, int64_t num_real, bool with_sum) {
  return {logits,
          gradient.data_ptr(),
          static_cast<const int64_t*>(column.data_ptr()),
          numbers.data_ptr(),
          gradient.size(0),
          columns(op, gradient.size(1)),
          static_cast<int>(num_real),
          with_sum};
}

void check(const char* op, const Tensor& logits, const Tensor& column, int64_t num_real) {
  check_contiguous(op, "logits", logits);
  check_contiguous(op, "column", column);
  STD_TORCH_CHECK(logits.dim() == 2 && column.dim() == 1 && column.size(0) == logits.size(0) &&
                      column.scalar_type() == ScalarType::Long && column.device() == logits.device(),
                  op, ": needs logits [rows, columns] and column int64 [rows] on one device");
  STD_TORCH_CHECK(num_real >= 0 && num_real <= logits.size(1), op, ": num_real is not within the columns");
}

// [4 (3 without the sum), rows]: maximum, sum of exponentials of what is below it, the label's logit, sum of what the
// logits are below it
Tensor cross_entropy(const Tensor& logits, const Tensor& column, int64_t num_real, bool with_sum) {
  const char* op = "cross_entropy";
  check(op, logits, column, num_real);
  const Type type = type_of(op, logits);
  Tensor out = empty(logits, {with_sum ? 4 : 3, logits.size(0)}, wide_type(logits));
  const OnDevice on(logits);
  launch_cross_entropy(type, arguments(op, logits.data_ptr(), logits, column, out, num_real, with_sum), on.stream);
  return out;
}

// numbers [4, rows]: top, factor, target, level; gradient may be logits
void cross_entropy_backward_(const Tensor& gradient, const Tensor& logits, const Tensor& column, const Tensor& numbers,
                             int64_t num_real) {
  const char* op = "cross_entropy_backward_";
  check(op, gradient, column, num_real);
  check_like(op, "logits", logits, gradient);
  check_contiguous(op, "numbers", numbers);
  STD_TORCH_CHECK(numbers.dim() == 2 && numbers.size(0) == 4 && numbers.size(1) == gradient.size(0) &&
                      numbers.scalar_type() == wide_type(gradient) && numbers.device() == gradient.device(),
                  op, ": numbers must be [4, rows], in the type of the arithmetic, on the device of the logits");
  const Type type = type_of(op, gradient);
  const OnDevice on(gradient);
  const void* from = logits.data_ptr();
  if ((reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(gradient.data_ptr())) % 16) {
    Tensor to = gradient;
    torch::stable::copy_(to, logits);
    from = gradient.data_ptr();
  }
  launch_cross_entropy_backward(type, arguments(op, from, gradient, column, numbers, num_real, true), on.stream);
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) {
  library.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  library.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}
