// softmax(scale * x) over the last dimension with causal and padding masks, forward and backward. Rows stay in
// registers (16384 keys of 16 bits; what is beyond is read again); what a causal mask hides is not read.

#include "math.cuh"
#include "row.cuh"

namespace hybridpar {
namespace {

constexpr int kKept = 4;
template <class T>
constexpr int kBlocks = sizeof(T) == 2 ? 2 : 1;  // of the most threads, that registers are to do for

// Keys that a row sees at most.
HYBRIDPAR_DEVICE int seen(const Softmax& a, int64_t row) {
  if (!a.causal) return a.keys;
  const int64_t last = row - divide(row, a.queries) * a.queries + a.keys - a.queries + 1;
  return last < 0 ? 0 : last < a.keys ? static_cast<int>(last) : a.keys;
}

template <class T, int V, bool kPadded>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T>) softmax_kernel(const Softmax a) {
  using W = Wide<T>;
  constexpr W kHidden = -INFINITY;
  __shared__ typename OverRow<W, 1>::Slots slots;
  OverRow<W, 1> over(slots);
  const W scale = static_cast<W>(a.scale);
  const int64_t row = row_of();
  const int keys = row < a.rows ? a.keys : 0, n = row < a.rows ? seen(a, row) : 0;
  const T* x = static_cast<const T*>(a.x) + row * a.keys;
  T* y = static_cast<T*>(a.out) + row * a.keys;
  const uint8_t* real = kPadded ? a.real + divide(row, a.rows_per_sample) * a.keys : nullptr;
  const auto read = [&](int c) { return c < n ? load<V>(x + c) : Pack<T, V>{}; };
  const auto scores = [&](W(&values)[V], const Pack<T, V>& pack, int c) {
    Pack<uint8_t, V> mask{};
    if (kPadded && c < n) mask = load<V>(real + c);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = c + k < n && (!kPadded || mask.at[k]) ? pack[k] * scale : kHidden;
  };
  Pack<T, V> packs[kKept];
  W mine[kKept][V];
#pragma unroll
  for (int k = 0; k < kKept; ++k) packs[k] = read(first<V>() + k * stride<V>());
#pragma unroll
  for (int k = 0; k < kKept; ++k) scores(mine[k], packs[k], first<V>() + k * stride<V>());
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < keys) use(mine[k], c, true);
    for (int c = first<V>() + kKept * stride<V>(); c < keys; c += stride<V>()) {
      W values[V];
      scores(values, read(c), c);
      use(values, c, false);
    }
  };

  W top = -std::numeric_limits<W>::max(), total = 0;
  each([&](const W(&values)[V], int, bool) {
#pragma unroll
    for (int k = 0; k < V; ++k) top = larger(top, values[k]);
  });
  top = over.largest(top);
  each([&](W(&values)[V], int, bool) {
#pragma unroll
    for (int k = 0; k < V; ++k) total += values[k] = exponential(values[k] - top);
  });
  total = over.sum(total);
  const W factor = total == W(0) ? W(0) : W(1) / total;  // sees nothing: zeros
  each([&](const W(&values)[V], int c, bool is_exponential) {
    W out[V];
#pragma unroll
    for (int k = 0; k < V; ++k)
      out[k] = c + k < n ? (is_exponential ? values[k] : exponential(values[k] - top)) * factor : W(0);
    store(y + c, out);
  });
}

template <class T, int V>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T>) softmax_backward_kernel(const Softmax a) {
  using W = Wide<T>;
  __shared__ typename OverRow<W, 1>::Slots slots;
  OverRow<W, 1> over(slots);
  const W scale = static_cast<W>(a.scale);
  const int64_t row = row_of();
  const int keys = row < a.rows ? a.keys : 0, n = row < a.rows ? seen(a, row) : 0;
  const T *p = static_cast<const T*>(a.x) + row * a.keys, *dy = static_cast<const T*>(a.dy) + row * a.keys;
  T* dx = static_cast<T*>(a.out) + row * a.keys;
  struct Both {
    Pack<T, V> p, dy;
  };
  const auto read = [&](int c) { return c < n ? Both{load<V>(p + c), load<V>(dy + c)} : Both{}; };
  Both mine[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k)
    if (const int c = first<V>() + k * stride<V>(); c < keys) mine[k] = read(c);
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < keys) use(mine[k], c);
    for (int c = first<V>() + kKept * stride<V>(); c < keys; c += stride<V>()) use(read(c), c);
  };

  W mean = 0;
  each([&](const Both& both, int c) {
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (c + k < n) mean += both.p[k] * both.dy[k];
  });
  mean = over.sum(mean);
  each([&](const Both& both, int c) {
    W out[V];
#pragma unroll
    for (int k = 0; k < V; ++k)
      out[k] = c + k < n ? both.p[k] * (both.dy[k] - mean) * scale : W(0);
    store(dx + c, out);
  });
}

}  // namespace

void launch_softmax(Type type, const Softmax& a, void* stream) {
  if (a.rows == 0 || a.keys == 0) return;
  choose(type, a.keys, {a.x, a.out, a.real}, [&](auto element, auto vector) {
    const dim3 block = RowShape(a.keys, vector, kKept, 32, 128).block;
    using T = decltype(element);
    const auto kernel = a.real ? softmax_kernel<T, vector(), true> : softmax_kernel<T, vector(), false>;
    launch("masked_softmax", kernel, row_grid(a.rows, block), block, stream, a);
  });
}

void launch_softmax_backward(Type type, const Softmax& a, void* stream) {
  if (a.rows == 0 || a.keys == 0) return;
  choose(type, a.keys, {a.x, a.dy, a.out}, [&](auto element, auto vector) {
    const dim3 block = RowShape(a.keys, vector, kKept, 32, 128).block;
    launch("masked_softmax_backward", softmax_backward_kernel<decltype(element), vector()>, row_grid(a.rows, block),
           block, stream, a);
  });
}

}  // namespace hybridpar
