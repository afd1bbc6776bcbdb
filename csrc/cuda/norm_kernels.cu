// LayerNorm and RMSNorm, alone or after residual + dropout(x + bias); forward and backward.
//
// A row is in the registers of its threads between the sums and what is made of them, so every element is read and
// written once; what does not fit there (beyond 16384 columns of 16 bits forward, 8192 backward) is read again from the
// cache. Sums are those of deviations from the mean: no cancellation.

#include "philox.cuh"
#include "row.cuh"

namespace hybridpar {
namespace {

constexpr int kForwardKept = 4;

// residual + dropout(x + bias) at `column` of `row`; stores it.
template <class T, int V>
HYBRIDPAR_DEVICE Pack<T, V> added(const NormForward& a, int64_t row, int column) {
  using W = Wide<T>;
  const int64_t at = row * a.cols + column;
  const Pack<T, V> x = load<V>(static_cast<const T*>(a.x) + at);
  const Pack<T, V> residual = load<V>(static_cast<const T*>(a.residual) + at);
  const W scale = a.masked ? static_cast<W>(a.mask.scale) : W(1);
  W bias[V] = {};
  if (a.bias_of_x) load_wide(bias, static_cast<const T*>(a.bias_of_x) + column);
  bool stays[V];
  if (a.masked) kept(a.mask, row, column, stays);
  W sum[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const W value = (x[k] + bias[k]) * scale;
    sum[k] = residual[k] + (!a.masked || stays[k] ? value : W(0));
  }
  const Pack<T, V> rounded = narrow<T, V>(sum);
  store(static_cast<T*>(a.sum) + at, rounded);
  return rounded;
}

template <class T, int V>
__global__ void __launch_bounds__(kMostThreads) norm_forward_kernel(const NormForward a) {
  using W = Wide<T>;
  __shared__ typename OverRow<W, 1>::Slots slots;
  OverRow<W, 1> over(slots);
  for (int64_t group = static_cast<int64_t>(blockIdx.x) * blockDim.y; group < a.rows;
       group += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = group + threadIdx.y;
    const int cols = row < a.rows ? a.cols : 0;  // every thread comes to every sum
    const T* x = static_cast<const T*>(a.residual ? a.sum : a.x) + row * a.cols;
    Pack<T, V> mine[kForwardKept];
#pragma unroll
    for (int k = 0; k < kForwardKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols)
        mine[k] = a.residual ? added<T, V>(a, row, c) : load<V>(x + c);
    if (a.residual)
      for (int c = first<V>() + kForwardKept * stride<V>(); c < cols; c += stride<V>()) added<T, V>(a, row, c);
    const auto each = [&](const auto& use) {
#pragma unroll
      for (int k = 0; k < kForwardKept; ++k)
        if (const int c = first<V>() + k * stride<V>(); c < cols) use(mine[k], c);
      for (int c = first<V>() + kForwardKept * stride<V>(); c < cols; c += stride<V>()) use(load<V>(x + c), c);
    };

    W mean = 0;
    if (a.centre) {
      each([&](const Pack<T, V>& pack, int) {
#pragma unroll
        for (int k = 0; k < V; ++k) mean += pack[k];
      });
      mean = over.sum(mean) / a.cols;
    }
    W squares = 0;
    each([&](const Pack<T, V>& pack, int) {
#pragma unroll
      for (int k = 0; k < V; ++k) squares += (pack[k] - mean) * (pack[k] - mean);
    });
    const W scale = W(1) / sqrt(over.sum(squares) / a.cols + static_cast<W>(a.eps));
    if (threadIdx.x == 0 && row < a.rows) {
      static_cast<W*>(a.stats)[2 * row] = mean;
      static_cast<W*>(a.stats)[2 * row + 1] = scale;
    }
    T* y = static_cast<T*>(a.y) + row * a.cols;
    each([&](const Pack<T, V>& pack, int c) {
      W weight[V], bias[V] = {}, out[V];
      load_wide(weight, static_cast<const T*>(a.weight) + c);
      if (a.bias) load_wide(bias, static_cast<const T*>(a.bias) + c);
#pragma unroll
      for (int k = 0; k < V; ++k) out[k] = (pack[k] - mean) * scale * weight[k] + bias[k];
      store(y + c, out);
    });
  }
}

// Sums down the rows, of a pack of columns.
template <class W, int V>
struct Sums {
  W weight[V] = {}, bias[V] = {};

  // place: of the first column in [3, cols]
  HYBRIDPAR_DEVICE_MEMBER void save(W* place, const NormBackward& a) const {
    store<W, V>(place, weight);
    if (a.centre) store<W, V>(place + a.cols, bias);
  }
  HYBRIDPAR_DEVICE_MEMBER void restore(const W* place, const NormBackward& a) {
    load_wide(weight, place);
    if (a.centre) load_wide(bias, place + a.cols);
  }
};

template <class W>
struct OfRow {
  W mean, scale, along, level;  // the last two: means over the row of h * z and of h, see below
};

template <class T, int V>
struct BackwardPack {
  using W = Wide<T>;
  Pack<T, V> dy, x;  // the weight is read twice, from the cache: registers are few

  HYBRIDPAR_DEVICE_MEMBER void read(const NormBackward& a, int64_t row, int column) {
    dy = load<V>(static_cast<const T*>(a.dy) + row * a.cols + column);
    x = load<V>(static_cast<const T*>(a.x) + row * a.cols + column);
  }

  // Adds to h * z, h and to the sums of columns.
  HYBRIDPAR_DEVICE_MEMBER void add_to(const NormBackward& a, int column, const OfRow<W>& r, W (&row_sums)[2],
                                      Sums<W, V>& sums) const {
    const Pack<T, V> weight = load<V>(static_cast<const T*>(a.weight) + column);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const W g = dy[k], z = (x[k] - r.mean) * r.scale, h = g * weight[k];
      row_sums[0] += h * z;
      row_sums[1] += h;
      sums.weight[k] += g * z;
      sums.bias[k] += g;
    }
  }

  // Stores the gradient of the norm's input; kAdds: also what dropout leaves of that, which is added to third[k *
  // step].
  template <bool kAdds>
  HYBRIDPAR_DEVICE_MEMBER void finish(const NormBackward& a, int64_t row, int column, const OfRow<W>& r, W* third,
                                      int step) const {
    const int64_t at = row * a.cols + column;
    const Pack<T, V> weight = load<V>(static_cast<const T*>(a.weight) + column);
    W dsum[V] = {}, dx[V];
    if (a.dsum) load_wide(dsum, static_cast<const T*>(a.dsum) + at);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const W z = (x[k] - r.mean) * r.scale;
      dx[k] = (dy[k] * weight[k] - r.level - z * r.along) * r.scale + dsum[k];
    }
    const Pack<T, V> rounded = narrow<T, V>(dx);
    store(static_cast<T*>(a.dx) + at, rounded);
    if constexpr (kAdds) {
      const W factor = a.dropped ? static_cast<W>(a.mask.scale) : W(1);
      bool stays[V];
      if (a.dropped) kept(a.mask, row, column, stays);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        dx[k] = !a.dropped || stays[k] ? rounded[k] * factor : W(0);
        third[k * step] += dx[k];
      }
      if (a.dropped) store(static_cast<T*>(a.dropped) + at, dx);
    }
  }
};

template <int V>
constexpr int kBackwardKept = V == 8 ? 2 : 4;

template <class T, int V, bool kAdds>
__global__ void __launch_bounds__(kMostThreads) norm_backward_kernel(const NormBackward a, const int64_t parts,
                                                                     const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kKept = kBackwardKept<V>;
  __shared__ typename OverRow<W, 2>::Slots slots;
  __shared__ W thirds[kAdds ? kKept * V : 1][kMostThreads];  // the other sums take all registers
  W* third = &thirds[0][threadIdx.y * blockDim.x + threadIdx.x];
  OverRow<W, 2> over(slots);
  const W* stats = static_cast<const W*>(a.stats);
  const int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int mine = part < parts ? a.cols : 0, beyond = first<V>() + kKept * stride<V>();
  W* partial = static_cast<W*>(a.partial) + part * 3 * a.cols;

  BackwardPack<T, V> packs[kKept];
  Sums<W, V> sums[kKept];
#pragma unroll
  for (int i = 0; i < (kAdds ? kKept * V : 0); ++i) third[i * kMostThreads] = W(0);
  for (int c = beyond; c < mine; c += stride<V>()) {
    Sums<W, V>().save(partial + c, a);
    if constexpr (kAdds)
      for (int i = 0; i < V; ++i) partial[2 * a.cols + c + i] = W(0);
  }

  for (int64_t i = 0; i < rows_each; ++i) {
    const int64_t row = part * rows_each + i;
    const int cols = row < a.rows ? mine : 0;  // every thread comes to every sum
    OfRow<W> r{cols ? stats[2 * row] : W(0), cols ? stats[2 * row + 1] : W(0), W(0), W(0)};
    W row_sums[2] = {};
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols) packs[k].read(a, row, c);
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols) packs[k].add_to(a, c, r, row_sums, sums[k]);
    for (int c = beyond; c < cols; c += stride<V>()) {
      BackwardPack<T, V> pack;
      pack.read(a, row, c);
      Sums<W, V> own;
      own.restore(partial + c, a);
      pack.add_to(a, c, r, row_sums, own);
      own.save(partial + c, a);
    }
    over.sum(row_sums);
    r.along = row_sums[0] / a.cols;
    r.level = a.centre ? row_sums[1] / a.cols : W(0);
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols)
        packs[k].template finish<kAdds>(a, row, c, r, third + k * V * kMostThreads, kMostThreads);
    for (int c = beyond; c < cols; c += stride<V>()) {
      BackwardPack<T, V> pack;
      pack.read(a, row, c);
      pack.template finish<kAdds>(a, row, c, r, partial + 2 * a.cols + c, 1);
    }
  }
#pragma unroll
  for (int k = 0; k < kKept; ++k)
    if (const int c = first<V>() + k * stride<V>(); c < mine) {
      sums[k].save(partial + c, a);
      if constexpr (kAdds)
        for (int i = 0; i < V; ++i) partial[2 * a.cols + c + i] = third[(k * V + i) * kMostThreads];
    }
}

}  // namespace

void launch_norm(Type type, const NormForward& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  choose(type, a.cols, {a.x, a.bias_of_x, a.residual, a.weight, a.bias, a.sum, a.y}, [&](auto element, auto vector) {
    const dim3 block = RowShape(a.cols, vector, kForwardKept, 32, 128).block;
    launch("norm", norm_forward_kernel<decltype(element), vector()>, row_grid(a.rows, block), block, stream, a);
  });
}

void launch_norm_backward(Type type, const NormBackward& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const Parts parts = parts_of_rows(a.rows, a.cols);
  choose(type, a.cols, {a.dy, a.dsum, a.x, a.weight, a.dx, a.dropped}, [&](auto element, auto vector) {
    const dim3 block = RowShape(a.cols, vector, kBackwardKept<vector()>, 256, 256).block;
    const dim3 grid(static_cast<unsigned>((parts.count + block.y - 1) / block.y));
    using T = decltype(element);
    const auto kernel = a.dropped || a.with_bias ? norm_backward_kernel<T, vector(), true>
                                                 : norm_backward_kernel<T, vector(), false>;
    launch("norm_backward", kernel, grid, block, stream, a, parts.count, parts.rows_each);
  });
}

}  // namespace hybridpar
