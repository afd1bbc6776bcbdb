// LayerNorm and RMSNorm over the last dimension, alone or after `residual + dropout(x + bias)`; forward and backward.
//
// One pass over memory: a row stays in the first-level cache between the sums and what is made of them. Traffic
// forward: reads x (and the residual), writes y (and the sum); backward: reads dy, x (and dsum), writes dx. Rows go two at
// a time: their sums do not wait for each other, and what all rows share is loaded once for both.

#include "residual.h"

namespace hybridpar {
namespace {

constexpr int kTogether = 2;  // rows

template <class T>
struct Forward {
  Addition<T> addition;
  bool adds;
  const T* x;  // what is normalised: may be the sum
  const Wide<T> *weight, *bias;  // bias: may be null
  T* y;
  Wide<T>* stats;  // [rows, 2]: mean (0 where not centred), 1 / deviation
  int64_t cols;
  double eps;
  bool centre;
};

// value(at, i) is element i of a row that begins `at` elements after the first of R rows: it is called once for each, in order.
// `later`: what it reads, of the next rows.
template <int R, class T, class F, class... S>
HYBRIDPAR_INLINE void forward_block(const Forward<T>& a, int64_t row, const F& value, const S&... later) {
  using W = Wide<T>;
  const int64_t cols = a.cols;
  const T* x = a.x + row * cols;
  W sums[R][kLanes] = {}, mean[R] = {}, scale[R];
  if (a.centre) {
    each(cols, [&](int64_t i, int lane) {
      repeat<R>([&](auto r) { sums[r][lane] += value(r * cols, i); });
    }, later...);
    repeat<R>([&](auto r) {
      mean[r] = sum_lanes(sums[r]) / static_cast<W>(cols);
      std::fill_n(sums[r], kLanes, W(0));
    });
    each(cols, [&](int64_t i, int lane) {
      repeat<R>([&](auto r) {
        const W d = wide(x[r * cols + i]) - mean[r];
        sums[r][lane] = multiply_add(d, d, sums[r][lane]);
      });
    });
  } else {
    each(cols, [&](int64_t i, int lane) {
      repeat<R>([&](auto r) {
        const W d = value(r * cols, i);
        sums[r][lane] = multiply_add(d, d, sums[r][lane]);
      });
    }, later...);
  }
  repeat<R>([&](auto r) {
    const W variance = sum_lanes(sums[r]) / static_cast<W>(cols);
    scale[r] = W(1) / std::sqrt(variance + static_cast<W>(a.eps));
    a.stats[2 * (row + r)] = mean[r];
    a.stats[2 * (row + r) + 1] = scale[r];
  });
  T* y = a.y + row * cols;
  const W *weight = a.weight, *bias = a.bias;
  const Later<R, T> next{y + R * cols, cols};
  if (bias)
    each(cols, [&](int64_t i, int) {
      const W w = weight[i], b = bias[i];
      repeat<R>([&](auto r) {
        y[r * cols + i] = narrow<T>(multiply_add((wide(x[r * cols + i]) - mean[r]) * scale[r], w, b));
      });
    }, next);
  else
    each(cols, [&](int64_t i, int) {
      const W w = weight[i];
      repeat<R>([&](auto r) { y[r * cols + i] = narrow<T>((wide(x[r * cols + i]) - mean[r]) * scale[r] * w); });
    }, next);
}

template <int R, class T>
HYBRIDPAR_INLINE void forward_rows(const Forward<T>& a, int64_t row) {
  using W = Wide<T>;
  const int64_t cols = a.cols, at = row * cols, after = at + R * cols;
  const Addition<T>& add = a.addition;
  if (!a.adds || add.mask.threshold) {
    if (a.adds) repeat<R>([&](auto r) { add_row(add, row + r); });
    const T* x = a.x + at;
    forward_block<R>(a, row, [x](int64_t begin, int64_t i) { return wide(x[begin + i]); }, Later<R, T>{a.x + after, cols});
    return;
  }
  const T *x = add.x + at, *residual = add.residual + at;
  const W* bias = add.bias;
  T* sum = add.sum + at;
  const Later<R, T> next{add.x + after, cols}, next_residual{add.residual + after, cols}, next_sum{add.sum + after, cols};
  if (bias)
    forward_block<R>(a, row, [=](int64_t begin, int64_t i) {
      return wide(sum[begin + i] = added(x, residual, begin + i, bias[i]));
    }, next, next_residual, next_sum);
  else
    forward_block<R>(a, row, [=](int64_t begin, int64_t i) {
      return wide(sum[begin + i] = added(x, residual, begin + i));
    }, next, next_residual, next_sum);
}

template <class T>
struct Backward {
  const T *dy, *dsum, *x;  // dsum: may be null
  const Wide<T> *weight, *stats;
  T *dx, *dropped;  // dropped: only where the mask drops
  int64_t cols;
  bool centre, with_bias;  // the addition's bias
  Mask mask;

  HYBRIDPAR_INLINE_MEMBER int num_sums() const { return 1 + centre + with_bias; }
  HYBRIDPAR_INLINE_MEMBER Wide<T>* sums_of_bias(Wide<T>* sums) const {
    return with_bias ? sums + (num_sums() - 1) * cols : nullptr;
  }
};

// dx = scale (h - mean(h) - z mean(h z)) + dsum,  h = dy weight,  z = (x - mean) scale
template <int R, class W>
struct Line {  // dx = scale h + slope (x - mean) + origin + dsum
  W mean[R], scale[R], slope[R], origin[R];
};

// Adds to the sums of columns: of the weight, and of the bias where there is one.
template <int R, class T>
HYBRIDPAR_INLINE Line<R, Wide<T>> backward_sums(const Backward<T>& a, int64_t row, Wide<T>* partial) {
  using W = Wide<T>;
  const int64_t cols = a.cols;
  const T *dy = a.dy + row * cols, *x = a.x + row * cols;
  const W* weight = a.weight;
  W *dweight = partial, *dbias = partial + cols;
  W along[R][kLanes] = {}, level[R][kLanes] = {};
  Line<R, W> line;
  repeat<R>([&](auto r) {
    line.mean[r] = a.stats[2 * (row + r)];
    line.scale[r] = a.stats[2 * (row + r) + 1];
  });
  const Later<R, T> next_dy{dy + R * cols, cols}, next_x{x + R * cols, cols};
  if (a.centre)
    each(cols, [&](int64_t i, int lane) {
      W dw = dweight[i], db = dbias[i];
      repeat<R>([&](auto r) {
        const W g = wide(dy[r * cols + i]), h = g * weight[i];
        const W z = (wide(x[r * cols + i]) - line.mean[r]) * line.scale[r];
        along[r][lane] = multiply_add(h, z, along[r][lane]);
        level[r][lane] += h;
        dw = multiply_add(g, z, dw);
        db += g;
      });
      dweight[i] = dw;
      dbias[i] = db;
    }, next_dy, next_x);
  else
    each(cols, [&](int64_t i, int lane) {
      W dw = dweight[i];
      repeat<R>([&](auto r) {
        const W g = wide(dy[r * cols + i]), z = wide(x[r * cols + i]) * line.scale[r];
        along[r][lane] = multiply_add(g * weight[i], z, along[r][lane]);
        dw = multiply_add(g, z, dw);
      });
      dweight[i] = dw;
    }, next_dy, next_x);
  repeat<R>([&](auto r) {
    const W c1 = sum_lanes(along[r]) / static_cast<W>(cols), c0 = sum_lanes(level[r]) / static_cast<W>(cols);
    line.slope[r] = -line.scale[r] * line.scale[r] * c1;
    line.origin[r] = -line.scale[r] * c0;
  });
  return line;
}

// sums: of dx before it is rounded, by column; null unless asked for
template <int R, class T>
HYBRIDPAR_INLINE void backward_write(const Backward<T>& a, int64_t row, const Line<R, Wide<T>>& line, Wide<T>* sums) {
  using W = Wide<T>;
  const int64_t cols = a.cols;
  const T *dy = a.dy + row * cols, *x = a.x + row * cols, *dsum = a.dsum ? a.dsum + row * cols : nullptr;
  const W* weight = a.weight;
  T* dx = a.dx + row * cols;
  const auto write = [&](auto adds, auto sums_up) __attribute__((always_inline)) {
    const auto f = [&](int64_t i, int) __attribute__((always_inline)) {
      W total = 0;
      if constexpr (sums_up) total = sums[i];
      repeat<R>([&](auto r) {
        const W rest = multiply_add(wide(x[r * cols + i]) - line.mean[r], line.slope[r], line.origin[r]);
        W value = multiply_add(wide(dy[r * cols + i]) * weight[i], line.scale[r], rest);
        if constexpr (adds) value += wide(dsum[r * cols + i]);
        if constexpr (sums_up) total += value;
        dx[r * cols + i] = narrow<T>(value);
      });
      if constexpr (sums_up) sums[i] = total;
    };
    const Later<R, T> next{dx + R * cols, cols};
    if constexpr (adds) each(cols, f, next, Later<R, T>{dsum + R * cols, cols});
    else each(cols, f, next);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (dsum) sums ? write(yes, yes) : write(yes, no);
  else sums ? write(no, yes) : write(no, no);
}

template <int R, class T>
HYBRIDPAR_INLINE void backward_rows(const Backward<T>& a, int64_t row, Wide<T>* partial) {
  const Line<R, Wide<T>> line = backward_sums<R>(a, row, partial);
  backward_write<R>(a, row, line, a.mask.threshold == 0 ? a.sums_of_bias(partial) : nullptr);
  if (a.mask.threshold == 0) return;
  repeat<R>([&](auto r) {
    const int64_t at = (row + r) * a.cols;
    drop_row(a.mask, row + r, a.cols, a.dx + at, a.dropped + at, a.sums_of_bias(partial));
  });
}

template <class T>
HYBRIDPAR_INLINE void forward_any(const Forward<T>& a, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + kTogether <= end; row += kTogether) forward_rows<kTogether>(a, row);
  for (; row < end; ++row) forward_rows<1>(a, row);
}

template <class T>
HYBRIDPAR_INLINE void backward_any(const Backward<T>& a, int64_t begin, int64_t end, Wide<T>* partial) {
  int64_t row = begin;
  for (; row + kTogether <= end; row += kTogether) backward_rows<kTogether>(a, row, partial);
  for (; row < end; ++row) backward_rows<1>(a, row, partial);
}

#define HYBRIDPAR_NORM(T)                                                                                     \
  HYBRIDPAR_CLONES void forward(const Forward<T>& a, int64_t begin, int64_t end) { forward_any(a, begin, end); } \
  HYBRIDPAR_CLONES void backward(const Backward<T>& a, int64_t begin, int64_t end, Wide<T>* partial) {         \
    backward_any(a, begin, end, partial);                                                                     \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_NORM)

void check(const char* op, const Tensor& x, const Tensor& weight, const Optional& bias) {
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
  const Tensor& residual;
  const Optional& bias;
  Mask mask;
};

struct Normalised {
  Tensor y, sum, stats;
};

Normalised run_forward(const char* op, const Tensor& x, const Sum* sum, const Tensor& weight,
                       const Optional& bias, double eps, bool centre) {
  check(op, x, weight, bias);
  const int64_t rows = num_rows(x), cols = weight.size(0);
  Tensor y = make_like(x), total = sum ? make_like(x) : y;
  Tensor stats = make({rows, 2}, wide_type(x));
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    const Widened<T> scales(data<T>(weight), cols), shifts(data<T>(bias), cols);
    const Widened<T> added(sum ? data<T>(sum->bias) : nullptr, cols);
    Forward<T> a{{}, sum != nullptr, data<T>(sum ? total : x), scales, shifts, data<T>(y), data<Wide<T>>(stats), cols,
                 eps, centre};
    if (sum) a.addition = {data<T>(x), data<T>(sum->residual), added, data<T>(total), cols, sum->mask};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) { forward(a, begin, end); });
  });
  return {y, total, stats};
}

struct Gradients {
  Tensor dx, dropped, dbias_of_x, dweight, dbias;
};

// mask: null without an addition; with_bias: the addition's
Gradients run_backward(const char* op, const Tensor& dy, const Optional& dsum, const Tensor& x,
                       const Tensor& weight, const Tensor& stats, bool centre, const Mask* mask, bool with_bias) {
  check(op, x, weight, std::nullopt);
  check_contiguous(op, "dy", dy);
  STD_TORCH_CHECK(!dsum || dsum->is_contiguous(), op, ": dsum must be contiguous");
  const int64_t rows = num_rows(x), cols = weight.size(0);
  const ScalarType type = x.scalar_type();
  Tensor dx = make_like(x), none = make({0}, type);
  Gradients out{dx, mask && mask->threshold ? make_like(x) : none, none, none, none};
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const Widened<T> scales(data<T>(weight), cols);
    const Backward<T> a{data<T>(dy), data<T>(dsum), data<T>(x), scales, data<W>(stats), data<T>(dx), data<T>(out.dropped),
                        cols, centre, with_bias, mask ? *mask : Mask{}};
    const auto sums = ColumnSums<W>(rows, cols, a.num_sums()).run([&](int64_t begin, int64_t end, W* to) {
      backward(a, begin, end, to);
    });
    out.dweight = narrowed<T>(sums.get(), cols, type);
    out.dbias = narrowed<T>(sums.get() + (centre ? cols : 0), cols, type);
    if (!centre) std::fill_n(data<T>(out.dbias), cols, T{});
    if (with_bias) out.dbias_of_x = narrowed<T>(a.sums_of_bias(sums.get()), cols, type);
  });
  return out;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const Optional& bias, double eps,
                                bool centre) {
  const auto out = run_forward("norm", x, nullptr, weight, bias, eps, centre);
  return {out.y, out.stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                 const Tensor& stats, bool centre) {
  const auto out = run_backward("norm_backward", dy, std::nullopt, x, weight, stats, centre, nullptr, false);
  return {out.dx, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Optional& bias_of_x,
                                            const Tensor& residual, const Tensor& weight,
                                            const Optional& bias, double eps, bool centre, int64_t key0,
                                            int64_t key1, const Optional& counter, int64_t threshold, double scale,
                                            int64_t stride, int64_t start) {
  const Mask mask = make_mask("add_norm", x, key0, key1, counter, threshold, scale, stride, start);
  check_addition("add_norm", x, bias_of_x, residual);
  const Sum sum{residual, bias_of_x, mask};
  const auto out = run_forward("add_norm", x, &sum, weight, bias, eps, centre);
  return {out.y, out.sum, out.stats};
}

// the gradients of: residual, x (empty without dropout: the residual's), bias of x (empty without one), weight, bias
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_norm_backward(
    const Tensor& dy, const Optional& dsum, const Tensor& sum, const Tensor& weight, const Tensor& stats,
    bool with_bias, bool centre, int64_t key0, int64_t key1, const Optional& counter, int64_t threshold,
    double scale, int64_t stride, int64_t start) {
  const Mask mask = make_mask("add_norm_backward", sum, key0, key1, counter, threshold, scale, stride, start);
  const auto out = run_backward("add_norm_backward", dy, dsum, sum, weight, stats, centre, &mask, with_bias);
  return {out.dx, out.dropped, out.dbias_of_x, out.dweight, out.dbias};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centre) -> (Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor stats, bool centre) -> (Tensor, Tensor, Tensor)");
  library.def(
      "add_norm(Tensor x, Tensor? bias_of_x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool "
      "centre, " HYBRIDPAR_MASK ") -> (Tensor, Tensor, Tensor)");
  library.def(
      "add_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor weight, Tensor stats, bool with_bias, bool "
      "centre, " HYBRIDPAR_MASK ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("norm_backward", TORCH_BOX(&norm_backward));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("add_norm_backward", TORCH_BOX(&add_norm_backward));
}
