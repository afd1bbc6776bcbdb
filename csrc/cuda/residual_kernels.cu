// residual + dropout(x + bias), dropout alone, and the sums of columns. A read and a write of every element; about 25
// integer operations an element for dropout.

#include "philox.cuh"
#include "tile.cuh"

namespace hybridpar {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kTileThreads) add_kernel(const Addition a, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kRows = 2;
  const Place<V> at(a.rows, a.cols, rows_each);
  const T *x = static_cast<const T*>(a.x), *residual = static_cast<const T*>(a.residual);
  T* sum = static_cast<T*>(a.sum);
  const W scale = a.masked ? static_cast<W>(a.mask.scale) : W(1);
  W bias[V] = {};
  if (a.bias && at.begin < at.end) load_wide(bias, static_cast<const T*>(a.bias) + at.column);
  for (int64_t first = at.begin; first < at.end; first += kRows * at.step) {
    Pack<T, V> xs[kRows], residuals[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      xs[u] = load<V>(x + row * a.cols + at.column);
      residuals[u] = load<V>(residual + row * a.cols + at.column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      bool stays[V];
      if (a.masked) kept(a.mask, row, at.column, stays);
      W y[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const W value = (xs[u][k] + bias[k]) * scale;
        y[k] = residuals[u][k] + (!a.masked || stays[k] ? value : W(0));
      }
      store(sum + row * a.cols + at.column, y);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kTileThreads) drop_kernel(const Dropout a, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kRows = 2;
  const Place<V> at(a.rows, a.cols, rows_each);
  const T* x = static_cast<const T*>(a.x);
  T* dropped = static_cast<T*>(a.dropped);
  const W scale = dropped ? static_cast<W>(a.mask.scale) : W(1);
  W sums[V] = {};
  for (int64_t first = at.begin; first < at.end; first += kRows * at.step) {
    Pack<T, V> xs[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row < at.end) xs[u] = load<V>(x + row * a.cols + at.column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      bool stays[V];
      if (dropped) kept(a.mask, row, at.column, stays);
      W y[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        y[k] = !dropped || stays[k] ? xs[u][k] * scale : W(0);
        sums[k] += y[k];
      }
      if (dropped) store(dropped + row * a.cols + at.column, y);
    }
  }
  if (a.partial) store_sums<V>(sums, static_cast<W*>(a.partial), a.cols, at.column, at.column < a.cols);
}

constexpr int kSumColumns = 16, kSumThreads = 64;  // threads of a column

template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumThreads) sum_columns_kernel(const ColumnSums a) {
  using W = Wide<T>;
  __shared__ W slots[kSumThreads][kSumColumns];
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  // values: an index into the arguments would copy them to memory
  T *first = static_cast<T*>(a.out[0]), *second = static_cast<T*>(a.out[1]), *third = static_cast<T*>(a.out[2]);
  T* out = blockIdx.y == 0 ? +first : blockIdx.y == 1 ? +second : +third;
  if (!out) return;  // the whole block
  const W* partial = static_cast<const W*>(a.partial) + static_cast<int64_t>(blockIdx.y) * a.cols + column;
  const int64_t stride = static_cast<int64_t>(a.num) * a.cols;
  W sum = 0;
  if (column < a.cols) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < a.parts; part += kSumThreads) sum += partial[part * stride];
  }
  slots[threadIdx.y][threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) slots[threadIdx.y][threadIdx.x] += slots[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y == 0 && column < a.cols) {
    const W total[1] = {slots[0][threadIdx.x]};
    store(out + column, total);
  }
}

}  // namespace

void launch_add(Type type, const Addition& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  choose(type, a.cols, {a.x, a.bias, a.residual, a.sum}, [&](auto element, auto vector) {
    const Tile tile(a.rows, a.cols, vector);
    launch("bias_dropout_add", add_kernel<decltype(element), vector()>, tile.grid, tile.block, stream, a,
           tile.rows_each);
  });
}

void launch_drop(Type type, const Dropout& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  choose(type, a.cols, {a.x, a.dropped}, [&](auto element, auto vector) {
    const Tile tile(a.rows, a.cols, vector);
    launch("dropout", drop_kernel<decltype(element), vector()>, tile.grid, tile.block, stream, a, tile.rows_each);
  });
}

void launch_column_sums(Type type, const ColumnSums& a, void* stream) {
  if (a.cols == 0) return;
  const dim3 grid((a.cols + kSumColumns - 1) / kSumColumns, a.num), block(kSumColumns, kSumThreads);
  choose(type, 1, {}, [&](auto element, auto) {
    launch("column sums", sum_columns_kernel<decltype(element)>, grid, block, stream, a);
  });
}

}  // namespace hybridpar
