// Rotary position embedding.

#include "operators.h"

namespace hybridpar {
namespace {

// x [samples, heads, s, d], positions [s] or [samples, s] (without: from `offset` on) -> [samples, s, heads, d].
// Positions on the device may be negative: to look at them would be to wait for them. Frequencies are powers of the base.
Tensor rotary(const Tensor& x, double base, const std::vector<double>& frequencies, double magnitude, int64_t offset,
              const Optional& positions, bool back) {
  const char* op = "rotary";
  STD_TORCH_CHECK(frequencies.empty() && magnitude == 1.0, op, ": has no scaled frequencies");
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0 && (x.size(3) == 0 || x.stride(3) == 1), op,
                  ": needs [samples, heads, s, d] with d even and without gaps");
  const int64_t samples = x.size(0), heads = x.size(1), s = x.size(2), d = x.size(3);
  STD_TORCH_CHECK(!positions || (positions->is_contiguous() && positions->scalar_type() == ScalarType::Long &&
                                 (positions->numel() == s || positions->numel() == samples * s) &&
                                 positions->device() == x.device()),
                  op, ": positions must be int64 [s] or [samples, s], on the device of x");
  STD_TORCH_CHECK(positions || s == 0 || offset >= 0, op, ": position ", offset, " is negative");
  const Type type = type_of(op, x);
  Tensor y = empty(x, {samples, s, heads, d}, x.scalar_type());
  const OnDevice on(x);
  launch_rotary(type,
         {x.data_ptr(), y.data_ptr(), x.stride(0), x.stride(1), x.stride(2), samples, heads, s,
          columns(op, d) / 2, static_cast<const int64_t*>(data(positions)),
          positions && positions->numel() == samples * s && samples > 1, offset, base, back ? -1.0 : 1.0},
         on.stream);
  return y;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) { library.impl("rotary", TORCH_BOX(&rotary)); }
