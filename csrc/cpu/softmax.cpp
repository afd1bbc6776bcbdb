// softmax(scale * x) over the last dimension with causal and padding masks, forward and backward.

#include "rows.h"

namespace hybridpar {
namespace {

template <class T>
struct Scores {  // [samples, heads, queries, keys]
  const T *x, *dy;  // forward: scores; backward: probabilities, and the gradient of them
  T* out;
  const bool* real;  // [samples, keys], or null
  int64_t queries, keys, rows_per_sample;
  Wide<T> scale;
  bool causal;  // query i sees keys up to i + keys - queries
};

// Keys that a row sees at most.
template <class T>
HYBRIDPAR_INLINE int64_t seen(const Scores<T>& a, int64_t row) {
  if (!a.causal) return a.keys;
  return std::min(a.keys, std::max<int64_t>(0, row % a.queries + a.keys - a.queries + 1));
}

template <class T>
HYBRIDPAR_INLINE void forward_any(const Scores<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  constexpr W kHidden = -std::numeric_limits<W>::infinity();
  std::unique_ptr<W[]> buffer(new W[static_cast<size_t>(a.keys)]);
  W* values = buffer.get();
  const W scale = a.scale;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.keys;
    T* y = a.out + row * a.keys;
    const T *next = x + a.keys, *next_y = y + a.keys;
    const bool* real = a.real ? a.real + row / a.rows_per_sample * a.keys : nullptr;
    const int64_t n = seen(a, row);
    W tops[kLanes];
    std::fill_n(tops, kLanes, std::numeric_limits<W>::lowest());
    if (real)
      each(n, [&](int64_t i, int lane) {
        values[i] = real[i] ? wide(x[i]) * scale : kHidden;
        tops[lane] = values[i] > tops[lane] ? values[i] : tops[lane];
      }, next);
    else
      each(n, [&](int64_t i, int lane) {
        values[i] = wide(x[i]) * scale;
        tops[lane] = values[i] > tops[lane] ? values[i] : tops[lane];
      }, next);
    const W top = max_lanes(tops);
    W lanes[kLanes] = {};
    each(n, [&](int64_t i, int lane) {
      values[i] = exponential(values[i] - top);
      lanes[lane] += values[i];
    });
    const W total = sum_lanes(lanes), factor = total == W(0) ? W(0) : W(1) / total;  // sees nothing: zeros
    each(n, [=](int64_t i, int) { y[i] = narrow<T>(values[i] * factor); }, next_y);
    std::fill(y + n, y + a.keys, T{});
  }
}

template <class T>
HYBRIDPAR_INLINE void backward_any(const Scores<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const W scale = a.scale;
  for (int64_t row = begin; row < end; ++row) {
    const T *p = a.x + row * a.keys, *dy = a.dy + row * a.keys;
    T* dx = a.out + row * a.keys;
    const int64_t n = seen(a, row);
    W lanes[kLanes] = {};
    each(n, [&](int64_t i, int lane) { lanes[lane] = multiply_add(wide(p[i]), wide(dy[i]), lanes[lane]); },
         p + a.keys, dy + a.keys);
    const W mean = sum_lanes(lanes);
    each(n, [=](int64_t i, int) { dx[i] = narrow<T>(wide(p[i]) * (wide(dy[i]) - mean) * scale); }, dx + a.keys);
    std::fill(dx + n, dx + a.keys, T{});
  }
}

#define HYBRIDPAR_SOFTMAX(T)                                                            \
  HYBRIDPAR_CLONES void forward_rows(const Scores<T>& a, int64_t begin, int64_t end) {  \
    forward_any(a, begin, end);                                                         \
  }                                                                                     \
  HYBRIDPAR_CLONES void backward_rows(const Scores<T>& a, int64_t begin, int64_t end) { \
    backward_any(a, begin, end);                                                        \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_SOFTMAX)

void check(const char* op, const Tensor& x, const Optional& real) {
  check_contiguous(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 4, op, ": x must be [samples, heads, queries, keys]");
  STD_TORCH_CHECK(!real || (real->is_contiguous() && real->scalar_type() == ScalarType::Bool &&
                            real->numel() == x.size(0) * x.size(3)),
                  op, ": the padding mask must be bool [samples, keys]");
}

template <class T>
Scores<T> scores(const Tensor& x, const Tensor* dy, const Tensor& out, const Optional& real, double scale,
                 bool causal) {
  return {data<T>(x), dy ? data<T>(*dy) : nullptr, data<T>(out), data<bool>(real), x.size(2), x.size(3),
          x.size(1) * x.size(2), static_cast<Wide<T>>(scale), causal};
}

Tensor masked_softmax(const Tensor& x, const Optional& real, double scale, bool causal) {
  check("masked_softmax", x, real);
  Tensor y = make_like(x);
  by_type("masked_softmax", x, [&](auto element) {
    const auto a = scores<decltype(element)>(x, nullptr, y, real, scale, causal);
    over_rows(num_rows(x), a.keys, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
  });
  return y;
}

Tensor masked_softmax_backward(const Tensor& dy, const Tensor& y, double scale, bool causal) {
  check("masked_softmax_backward", y, std::nullopt);
  check("masked_softmax_backward", dy, std::nullopt);
  STD_TORCH_CHECK(dy.numel() == y.numel() && dy.scalar_type() == y.scalar_type(),
                  "masked_softmax_backward: dy must be like y");
  Tensor dx = make_like(y);
  by_type("masked_softmax_backward", y, [&](auto element) {
    const auto a = scores<decltype(element)>(y, &dy, dx, std::nullopt, scale, causal);
    over_rows(num_rows(y), a.keys, [&](int64_t begin, int64_t end) { backward_rows(a, begin, end); });
  });
  return dx;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("masked_softmax(Tensor x, Tensor? real, float scale, bool causal) -> Tensor");
  library.def("masked_softmax_backward(Tensor dy, Tensor y, float scale, bool causal) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  library.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
}
