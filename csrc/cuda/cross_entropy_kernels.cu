// The local passes of the vocabulary-parallel cross-entropy: logits are read once forward (and once more, mostly from
// the cache, for their sum), and once backward, where their exponentials are made again. A row may begin anywhere: a
// vocabulary of 50257 is not a multiple of 8.

#include "device.cuh"

namespace hybridpar {
namespace {

HYBRIDPAR_DEVICE float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }
HYBRIDPAR_DEVICE double exponential(double x) { return exp(x); }

template <class T>
constexpr int kTogether = kVector<T> > 1 ? 4 : 2;  // packs that a thread reads before it uses the first

// Some packs of a row, at columns at, at + stride, ...: those before `end`.
template <class T, int N, int U>
struct Batch {
  Pack<T, N> packs[U];
  int at, stride, end;

  HYBRIDPAR_DEVICE_MEMBER int column(int u) const { return at + u * stride; }

  // use(pack, column of its first element)
  template <class F>
  HYBRIDPAR_DEVICE_MEMBER void each(const F& use) const {
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (column(u) < end) use(packs[u], column(u));
  }
};

// use(batch) for this thread's part of the n elements at `row`: a few one by one until the memory is aligned, then
// kVector at a time, then the rest.
template <class T, class F>
HYBRIDPAR_DEVICE void over_row(const T* row, int n, const F& use) {
  constexpr int V = kVector<T>, U = kTogether<T>;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % V);
  const int head = min(n, (V - skew) % V), end = n - (n - head) % V, stride = blockDim.x * V;
  const auto one = [&](int at, int stop) {
    if (at < stop) use(Batch<T, 1, 1>{{load<1>(row + at)}, at, 1, stop});
  };
  one(threadIdx.x, head);
  for (int at = head + threadIdx.x * V; at < end; at += U * stride) {
    Batch<T, V, U> batch{{}, at, stride, end};
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (batch.column(u) < end) batch.packs[u] = load<V>(row + batch.column(u));
    use(batch);
  }
  one(end + threadIdx.x, n);
}

// The column of the row's label; -1: on another rank
HYBRIDPAR_DEVICE int label(const CrossEntropy& a, int64_t row) {
  const int64_t column = a.column[row];
  return column >= 0 && column < a.real ? static_cast<int>(column) : -1;
}

template <class W>
struct Exponentials {  // the sum of e^(x - top), top the largest of what was seen
  W top = -INFINITY, total = 0;

  // What to subtract: where nothing is above -infinity, nothing.
  HYBRIDPAR_DEVICE_MEMBER static W level(W top) { return top == W(-INFINITY) ? W(0) : top; }

  template <class T, int N, int U>
  HYBRIDPAR_DEVICE_MEMBER void add(const Batch<T, N, U>& batch) {
    W above = top;
    batch.each([&](const Pack<T, N>& pack, int) {
#pragma unroll
      for (int k = 0; k < N; ++k) above = larger(above, pack[k]);
    });
    const W base = level(above);
    total *= exponential(top - base);
    batch.each([&](const Pack<T, N>& pack, int) {
      W sum = 0;
#pragma unroll
      for (int k = 0; k < N; ++k) sum += exponential(pack[k] - base);
      total += sum;
    });
    top = above;
  }
};

template <class T>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_kernel(const CrossEntropy a) {
  using W = Wide<T>;
  __shared__ typename OverBlock<W>::Slots slots;
  OverBlock<W> over(slots);
  W* numbers = static_cast<W*>(a.numbers);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.cols;
    const int column = label(a, row);
    Exponentials<W> mine;
    over_row(x, a.real, [&](const auto& batch) { mine.add(batch); });
    const W target = column < 0 ? W(0) : wide(x[column]);
    const W top = over.largest(mine.top);
    const W total = over.sum(mine.total * exponential(mine.top - mine.level(top)));
    W below = 0;
    if (a.with_sum) {
      over_row(x, a.real, [&](const auto& batch) {
        batch.each([&](const auto& pack, int) {
#pragma unroll
          for (int k = 0; k < sizeof(pack) / sizeof(T); ++k) below += pack[k] - top;
        });
      });
      below = over.sum(below);
    }
    if (threadIdx.x == 0) {
      numbers[row] = top;
      numbers[a.rows + row] = total;
      numbers[2 * a.rows + row] = target;
      if (a.with_sum) numbers[3 * a.rows + row] = below;
    }
  }
}

template <class T>
struct Gradient {
  using W = Wide<T>;
  T* row;
  W top, factor, target, level;
  int column;

  template <int N>
  HYBRIDPAR_DEVICE_MEMBER void operator()(const Pack<T, N>& pack, int at) const {
    W dx[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      dx[k] = exponential(pack[k] - top) * factor - level;
      if (at + k == column) dx[k] -= target;
    }
    store(row + at, dx);
  }
};

template <class T>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_backward_kernel(const CrossEntropy a) {
  using W = Wide<T>;
  const W* numbers = static_cast<const W*>(a.numbers);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.cols;
    T* dx = static_cast<T*>(a.gradient) + row * a.cols;
    const Gradient<T> gradient{dx,
                               numbers[row],
                               numbers[a.rows + row],
                               numbers[2 * a.rows + row],
                               numbers[3 * a.rows + row],
                               label(a, row)};
    over_row(x, a.real, [&](const auto& batch) { batch.each(gradient); });
    for (int i = a.real + threadIdx.x; i < a.cols; i += blockDim.x) dx[i] = T{};
  }
}

template <class F>
void run(const char* name, Type type, const CrossEntropy& a, void* stream, const F& kernel) {
  if (a.rows == 0) return;
  choose(type, 1, {}, [&](auto element, auto) {
    using T = decltype(element);
    constexpr int kStep = kVector<T> * kTogether<T>;
    const dim3 block(std::min(kMostThreads, std::max(32, round_up((a.cols + kStep - 1) / kStep, 32))));
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(a.rows, 1 << 16)));
    launch(name, kernel(element), grid, block, stream, a);
  });
}

}  // namespace

void launch_cross_entropy(Type type, const CrossEntropy& a, void* stream) {
  run("cross_entropy", type, a, stream, [](auto element) { return cross_entropy_kernel<decltype(element)>; });
}

void launch_cross_entropy_backward(Type type, const CrossEntropy& a, void* stream) {
  run("cross_entropy_backward_", type, a, stream,
      [](auto element) { return cross_entropy_backward_kernel<decltype(element)>; });
}

}  // namespace hybridpar
