// The local passes of the vocabulary-parallel cross-entropy. Exponentials are made twice rather than kept: logits are
// read once forward (and once more, from the cache, for their sum), and read and overwritten by their gradient
// backward. A row may begin anywhere: a vocabulary of 50257 is not a multiple of 8.

#include "math.cuh"

namespace hybridpar {
namespace {

template <class T>
constexpr int kTogether = kVector<T> > 1 ? 4 : 2;  // packs that a thread reads before it uses the first

// use(pack, column) for this thread's part of the n elements at `row`: a few one by one until the memory is aligned,
// then kVector at a time, then the rest. `use` may overwrite what it was given.
template <class T, class F>
HYBRIDPAR_DEVICE void over_row(const T* row, int n, const F& use) {
  constexpr int V = kVector<T>;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % V);
  const int head = min(n, (V - skew) % V), tail = (n - head) % V, end = n - tail, stride = blockDim.x * V;
  if (threadIdx.x < head) use(load<1>(row + threadIdx.x), static_cast<int>(threadIdx.x));
  for (int64_t at = head + threadIdx.x * V; at < end; at += kTogether<T> * static_cast<int64_t>(stride)) {
    Pack<T, V> packs[kTogether<T>];
#pragma unroll
    for (int u = 0; u < kTogether<T>; ++u)
      if (at + u * stride < end) packs[u] = load<V>(row + at + u * stride);
#pragma unroll
    for (int u = 0; u < kTogether<T>; ++u)
      if (at + u * stride < end) use(packs[u], static_cast<int>(at + u * stride));
  }
  if (threadIdx.x < tail) use(load<1>(row + end + threadIdx.x), static_cast<int>(end + threadIdx.x));
}

template <class W>
struct Exponentials {  // the sum of e^(x - top), top the largest of what was seen
  W top = -INFINITY, total = 0;

  // What to subtract: where nothing is above -infinity, nothing.
  HYBRIDPAR_DEVICE_MEMBER static W level(W top) { return top == W(-INFINITY) ? W(0) : top; }

  template <class T, int N>
  HYBRIDPAR_DEVICE_MEMBER void add(const Pack<T, N>& pack) {
    W above = top;
#pragma unroll
    for (int k = 0; k < N; ++k) above = larger(above, pack[k]);
    const W base = level(above);
    total *= exponential(top - base);
#pragma unroll
    for (int k = 0; k < N; ++k) total += exponential(pack[k] - base);
    top = above;
  }
};

template <class T>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_kernel(const CrossEntropy a) {
  using W = Wide<T>;
  __shared__ typename OverRow<W, 1>::Slots slots;
  OverRow<W, 1> over(slots);
  W* numbers = static_cast<W*>(a.numbers);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.cols;
    Exponentials<W> mine;
    over_row(x, a.real, [&](const auto& pack, int) { mine.add(pack); });
    const W top = over.largest(mine.top);
    const W total = over.sum(mine.total * exponential(mine.top - mine.level(top)));
    W below = 0;
    if (a.with_sum) {
      over_row(x, a.real, [&](const auto& pack, int) {
#pragma unroll
        for (int k = 0; k < sizeof(pack) / sizeof(T); ++k) below += pack[k] - top;
      });
      below = over.sum(below);
    }
    if (threadIdx.x == 0) {
      const int64_t column = a.column[row];
      numbers[row] = top;
      numbers[a.rows + row] = total;
      numbers[2 * a.rows + row] = column >= 0 && column < a.real ? wide(x[column]) : W(0);
      if (a.with_sum) numbers[3 * a.rows + row] = below;
    }
  }
}

template <class T>
struct Gradient {
  using W = Wide<T>;
  T* row;
  W top, factor, target, level;
  int64_t column;

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
    T* x = static_cast<T*>(a.logits) + row * a.cols;
    over_row(x, a.real, Gradient<T>{x, numbers[row], numbers[a.rows + row], numbers[2 * a.rows + row],
                                    numbers[3 * a.rows + row], a.column[row]});
    for (int i = a.real + threadIdx.x; i < a.cols; i += blockDim.x) x[i] = T{};
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
