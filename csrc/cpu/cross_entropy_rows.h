// The rows of cross_entropy.cpp, included once for one element at a time and once in namespace vectors for 16.

template <class T>
HYBRIDPAR_INLINE void forward_any(const Forward<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.logits + row * a.cols;
    W top = -std::numeric_limits<W>::infinity(), total = 0;
    for (int64_t at = 0; at < a.real; at += kChunk) {
      const int64_t n = std::min(kChunk, a.real - at);
      const T* chunk = x + at;
      const W new_top = largest(chunk, n, top);
      // where nothing is above -infinity yet, subtract nothing
      const W level = new_top == -std::numeric_limits<W>::infinity() ? W(0) : new_top;
      W added[kLanes] = {};
      each(n, [&](auto i, auto lane) { put(added, lane, load(added, lane) + exponential(load(chunk, i) - level)); },
           chunk + kChunk);
      total = total * numbers::exponential(top - level) + sum_lanes(added);
      top = new_top;
    }
    a.top[row] = top;
    a.total[row] = total;
    const int64_t column = a.column[row];
    a.target[row] = column >= 0 && column < a.real ? wide(x[column]) : W(0);
    if (a.sum) {
      W lanes[kLanes] = {};
      each(a.real, [&](auto i, auto lane) { put(lanes, lane, load(lanes, lane) + (load(x, i) - top)); });
      a.sum[row] = sum_lanes(lanes);
    }
  }
}

template <class T>
HYBRIDPAR_INLINE void backward_any(const Backward<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.logits + row * a.cols;
    T* dx = a.gradient + row * a.cols;
    const W top = a.top[row], factor = a.factor[row], level = a.level[row];
    const int64_t column = a.column[row];
    const bool here = column >= 0 && column < a.real;
    const W logit = here ? wide(x[column]) : W(0);
    map(a.real, x, dx, [=](auto value) __attribute__((always_inline)) {
      return multiply_add(exponential(value - top), factor, -level);
    });
    if (here) {
      const W rest = hybridpar::multiply_add(numbers::exponential(logit - top), factor, -level);
      dx[column] = narrow<T>(rest - a.target[row]);
    }
    std::fill(dx + a.real, dx + a.cols, T{});
  }
}
