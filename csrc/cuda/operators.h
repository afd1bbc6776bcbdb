// Parts that the operators share: checks, allocation, the device and its stream. The operators are those of csrc/cpu, which
// also defines their arguments: the same results (but for the order of sums), shapes, types, and errors.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace hybridpar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// While it lives, the device of x is the current one. `stream`: torch's current stream there.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& x);
  void* stream;

 private:
  std::unique_ptr<torch::stable::accelerator::DeviceGuard> guard_;
};

inline Type type_of(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return Type::Float;
    case ScalarType::Double:
      return Type::Double;
    case ScalarType::BFloat16:
      return Type::BFloat16;
    case ScalarType::Half:
      return Type::Half;
    default:
      STD_TORCH_CHECK(false, op, ": needs float32, float64, bfloat16 or float16");
  }
}

inline ScalarType wide_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void* data(const Optional& x) { return x ? x->data_ptr() : nullptr; }

// The size of a dimension that kernels count in 32 bits, some of them a few blocks beyond it.
inline int columns(const char* op, int64_t cols) {
  STD_TORCH_CHECK(cols <= std::numeric_limits<int>::max() / 2, op, ": has ", cols, " columns, more than 2^30 - 1");
  return static_cast<int>(cols);
}

inline void check_contiguous(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), op, ": ", name, " must be contiguous");
}

// other is contiguous, of the type of x, beside it, and has as many elements.
inline void check_like(const char* op, const char* name, const Tensor& other, const Tensor& x) {
  check_contiguous(op, name, other);
  STD_TORCH_CHECK(other.numel() == x.numel() && other.scalar_type() == x.scalar_type() && other.device() == x.device(),
                  op, ": ", name, " must be like x: ", x.numel(), " elements of its type on its device");
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

}  // namespace hybridpar
