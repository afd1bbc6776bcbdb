// Scaled dot-product attention on Hopper, forward: bfloat16 and float16, head dimensions 64 and 128, no padding mask and
// no dropout. The rest is Triton's (kernels/attention.py), with the same results.

#include "operators.h"

namespace hybridpar {
namespace {

// x, or a copy that the TMA unit can read.
Tensor readable(const Tensor& x) {
  constexpr int64_t kBytes = 16;
  bool good = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.data_ptr()) % kBytes == 0;
  for (int dim = 0; dim < 3; ++dim)
    good &= x.size(dim) == 1 || (x.stride(dim) > 0 && x.stride(dim) * x.element_size() % kBytes == 0);
  return good ? x : torch::stable::clone(torch::stable::contiguous(x));
}

Strided4 strided(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// q [samples, heads, s, d], k and v [samples, kv heads, s, d] -> out [samples, s, heads, d], lse [samples, heads, s]
std::tuple<Tensor, Tensor> attention_hopper(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const std::vector<int64_t>& kv_head, double scale, bool causal) {
  const char* op = "attention_hopper";
  const auto fits = [&](const Tensor& x) {
    return x.dim() == 4 && q.dim() == 4 && x.size(0) == q.size(0) && x.size(1) == k.size(1) && x.size(2) == q.size(2) &&
           x.size(3) == q.size(3) && x.scalar_type() == q.scalar_type() && x.device() == q.device();
  };
  STD_TORCH_CHECK(fits(k) && fits(v), op,
                  ": q must be [samples, heads, s, d], k and v [samples, kv heads, s, d] of its type beside it");
  const int64_t samples = q.size(0), heads = q.size(1), s = q.size(2), d = q.size(3);
  const Type type = type_of(op, q);
  STD_TORCH_CHECK((type == Type::BFloat16 || type == Type::Half) && (d == 64 || d == 128), op,
                  ": needs bfloat16 or float16 and d 64 or 128, got d ", d);
  STD_TORCH_CHECK(heads <= AttentionHopper::kMostHeads, op, ": has ", heads, " heads, more than ",
                  AttentionHopper::kMostHeads);
  STD_TORCH_CHECK(scale > 0, op, ": scale must be positive, got ", scale);  // its largest score is the largest scaled
  STD_TORCH_CHECK(static_cast<int64_t>(kv_head.size()) == heads, op, ": kv_head needs an entry for each query head");
  for (int64_t g : kv_head) STD_TORCH_CHECK(g >= 0 && g < k.size(1), op, ": kv_head names a head that is not there");
  Tensor out = empty(q, {samples, s, heads, d}, q.scalar_type());
  Tensor lse = empty(q, {samples, heads, s}, ScalarType::Float);
  if (q.numel() == 0) return {out, lse};
  Tensor counter = empty(q, {1}, ScalarType::Int);
  const OnDevice on(q);
  const Tensor q_read = readable(q), k_read = readable(k), v_read = readable(v);
  launch_attention_hopper(type,
                          {strided(q_read), strided(k_read), strided(v_read), kv_head.data(), out.data_ptr(),
                           static_cast<float*>(lse.data_ptr()), static_cast<int*>(counter.data_ptr()), samples, heads,
                           k.size(1), columns(op, s), static_cast<int>(d), scale, causal},
                          on.stream);
  return {out, lse};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

#ifdef HYBRIDPAR_HOPPER
STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) {
  library.impl("attention_hopper", TORCH_BOX(&attention_hopper));
}
#endif
