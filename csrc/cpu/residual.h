// residual + dropout(x + bias), row by row, and its backward: alone (residual.cpp) and before a norm (norm.cpp).
#pragma once

#include "philox.h"

namespace hybridpar {

template <class T>
struct Addition {
  const T *x, *residual;
  const Wide<T>* bias;  // may be null
  T* sum;
  int64_t cols;
  Mask mask;
};

// What element i of the sums is where nothing is dropped: rounded once. i counts from the begin of a row, of which there may be more.
template <class T>
HYBRIDPAR_INLINE T added(const T* x, const T* residual, int64_t i, Wide<T> bias) {
  return narrow<T>(wide(residual[i]) + (wide(x[i]) + bias));
}
template <class T>
HYBRIDPAR_INLINE T added(const T* x, const T* residual, int64_t i) {
  return narrow<T>(wide(residual[i]) + wide(x[i]));
}

template <class T>
HYBRIDPAR_INLINE void add_row(const Addition<T>& a, int64_t row) {
  using W = Wide<T>;
  const T *x = a.x + row * a.cols, *residual = a.residual + row * a.cols;
  const W* bias = a.bias;
  T* sum = a.sum + row * a.cols;
  if (a.mask.threshold == 0) {
    if (bias)
      each(a.cols, [=](int64_t i, int) { sum[i] = added(x, residual, i, bias[i]); }, ahead(x), ahead(residual), ahead(sum));
    else
      each(a.cols, [=](int64_t i, int) { sum[i] = added(x, residual, i); }, ahead(x), ahead(residual), ahead(sum));
    return;
  }
  const W scale = static_cast<W>(a.mask.scale);
  const uint32_t threshold = a.mask.threshold;
  blocks(a.mask.stream_of(row), a.mask.index_of(row), a.cols, [=](const uint32_t* words, int64_t at, int64_t n) {
    if (bias)
      each(n, [=](int64_t i, int) {
        const W kept = (wide(x[at + i]) + bias[at + i]) * scale;
        sum[at + i] = narrow<T>(wide(residual[at + i]) + (words[i] >= threshold ? kept : W(0)));
      });
    else
      each(n, [=](int64_t i, int) {
        const W kept = wide(x[at + i]) * scale;
        sum[at + i] = narrow<T>(wide(residual[at + i]) + (words[i] >= threshold ? kept : W(0)));
      });
  });
}

// dropped: what dropout leaves of the gradient dx of a row; sums (may be null): the columns' sums of it. Only the sums where
// nothing is dropped.
template <class T>
HYBRIDPAR_INLINE void drop_row(const Mask& mask, int64_t row, int64_t cols, const T* dx, T* dropped, Wide<T>* sums) {
  using W = Wide<T>;
  if (mask.threshold == 0) {
    if (sums) each(cols, [=](int64_t i, int) { sums[i] += wide(dx[i]); }, ahead(dx));
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

inline void check_addition(const char* op, const Tensor& x, const Optional& bias, const Tensor& residual) {
  check_contiguous(op, "x", x);
  check_contiguous(op, "residual", residual);
  STD_TORCH_CHECK(residual.numel() == x.numel() && residual.scalar_type() == x.scalar_type(), op,
                  ": residual must be like x");
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->dim() == 1 && bias->size(0) == x.size(x.dim() - 1) &&
                            bias->scalar_type() == x.scalar_type()),
                  op, ": bias must be of the last size of x, and of its type");
}

template <class T>
Tensor narrowed(const Wide<T>* values, int64_t n, ScalarType type) {
  Tensor out = make({n}, type);
  std::transform(values, values + n, data<T>(out), [](Wide<T> value) { return narrow<T>(value); });
  return out;
}

}  // namespace hybridpar
