// LayerNorm and RMSNorm, alone or after residual + dropout(x + bias), and that sum alone.

#include "operators.h"

namespace hybridpar {
namespace {

struct Normalised {
  Tensor y, sum, stats;
};

// addition: what is added before, or null
Normalised run_forward(const char* op, const Tensor& x, const Addition* addition, const Tensor& weight,
                       const Optional& bias, double eps, bool centre) {
  check_contiguous(op, "x", x);
  check_vector(op, "weight", weight, x);
  check_vector(op, "bias", bias, x);
  const Type type = type_of(op, x);
  const int64_t rows = num_rows(x);
  Tensor y = torch::stable::empty_like(x), sum = addition ? torch::stable::empty_like(x) : y;
  Tensor stats = empty(x, {rows, 2}, wide_type(x));
  const OnDevice on(x);
  launch_norm(type,
               {x.data_ptr(), addition ? addition->bias : nullptr, addition ? addition->residual : nullptr,
                weight.data_ptr(), data(bias), sum.data_ptr(), y.data_ptr(), stats.data_ptr(), rows,
                columns(op, num_cols(x)), eps, centre, addition && addition->masked,
                addition ? addition->mask : Mask{}},
               on.stream);
  return {y, sum, stats};
}

struct Gradients {
  Tensor dx, dropped, dbias_of_x, dweight, dbias;
};

// mask: null without an addition; with_bias: the addition's
Gradients run_backward(const char* op, const Tensor& dy, const Optional& dsum, const Tensor& x, const Tensor& weight,
                       const Tensor& stats, bool centre, const Mask* mask, bool with_bias) {
  check_contiguous(op, "x", x);
  check_vector(op, "weight", weight, x);
  check_like(op, "dy", dy, x);
  if (dsum) check_like(op, "dsum", *dsum, x);
  check_contiguous(op, "stats", stats);
  const Type type = type_of(op, x);
  const int64_t rows = num_rows(x);
  const int cols = columns(op, num_cols(x));
  STD_TORCH_CHECK(stats.numel() == 2 * rows && stats.scalar_type() == wide_type(x) && stats.device() == x.device(), op,
                  ": stats must be what the forward pass returned");
  const bool drops = mask && mask->threshold;
  const int64_t parts = parts_of_rows(rows, cols).count;
  Gradients out{torch::stable::empty_like(x), drops ? torch::stable::empty_like(x) : none(x),
                with_bias ? empty(x, {cols}, x.scalar_type()) : none(x), torch::stable::empty_like(weight),
                centre ? torch::stable::empty_like(weight) : torch::stable::new_zeros(x, {cols})};
  Tensor partial = empty(x, {parts, 3, cols}, wide_type(x));
  const OnDevice on(x);
  launch_norm_backward(type,
                {dy.data_ptr(), data(dsum), x.data_ptr(), weight.data_ptr(), stats.data_ptr(), out.dx.data_ptr(),
                 drops ? out.dropped.data_ptr() : nullptr, partial.data_ptr(), rows, cols, centre, with_bias,
                 mask ? *mask : Mask{}},
                on.stream);
  launch_column_sums(type,
              {partial.data_ptr(), parts, 3, cols,
               {out.dweight.data_ptr(), centre ? out.dbias.data_ptr() : nullptr,
                with_bias ? out.dbias_of_x.data_ptr() : nullptr}},
              on.stream);
  return out;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const Optional& bias, double eps, bool centre) {
  const auto out = run_forward("norm", x, nullptr, weight, bias, eps, centre);
  return {out.y, out.stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                 const Tensor& stats, bool centre) {
  const auto out = run_backward("norm_backward", dy, std::nullopt, x, weight, stats, centre, nullptr, false);
  return {out.dx, out.dweight, out.dbias};
}

Addition make_addition(const char* op, const Tensor& x, const Optional& bias, const Tensor& residual,
                       const Mask& mask) {
  check_contiguous(op, "x", x);
  check_like(op, "residual", residual, x);
  check_vector(op, "the bias of x", bias, x);
  return {x.data_ptr(), data(bias), residual.data_ptr(), nullptr, num_rows(x), num_cols(x), mask.threshold != 0, mask};
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Optional& bias_of_x, const Tensor& residual,
                                            const Tensor& weight, const Optional& bias, double eps, bool centre,
                                            int64_t key0, int64_t key1, const Optional& counter, int64_t threshold,
                                            double scale, int64_t stride, int64_t start) {
  const Mask mask = make_mask("add_norm", x, num_rows(x), key0, key1, counter, threshold, scale, stride, start);
  const Addition addition = make_addition("add_norm", x, bias_of_x, residual, mask);
  const auto out = run_forward("add_norm", x, &addition, weight, bias, eps, centre);
  return {out.y, out.sum, out.stats};
}

// the gradients of: residual, x (empty without dropout: the residual's), bias of x (empty without one), weight, bias
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_norm_backward(
    const Tensor& dy, const Optional& dsum, const Tensor& sum, const Tensor& weight, const Tensor& stats,
    bool with_bias, bool centre, int64_t key0, int64_t key1, const Optional& counter, int64_t threshold,
    double scale, int64_t stride, int64_t start) {
  const Mask mask =
      make_mask("add_norm_backward", sum, num_rows(sum), key0, key1, counter, threshold, scale, stride, start);
  const auto out = run_backward("add_norm_backward", dy, dsum, sum, weight, stats, centre, &mask, with_bias);
  return {out.dx, out.dropped, out.dbias_of_x, out.dweight, out.dbias};
}

Tensor bias_dropout_add(const Tensor& x, const Optional& bias, const Tensor& residual, int64_t key0, int64_t key1,
                        const Optional& counter, int64_t threshold, double scale, int64_t stride, int64_t start) {
  const char* op = "bias_dropout_add";
  const Mask mask = make_mask(op, x, num_rows(x), key0, key1, counter, threshold, scale, stride, start);
  Addition addition = make_addition(op, x, bias, residual, mask);
  const Type type = type_of(op, x);
  Tensor out = torch::stable::empty_like(x);
  addition.sum = out.data_ptr();
  const OnDevice on(x);
  launch_add(type, addition, on.stream);
  return out;
}

// the gradients of x (empty without dropout: the sum's) and of the bias (empty without one)
std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& dsum, bool with_bias, int64_t key0, int64_t key1,
                                                     const Optional& counter, int64_t threshold, double scale,
                                                     int64_t stride, int64_t start) {
  const char* op = "bias_dropout_add_backward";
  check_contiguous(op, "dsum", dsum);
  const Mask mask = make_mask(op, dsum, num_rows(dsum), key0, key1, counter, threshold, scale, stride, start);
  const Type type = type_of(op, dsum);
  const int64_t rows = num_rows(dsum);
  const int cols = columns(op, num_cols(dsum));
  const int64_t parts = with_bias ? parts_of_elements(rows, cols).count : 0;
  Tensor dropped = threshold ? torch::stable::empty_like(dsum) : none(dsum);
  Tensor dbias = with_bias ? empty(dsum, {cols}, dsum.scalar_type()) : none(dsum);
  Tensor partial = empty(dsum, {parts, cols}, wide_type(dsum));
  const OnDevice on(dsum);
  if (threshold || with_bias)
    launch_drop(type,
         {dsum.data_ptr(), threshold ? dropped.data_ptr() : nullptr, with_bias ? partial.data_ptr() : nullptr, rows,
          cols, mask},
         on.stream);
  if (with_bias) launch_column_sums(type, {partial.data_ptr(), parts, 1, cols, {dbias.data_ptr()}}, on.stream);
  return {dropped, dbias};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CUDA, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("norm_backward", TORCH_BOX(&norm_backward));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("add_norm_backward", TORCH_BOX(&add_norm_backward));
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}
