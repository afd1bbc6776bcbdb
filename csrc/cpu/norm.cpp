// LayerNorm and RMSNorm over the last dimension, alone or after `residual + dropout(x + bias)`, and that sum alone;
// forward and backward.
//
// One pass over memory: a row stays in the first-level cache between the sums and what is made of them. Traffic
// forward: reads x (and the residual), writes y (and the sum); backward: reads dy, x, writes dx.

#include "philox.h"

namespace hybridpar {
namespace {

template <class T>
struct Addition {
  const T *x, *bias, *residual;  // bias: may be null
  T* sum;
  int64_t cols;
  Mask mask;
};

// sum = residual + dropout(x + bias), rounded once
template <class T>
HYBRIDPAR_INLINE void add_row(const Addition<T>& a, int64_t row) {
  using W = Wide<T>;
  const T *x = a.x + row * a.cols, *residual = a.residual + row * a.cols, *bias = a.bias;
  T* sum = a.sum + row * a.cols;
  if (a.mask.threshold == 0) {
    if (bias)
      each(a.cols, [=](int64_t i, int) { sum[i] = narrow<T>(wide(residual[i]) + (wide(x[i]) + wide(bias[i]))); });
    else
      each(a.cols, [=](int64_t i, int) { sum[i] = narrow<T>(wide(residual[i]) + wide(x[i])); });
    return;
  }
  const W scale = static_cast<W>(a.mask.scale);
  const uint32_t threshold = a.mask.threshold;
  blocks(a.mask.stream_of(row), a.mask.index_of(row), a.cols, [=](const uint32_t* words, int64_t at, int64_t n) {
    if (bias)
      each(n, [=](int64_t i, int) {
        const W kept = (wide(x[at + i]) + wide(bias[at + i])) * scale;
        sum[at + i] = narrow<T>(wide(residual[at + i]) + (words[i] >= threshold ? kept : W(0)));
      });
    else
      each(n, [=](int64_t i, int) {
        const W kept = wide(x[at + i]) * scale;
        sum[at + i] = narrow<T>(wide(residual[at + i]) + (words[i] >= threshold ? kept : W(0)));
      });
  });
}

template <class T>
HYBRIDPAR_INLINE void add_any(const Addition<T>& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) add_row(a, row);
}

// dropped: what dropout leaves of the gradient dx of a row; sums (may be null): the columns' sums of it. In place where
// nothing is dropped.
template <class T>
HYBRIDPAR_INLINE void drop_row(const Mask& mask, int64_t row, int64_t cols, const T* dx, T* dropped, Wide<T>* sums) {
  using W = Wide<T>;
  if (mask.threshold == 0) {
    if (sums) each(cols, [=](int64_t i, int) { sums[i] += wide(dx[i]); });
    return;
  }
  const W scale = static_cast<W>(mask.scale);
  const uint32_t threshold = mask.threshold;
  blocks(mask.stream_of(row), mask.index_of(row), cols, [=](const uint32_t* words, int64_t at, int64_t n) {
    if (sums)
      each(n, [=](int64_t i, int) {
        const W value = words[i] >= threshold ? wide(dx[at + i]) * scale : W(0);
        sums[at + i] += value;
        dropped[at + i] = narrow<T>(value);
      });
    else
      each(n, [=](int64_t i, int) {
        dropped[at + i] = narrow<T>(words[i] >= threshold ? wide(dx[at + i]) * scale : W(0));
      });
  });
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

template <class T>
struct Forward {
  Addition<T> addition;
  bool adds;
  const T *weight, *bias;  // bias: may be null
  T* y;
  Wide<T>* stats;  // [rows, 2]: mean (0 where not centred), 1 / deviation
  int64_t cols;
  double eps;
  bool centre;
};

template <class T>
HYBRIDPAR_INLINE void forward_any(const Forward<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  for (int64_t row = begin; row < end; ++row) {
    if (a.adds) add_row(a.addition, row);
    const T* x = (a.adds ? a.addition.sum : a.addition.x) + row * a.cols;
    W mean = 0;
    if (a.centre) {
      W lanes[kLanes] = {};
      each(a.cols, [&](int64_t i, int lane) { lanes[lane] += wide(x[i]); });
      mean = sum_lanes(lanes) / static_cast<W>(a.cols);
    }
    W squares[kLanes] = {};
    each(a.cols, [&](int64_t i, int lane) {
      const W d = wide(x[i]) - mean;
      squares[lane] = multiply_add(d, d, squares[lane]);
    });
    const W variance = sum_lanes(squares) / static_cast<W>(a.cols);
    const W scale = W(1) / std::sqrt(variance + static_cast<W>(a.eps));
    a.stats[2 * row] = mean;
    a.stats[2 * row + 1] = scale;
    T* y = a.y + row * a.cols;
    const T *weight = a.weight, *bias = a.bias;
    if (bias)
      each(a.cols, [=](int64_t i, int) {
        y[i] = narrow<T>(multiply_add((wide(x[i]) - mean) * scale, wide(weight[i]), wide(bias[i])));
      });
    else
      each(a.cols, [=](int64_t i, int) { y[i] = narrow<T>((wide(x[i]) - mean) * scale * wide(weight[i])); });
  }
}

template <class T>
struct Backward {
  const T *dy, *dsum, *x, *weight;  // dsum: may be null
  const Wide<T>* stats;
  T *dx, *dropped;  // dropped: null without an addition
  int64_t cols;
  bool centre, with_bias;  // with_bias: of the addition
  Mask mask;
};

// partial: [3, cols], the sums of dy * normalised x, of dy, and of the gradient of x + bias
template <class T>
HYBRIDPAR_INLINE void backward_any(const Backward<T>& a, int64_t begin, int64_t end, Wide<T>* partial) {
  using W = Wide<T>;
  const T* weight = a.weight;
  for (int64_t row = begin; row < end; ++row) {
    const T *dy = a.dy + row * a.cols, *x = a.x + row * a.cols;
    const W mean = a.stats[2 * row], scale = a.stats[2 * row + 1];
    W along[kLanes] = {}, level[kLanes] = {};
    W *dweight = partial, *dbias = partial + a.cols;
    if (a.centre)
      each(a.cols, [&](int64_t i, int lane) {
        const W g = wide(dy[i]), z = (wide(x[i]) - mean) * scale, h = g * wide(weight[i]);
        along[lane] = multiply_add(h, z, along[lane]);
        level[lane] += h;
        dweight[i] = multiply_add(g, z, dweight[i]);
        dbias[i] += g;
      });
    else
      each(a.cols, [&](int64_t i, int lane) {
        const W g = wide(dy[i]), z = wide(x[i]) * scale;
        along[lane] = multiply_add(g * wide(weight[i]), z, along[lane]);
        dweight[i] = multiply_add(g, z, dweight[i]);
      });
    const W c1 = sum_lanes(along) / static_cast<W>(a.cols), c0 = sum_lanes(level) / static_cast<W>(a.cols);
    T* dx = a.dx + row * a.cols;
    const T* dsum = a.dsum ? a.dsum + row * a.cols : nullptr;
    const auto gradient = [=](int64_t i) __attribute__((always_inline)) {
      const W z = (wide(x[i]) - mean) * scale;
      return (multiply_add(wide(dy[i]), wide(weight[i]), -c0) - z * c1) * scale;
    };
    if (dsum)
      each(a.cols, [=](int64_t i, int) { dx[i] = narrow<T>(gradient(i) + wide(dsum[i])); });
    else
      each(a.cols, [=](int64_t i, int) { dx[i] = narrow<T>(gradient(i)); });
    if (a.dropped)
      drop_row(a.mask, row, a.cols, a.dx + row * a.cols, a.dropped + row * a.cols,
               a.with_bias ? partial + 2 * a.cols : nullptr);
  }
}

#define HYBRIDPAR_NORM(T)                                                                                   \
  HYBRIDPAR_CLONES void add_rows(const Addition<T>& a, int64_t begin, int64_t end) { add_any(a, begin, end); } \
  HYBRIDPAR_CLONES void drop_rows(const Subtraction<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {      \
    drop_any(a, begin, end, sums);                                                                          \
  }                                                                                                         \
  HYBRIDPAR_CLONES void forward_rows(const Forward<T>& a, int64_t begin, int64_t end) {                     \
    forward_any(a, begin, end);                                                                             \
  }                                                                                                         \
  HYBRIDPAR_CLONES void backward_rows(const Backward<T>& a, int64_t begin, int64_t end, Wide<T>* partial) { \
    backward_any(a, begin, end, partial);                                                     \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_NORM)

void check(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_contiguous(op, "x", x);
  check_contiguous(op, "weight", weight);
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1), op,
                  ": weight must be of the last size of x");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type() && (!bias || bias->scalar_type() == x.scalar_type()), op,
                  ": x, weight and bias must be of one type");
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->dim() == 1 && bias->size(0) == weight.size(0)), op,
                  ": bias must be like weight");
}

// What is added before: residual + dropout(x + bias).
struct Sum {
  const Tensor* residual;
  std::optional<Tensor> bias;
  Mask mask;
};

Sum make_sum(const char* op, const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual,
             const Mask& mask) {
  check_contiguous(op, "x", x);
  check_contiguous(op, "residual", residual);
  STD_TORCH_CHECK(residual.numel() == x.numel() && residual.scalar_type() == x.scalar_type(), op,
                  ": residual must be like x");
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->dim() == 1 && bias->size(0) == x.size(x.dim() - 1) &&
                            bias->scalar_type() == x.scalar_type()),
                  op, ": bias must be of the last size of x, and of its type");
  return {&residual, bias, mask};
}

template <class T>
Addition<T> addition(const Tensor& x, const Sum* sum, const Tensor& out) {
  if (!sum) return {data<T>(x), nullptr, nullptr, nullptr, 0, Mask{}};
  return {data<T>(x), data<T>(sum->bias), data<T>(*sum->residual), data<T>(out), x.size(x.dim() - 1), sum->mask};
}

struct Normalised {
  Tensor y, sum, stats;
};

Normalised run_forward(const char* op, const Tensor& x, const Sum* sum, const Tensor& weight,
                       const std::optional<Tensor>& bias, double eps, bool centre) {
  check(op, x, weight, bias);
  const int64_t rows = num_rows(x), cols = weight.size(0);
  Tensor y = torch::stable::empty_like(x), total = sum ? torch::stable::empty_like(x) : y;
  Tensor stats = torch::stable::empty({rows, 2}, wide_type(x));
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    const Forward<T> a{addition<T>(x, sum, total), sum != nullptr, data<T>(weight), data<T>(bias), data<T>(y),
                       data<Wide<T>>(stats), cols, eps, centre};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
  });
  return {y, total, stats};
}

template <class T>
Tensor narrowed(const Wide<T>* values, int64_t cols, ScalarType type) {
  Tensor out = torch::stable::empty({cols}, type);
  for (int64_t i = 0; i < cols; ++i) data<T>(out)[i] = narrow<T>(values[i]);
  return out;
}

struct Gradients {
  Tensor dx, dropped, dbias_of_x, dweight, dbias;
};

// mask: null without an addition; with_bias: the addition's
Gradients run_backward(const char* op, const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& x,
                       const Tensor& weight, const Tensor& stats, bool centre, const Mask* mask, bool with_bias) {
  check(op, x, weight, std::nullopt);
  check_contiguous(op, "dy", dy);
  STD_TORCH_CHECK(!dsum || dsum->is_contiguous(), op, ": dsum must be contiguous");
  const int64_t rows = num_rows(x), cols = weight.size(0);
  const ScalarType type = x.scalar_type();
  const Tensor none = torch::stable::empty({0}, type);
  Gradients out{torch::stable::empty_like(x), none, none, none, none};
  if (mask && mask->threshold) out.dropped = torch::stable::empty_like(x);
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const Backward<T> a{data<T>(dy), data<T>(dsum), data<T>(x), data<T>(weight), data<W>(stats), data<T>(out.dx),
                        mask ? data<T>(mask->threshold ? out.dropped : out.dx) : nullptr, cols, centre, with_bias,
                        mask ? *mask : Mask{}};
    std::vector<W> partial;
    ColumnSums(rows, cols, 3).run(
        partial, [&](int64_t begin, int64_t end, W* to) { backward_rows(a, begin, end, to); });
    out.dweight = narrowed<T>(partial.data(), cols, type);
    out.dbias = narrowed<T>(partial.data() + cols, cols, type);
    if (with_bias) out.dbias_of_x = narrowed<T>(partial.data() + 2 * cols, cols, type);
  });
  return out;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                                bool centre) {
  const auto out = run_forward("norm", x, nullptr, weight, bias, eps, centre);
  return {out.y, out.stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                 const Tensor& stats, bool centre) {
  const auto out = run_backward("norm_backward", dy, std::nullopt, x, weight, stats, centre, nullptr, false);
  return {out.dx, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const std::optional<Tensor>& bias_of_x,
                                            const Tensor& residual, const Tensor& weight,
                                            const std::optional<Tensor>& bias, double eps, bool centre, int64_t key0,
                                            int64_t key1, int64_t step, int64_t sample, int64_t threshold, double scale,
                                            int64_t stride, int64_t start) {
  const Mask mask = make_mask("add_norm", x, key0, key1, step, sample, threshold, scale, stride, start);
  const Sum sum = make_sum("add_norm", x, bias_of_x, residual, mask);
  const auto out = run_forward("add_norm", x, &sum, weight, bias, eps, centre);
  return {out.y, out.sum, out.stats};
}

// the gradients of: residual, x (empty without dropout: the residual's), bias of x (empty without one), weight, bias
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_norm_backward(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& sum, const Tensor& weight, const Tensor& stats,
    bool with_bias, bool centre, int64_t key0, int64_t key1, int64_t step, int64_t sample, int64_t threshold,
    double scale, int64_t stride, int64_t start) {
  const Mask mask = make_mask("add_norm_backward", sum, key0, key1, step, sample, threshold, scale, stride, start);
  const auto out = run_backward("add_norm_backward", dy, dsum, sum, weight, stats, centre, &mask, with_bias);
  return {out.dx, out.dropped, out.dbias_of_x, out.dweight, out.dbias};
}

Tensor bias_dropout_add(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual, int64_t key0,
                        int64_t key1, int64_t step, int64_t sample, int64_t threshold, double scale, int64_t stride,
                        int64_t start) {
  const Mask mask = make_mask("bias_dropout_add", x, key0, key1, step, sample, threshold, scale, stride, start);
  const Sum sum = make_sum("bias_dropout_add", x, bias, residual, mask);
  Tensor out = torch::stable::empty_like(x);
  by_type("bias_dropout_add", x, [&](auto element) {
    const auto a = addition<decltype(element)>(x, &sum, out);
    over_rows(num_rows(x), a.cols, [&](int64_t begin, int64_t end) { add_rows(a, begin, end); });
  });
  return out;
}

// the gradients of x (empty without dropout: the sum's) and of the bias (empty without one)
std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& dsum, bool with_bias, int64_t key0, int64_t key1,
                                                     int64_t step, int64_t sample, int64_t threshold, double scale,
                                                     int64_t stride, int64_t start) {
  const char* op = "bias_dropout_add_backward";
  check_contiguous(op, "dsum", dsum);
  const Mask mask = make_mask(op, dsum, key0, key1, step, sample, threshold, scale, stride, start);
  const int64_t cols = dsum.size(dsum.dim() - 1);
  const Tensor none = torch::stable::empty({0}, dsum.scalar_type());
  Tensor dropped = threshold ? torch::stable::empty_like(dsum) : none, dbias = none;
  by_type(op, dsum, [&](auto element) {
    using T = decltype(element);
    const Subtraction<T> a{data<T>(dsum), data<T>(dropped), cols, with_bias, mask};
    std::vector<Wide<T>> partial;
    ColumnSums(num_rows(dsum), cols, 1).run(
        partial, [&](int64_t begin, int64_t end, Wide<T>* to) { drop_rows(a, begin, end, to); });
    if (with_bias) dbias = narrowed<T>(partial.data(), cols, dsum.scalar_type());
  });
  return {dropped, dbias};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
#define HYBRIDPAR_MASK \
  "int key0, int key1, SymInt step, SymInt sample, int threshold, float scale, SymInt stride, SymInt start"
  library.def("norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centre) -> (Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor stats, bool centre) -> (Tensor, Tensor, Tensor)");
  library.def(
      "add_norm(Tensor x, Tensor? bias_of_x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool "
      "centre, " HYBRIDPAR_MASK ") -> (Tensor, Tensor, Tensor)");
  library.def(
      "add_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor weight, Tensor stats, bool with_bias, bool "
      "centre, " HYBRIDPAR_MASK ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, " HYBRIDPAR_MASK ") -> Tensor");
  library.def("bias_dropout_add_backward(Tensor dsum, bool with_bias, " HYBRIDPAR_MASK ") -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("norm_backward", TORCH_BOX(&norm_backward));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("add_norm_backward", TORCH_BOX(&add_norm_backward));
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}
