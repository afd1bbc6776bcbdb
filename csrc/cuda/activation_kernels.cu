// gelu(x + bias) and silu(gate + bias) * (up + bias), forward and backward: a read and a write of every element each
// way.

#include "math.cuh"
#include "tile.cuh"

namespace hybridpar {
namespace {

template <class T, int V, bool kBackward>
__global__ void __launch_bounds__(kTileThreads) gelu_kernel(const Activation a, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kRows = 4;
  const Place<V> at(a.rows, a.cols, rows_each);
  const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
  T* out = static_cast<T*>(a.out);
  W bias[V] = {}, sums[V] = {};
  if (a.bias && at.begin < at.end) load_wide(bias, static_cast<const T*>(a.bias) + at.column);
  for (int64_t first = at.begin; first < at.end; first += kRows * at.step) {
    Pack<T, V> xs[kRows], dys[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      xs[u] = load<V>(x + row * a.cols + at.column);
      if (kBackward) dys[u] = load<V>(dy + row * a.cols + at.column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      W y[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const W value = xs[u][k] + bias[k];
        if (kBackward) {
          y[k] = dys[u][k] * Gelu<W>::derivative(value);
          sums[k] += y[k];
        } else {
          y[k] = Gelu<W>::value(value);
        }
      }
      store(out + row * a.cols + at.column, y);
    }
  }
  if (kBackward && a.partial)
    store_sums<V>(sums, static_cast<W*>(a.partial), a.cols, at.column, at.column < a.cols);
}

template <class T, int V>
__global__ void __launch_bounds__(kTileThreads) swiglu_kernel(const Activation a, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kRows = 4;
  const Place<V> at(a.rows, a.cols, rows_each);
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.out);
  W gate_bias[V] = {}, up_bias[V] = {};
  if (a.bias && at.begin < at.end) {
    load_wide(gate_bias, static_cast<const T*>(a.bias) + at.column);
    load_wide(up_bias, static_cast<const T*>(a.bias) + a.cols + at.column);
  }
  for (int64_t first = at.begin; first < at.end; first += kRows * at.step) {
    Pack<T, V> gates[kRows], ups[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      gates[u] = load<V>(x + row * 2 * a.cols + at.column);
      ups[u] = load<V>(x + row * 2 * a.cols + a.cols + at.column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      W values[V];
#pragma unroll
      for (int k = 0; k < V; ++k)
        values[k] = Silu<W>(gates[u][k] + gate_bias[k]).value * (ups[u][k] + up_bias[k]);
      store(y + row * a.cols + at.column, values);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kTileThreads) swiglu_backward_kernel(const Activation a, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kRows = 2;
  const Place<V> at(a.rows, a.cols, rows_each);
  const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.out);
  W gate_bias[V] = {}, up_bias[V] = {}, gate_sums[V] = {}, up_sums[V] = {};
  if (a.bias && at.begin < at.end) {
    load_wide(gate_bias, static_cast<const T*>(a.bias) + at.column);
    load_wide(up_bias, static_cast<const T*>(a.bias) + a.cols + at.column);
  }
  for (int64_t first = at.begin; first < at.end; first += kRows * at.step) {
    Pack<T, V> gates[kRows], ups[kRows], dys[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      gates[u] = load<V>(x + row * 2 * a.cols + at.column);
      ups[u] = load<V>(x + row * 2 * a.cols + a.cols + at.column);
      dys[u] = load<V>(dy + row * a.cols + at.column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * at.step;
      if (row >= at.end) continue;
      W along[V], across[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const W d = dys[u][k];
        const Silu<W> silu(gates[u][k] + gate_bias[k]);
        along[k] = d * (ups[u][k] + up_bias[k]) * silu.derivative;
        across[k] = d * silu.value;
        gate_sums[k] += along[k];
        up_sums[k] += across[k];
      }
      store(dx + row * 2 * a.cols + at.column, along);
      store(dx + row * 2 * a.cols + a.cols + at.column, across);
    }
  }
  if (a.partial) {
    const bool inside = at.column < a.cols;
    store_sums<V>(gate_sums, static_cast<W*>(a.partial), 2 * a.cols, at.column, inside);
    store_sums<V>(up_sums, static_cast<W*>(a.partial), 2 * a.cols, a.cols + at.column, inside);
  }
}

// kernel(element, vector): the kernel for these.
template <class F>
void run(const char* name, Type type, const Activation& a, void* stream, const F& kernel) {
  if (a.rows == 0 || a.cols == 0) return;
  choose(type, a.cols, {a.x, a.bias, a.dy, a.out}, [&](auto element, auto vector) {
    const Tile tile(a.rows, a.cols, vector);
    launch(name, kernel(element, vector), tile.grid, tile.block, stream, a, tile.rows_each);
  });
}

}  // namespace

void launch_gelu(Type type, const Activation& a, void* stream) {
  run("bias_gelu", type, a, stream,
      [](auto element, auto vector) { return gelu_kernel<decltype(element), vector(), false>; });
}

void launch_gelu_backward(Type type, const Activation& a, void* stream) {
  run("bias_gelu_backward", type, a, stream,
      [](auto element, auto vector) { return gelu_kernel<decltype(element), vector(), true>; });
}

void launch_swiglu(Type type, const Activation& a, void* stream) {
  run("bias_swiglu", type, a, stream,
      [](auto element, auto vector) { return swiglu_kernel<decltype(element), vector()>; });
}

void launch_swiglu_backward(Type type, const Activation& a, void* stream) {
  run("bias_swiglu_backward", type, a, stream,
      [](auto element, auto vector) { return swiglu_backward_kernel<decltype(element), vector()>; });
}

}  // namespace hybridpar
