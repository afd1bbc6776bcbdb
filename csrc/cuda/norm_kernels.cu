// LayerNorm and RMSNorm, alone or after residual + dropout(x + bias); forward and backward.
//
// A row is in the registers of its threads between the sums and what is made of them, so every element is read and
// written once; what does not fit there is read again from the cache: beyond 16384 columns of 16 bits forward, 8192
// after an addition or backward, 4096 backward with dropout. A thread reads all it keeps of a row before it uses any.
// Sums are those of deviations from the mean: no cancellation.

#include "philox.cuh"
#include "row.cuh"

namespace hybridpar {
namespace {

// What is added to the residual before (backward: has a gradient): nothing, x + bias, or what dropout leaves of that
enum class Added { Nothing, Whole, Dropped };
using Nothing = std::integral_constant<Added, Added::Nothing>;
using Whole = std::integral_constant<Added, Added::Whole>;
using Dropped = std::integral_constant<Added, Added::Dropped>;

template <Added kAdded>
constexpr int kForwardKept = kAdded == Added::Nothing ? 4 : 2;

// x and, where something is added before, the residual.
template <class T, int V>
struct Inputs {
  Pack<T, V> x, residual;
};

// residual + dropout(x + bias) at `column` of `row`; stores it.
template <bool kMasked, class T, int V>
HYBRIDPAR_DEVICE Pack<T, V> added(const NormForward& a, int64_t row, int column, const Inputs<T, V>& in) {
  using W = Wide<T>;
  const W scale = kMasked ? static_cast<W>(a.mask.scale) : W(1);
  W bias[V] = {};
  if (a.bias_of_x) load_wide(bias, static_cast<const T*>(a.bias_of_x) + column);
  bool stays[V];
  if (kMasked) kept(a.mask, row, column, stays);
  W sum[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const W value = (in.x[k] + bias[k]) * scale;
    sum[k] = in.residual[k] + (!kMasked || stays[k] ? value : W(0));
  }
  const Pack<T, V> rounded = narrow<T, V>(sum);
  store(static_cast<T*>(a.sum) + row * a.cols + column, rounded);
  return rounded;
}

// V == 1: without a number of blocks the compiler goes for more of them than registers do for.
template <class T, int V, Added kAdded>
__global__ void __launch_bounds__(kMostThreads, V == 1) norm_forward_kernel(const NormForward a) {
  using W = Wide<T>;
  constexpr bool kAdds = kAdded != Added::Nothing, kMasked = kAdded == Added::Dropped;
  constexpr int kKept = kForwardKept<kAdded>;
  __shared__ typename OverRow<W, 1>::Slots slots;
  OverRow<W, 1> over(slots);
  const W inverse = W(1) / a.cols;
  const int64_t row = row_of();
  const int cols = row < a.rows ? a.cols : 0;  // every thread comes to every sum
  const T* x = static_cast<const T*>(kAdds ? a.sum : a.x) + row * a.cols;
  const auto read = [&](int c) {
    const int64_t at = row * a.cols + c;
    return Inputs<T, V>{load<V>(static_cast<const T*>(a.x) + at),
                        kAdds ? load<V>(static_cast<const T*>(a.residual) + at) : Pack<T, V>{}};
  };
  Inputs<T, V> in[kKept];
  Pack<T, V> mine[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k)
    if (const int c = first<V>() + k * stride<V>(); c < cols) in[k] = read(c);
#pragma unroll
  for (int k = 0; k < kKept; ++k)
    if (const int c = first<V>() + k * stride<V>(); c < cols)
      mine[k] = kAdds ? added<kMasked>(a, row, c, in[k]) : in[k].x;
  if (kAdds)
    for (int c = first<V>() + kKept * stride<V>(); c < cols; c += stride<V>()) added<kMasked>(a, row, c, read(c));
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols) use(mine[k], c);
    for (int c = first<V>() + kKept * stride<V>(); c < cols; c += stride<V>()) use(load<V>(x + c), c);
  };

  W mean = 0;
  if (a.centre) {
    each([&](const Pack<T, V>& pack, int) {
#pragma unroll
      for (int k = 0; k < V; ++k) mean += pack[k];
    });
    mean = over.sum(mean) * inverse;
  }
  W squares = 0;
  each([&](const Pack<T, V>& pack, int) {
#pragma unroll
    for (int k = 0; k < V; ++k) squares += (pack[k] - mean) * (pack[k] - mean);
  });
  const W scale = W(1) / sqrt(over.sum(squares) * inverse + static_cast<W>(a.eps));
  if (threadIdx.x == 0 && row < a.rows) {
    static_cast<W*>(a.stats)[2 * row] = mean;
    static_cast<W*>(a.stats)[2 * row + 1] = scale;
  }
  T* y = static_cast<T*>(a.y) + row * a.cols;
  each([&](const Pack<T, V>& pack, int c) {
    const Pack<T, V> weight = load<V>(static_cast<const T*>(a.weight) + c);
    W bias[V] = {}, out[V];
    if (a.bias) load_wide(bias, static_cast<const T*>(a.bias) + c);
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = (pack[k] - mean) * scale * weight[k] + bias[k];
    store(y + c, out);
  });
}

// Sums down the rows, of a pack of columns.
template <class W, int V, Added kAdded>
struct Sums {
  W weight[V] = {}, bias[V] = {}, third[V] = {};

  // place: of the first column in [3, cols]
  HYBRIDPAR_DEVICE_MEMBER void save(W* place, const NormBackward& a) const {
    store<W, V>(place, weight);
    if (a.centre) store<W, V>(place + a.cols, bias);
    if (kAdded != Added::Nothing) store<W, V>(place + 2 * a.cols, third);
  }
  HYBRIDPAR_DEVICE_MEMBER void restore(const W* place, const NormBackward& a) {
    load_wide(weight, place);
    if (a.centre) load_wide(bias, place + a.cols);
    if (kAdded != Added::Nothing) load_wide(third, place + 2 * a.cols);
  }
};

template <class W>
struct OfRow {
  W mean, scale, along, level;  // the last two: means over the row of h * z and of h, see below
};

template <class T, int V, Added kAdded>
struct BackwardPack {
  using W = Wide<T>;
  Pack<T, V> dy, x, dsum, weight;

  HYBRIDPAR_DEVICE_MEMBER void read(const NormBackward& a, int64_t row, int column) {
    const int64_t at = row * a.cols + column;
    dy = load<V>(static_cast<const T*>(a.dy) + at);
    x = load<V>(static_cast<const T*>(a.x) + at);
    if (a.dsum) dsum = load<V>(static_cast<const T*>(a.dsum) + at);
    weight = load<V>(static_cast<const T*>(a.weight) + column);
  }

  // Adds to h * z, h and to the sums of columns.
  HYBRIDPAR_DEVICE_MEMBER void add_to(const OfRow<W>& r, W (&row_sums)[2], Sums<W, V, kAdded>& sums) const {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const W g = dy[k], z = (x[k] - r.mean) * r.scale, h = g * weight[k];
      row_sums[0] += h * z;
      row_sums[1] += h;
      sums.weight[k] += g * z;
      sums.bias[k] += g;
    }
  }

  // Stores the gradient of the norm's input, and what dropout leaves of that, which is added to the third sums.
  HYBRIDPAR_DEVICE_MEMBER void finish(const NormBackward& a, int64_t row, int column, const OfRow<W>& r,
                                      Sums<W, V, kAdded>& sums) const {
    const int64_t at = row * a.cols + column;
    W dx[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const W z = (x[k] - r.mean) * r.scale;
      dx[k] = (dy[k] * weight[k] - r.level - z * r.along) * r.scale + (a.dsum ? dsum[k] : W(0));
    }
    const Pack<T, V> rounded = narrow<T, V>(dx);
    store(static_cast<T*>(a.dx) + at, rounded);
    if constexpr (kAdded != Added::Nothing) {
      bool stays[V];
      const bool drops = kAdded == Added::Dropped && a.dropped;
      if (drops) kept(a.mask, row, column, stays);
      const W factor = drops ? static_cast<W>(a.mask.scale) : W(1);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        dx[k] = !drops || stays[k] ? rounded[k] * factor : W(0);
        sums.third[k] += dx[k];
      }
      if (drops) store(static_cast<T*>(a.dropped) + at, dx);
    }
  }
};

// Threads of a row at most, and packs of it that each keeps.
template <Added kAdded, bool kBeyond>
constexpr int kBackwardThreads = kAdded == Added::Dropped || kBeyond ? 512 : 1024;
template <class T, int V>
constexpr int kBackwardKept = V > 1 ? 1 : 16 / sizeof(Wide<T>);

// kBeyond: rows may be wider than what threads keep. The sums of what is beyond are in `partial` meanwhile. A number of
// blocks for V == 1: see norm_forward_kernel.
template <class T, int V, Added kAdded, bool kBeyond>
__global__ void __launch_bounds__(kBackwardThreads<kAdded, kBeyond>, V == 1 && kAdded == Added::Dropped)
    norm_backward_kernel(const NormBackward a, const int64_t parts, const int64_t rows_each) {
  using W = Wide<T>;
  constexpr int kKept = kBackwardKept<T, V>;
  __shared__ typename OverRow<W, 2>::Slots slots;
  OverRow<W, 2> over(slots);
  const W* stats = static_cast<const W*>(a.stats);
  const W inverse = W(1) / a.cols;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int mine = part < parts ? a.cols : 0, beyond = first<V>() + kKept * stride<V>();
  W* partial = static_cast<W*>(a.partial) + part * 3 * a.cols;

  BackwardPack<T, V, kAdded> packs[kKept];
  Sums<W, V, kAdded> sums[kKept];
  for (int c = beyond; kBeyond && c < mine; c += stride<V>()) Sums<W, V, kAdded>().save(partial + c, a);

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
      if (first<V>() + k * stride<V>() < cols) packs[k].add_to(r, row_sums, sums[k]);
    // what is not kept
    const auto each = [&](const auto& use) {
      for (int c = beyond; kBeyond && c < cols; c += stride<V>()) {
        BackwardPack<T, V, kAdded> pack;
        pack.read(a, row, c);
        Sums<W, V, kAdded> own;
        own.restore(partial + c, a);
        use(pack, own, c);
        own.save(partial + c, a);
      }
    };
    each([&](const auto& pack, auto& own, int) { pack.add_to(r, row_sums, own); });
    over.sum(row_sums);
    r.along = row_sums[0] * inverse;
    r.level = a.centre ? row_sums[1] * inverse : W(0);
#pragma unroll
    for (int k = 0; k < kKept; ++k)
      if (const int c = first<V>() + k * stride<V>(); c < cols) packs[k].finish(a, row, c, r, sums[k]);
    each([&](const auto& pack, auto& own, int c) { pack.finish(a, row, c, r, own); });
  }
#pragma unroll
  for (int k = 0; k < kKept; ++k)
    if (const int c = first<V>() + k * stride<V>(); c < mine) sums[k].save(partial + c, a);
}

}  // namespace

void launch_norm(Type type, const NormForward& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  choose(type, a.cols, {a.x, a.bias_of_x, a.residual, a.weight, a.bias, a.sum, a.y}, [&](auto element, auto vector) {
    using T = decltype(element);
    const auto run = [&](auto added) {
      const dim3 block = RowShape(a.cols, vector, kForwardKept<added()>, 32, 128).block;
      launch("norm", norm_forward_kernel<T, vector(), added()>, row_grid(a.rows, block), block, stream, a);
    };
    !a.residual ? run(Nothing()) : a.masked ? run(Dropped()) : run(Whole());
  });
}

void launch_norm_backward(Type type, const NormBackward& a, void* stream) {
  if (a.rows == 0 || a.cols == 0) return;
  const Parts parts = parts_of_rows(a.rows, a.cols);
  choose(type, a.cols, {a.dy, a.dsum, a.x, a.weight, a.dx, a.dropped}, [&](auto element, auto vector) {
    using T = decltype(element);
    const auto run = [&](auto added, auto beyond) {
      constexpr int kMost = kBackwardThreads<added(), beyond()>;
      if constexpr (!beyond())
        if (a.cols > kMost * vector() * kBackwardKept<T, vector()>) return false;
      const dim3 block = RowShape(a.cols, vector, kBackwardKept<T, vector()>, 32, 256, kMost).block;
      const dim3 grid(static_cast<unsigned>((parts.count + block.y - 1) / block.y));
      launch("norm_backward", norm_backward_kernel<T, vector(), added(), beyond()>, grid, block, stream, a, parts.count,
             parts.rows_each);
      return true;
    };
    constexpr std::false_type kept;
    constexpr std::true_type beyond;
    if (a.dropped)
      run(Dropped(), kept) || run(Dropped(), beyond);
    else if (a.with_bias)
      run(Whole(), kept) || run(Dropped(), beyond);
    else
      run(Nothing(), kept) || run(Nothing(), beyond);
  });
}

}  // namespace hybridpar
