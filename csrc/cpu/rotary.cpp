// Rotary position embedding: turns the pairs (x[i], x[i + d/2]) of each head by an angle a position (arXiv 2104.09864).

#include "rotary_table.h"

namespace hybridpar {
namespace {

template <class T>
struct Rotation {
  const T* x;
  T* y;
  int64_t sample, head, position;  // strides of x
  int64_t heads, s, half;  // y: [samples, s, heads, 2 half] without gaps
  const Wide<T>* const* cos;  // of each position, [s] or [samples, s]
  const Wide<T>* const* sin;
  bool each_sample;
  Wide<T> sign;  // -1 turns back
};

// begin, end: positions of all samples
template <class T>
HYBRIDPAR_INLINE void turn_any(const Rotation<T>& a, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t half = a.half;
  const W sign = a.sign;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t b = at / a.s, s = at % a.s;
    const W *cos = a.cos[a.each_sample ? at : s], *sin = a.sin[a.each_sample ? at : s];
    for (int64_t n = 0; n < a.heads; ++n) {
      const T *x = a.x + b * a.sample + n * a.head + s * a.position, *x2 = x + half;
      T *y = a.y + (at * a.heads + n) * 2 * half, *y2 = y + half;
      each(half, [=](int64_t i, int) {
        const W c = cos[i], t = sin[i] * sign, first = wide(x[i]), second = wide(x2[i]);
        y[i] = narrow<T>(first * c - second * t);
        y2[i] = narrow<T>(second * c + first * t);
      });
    }
  }
}

#define HYBRIDPAR_ROTARY(T) \
  HYBRIDPAR_CLONES void turn(const Rotation<T>& a, int64_t begin, int64_t end) { turn_any(a, begin, end); }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_ROTARY)

// x [samples, heads, s, d], positions [s] or [samples, s] (without: from `offset` on) -> [samples, s, heads, d]
// given: frequencies of the pairs; empty: powers of the base
Tensor rotary(const Tensor& x, double base, const std::vector<double>& given, double magnitude, int64_t offset,
              const Optional& positions, bool back) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0 && (x.size(3) == 0 || x.stride(3) == 1),
                  "rotary: needs [samples, heads, s, d] with d even and without gaps");
  const int64_t samples = x.size(0), heads = x.size(1), s = x.size(2), d = x.size(3), half = d / 2;
  STD_TORCH_CHECK(!positions || (positions->is_contiguous() && positions->scalar_type() == ScalarType::Long &&
                                 (positions->numel() == s || positions->numel() == samples * s)),
                  "rotary: positions must be int64 [s] or [samples, s]");
  STD_TORCH_CHECK(given.empty() || static_cast<int64_t>(given.size()) == half,
                  "rotary: needs a frequency for each of the ", half, " pairs of features, got ", given.size());
  const std::vector<double> frequencies = pair_frequencies(base, given, half);
  Tensor y = make({samples, s, heads, d}, x.scalar_type());
  by_type("rotary", x, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    std::map<int64_t, std::shared_ptr<const RotaryTable<W>>> tables;
    const int64_t count = positions ? positions->numel() : s;
    std::vector<const W*> cos(count), sin(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = positions ? data<int64_t>(*positions)[i] : offset + i;
      STD_TORCH_CHECK(at >= 0, "rotary: position ", at, " is negative");
      auto& block = tables[at / kPositions];
      if (!block) block = rotary_table<W>(frequencies, magnitude, at / kPositions);
      cos[i] = block->cos.data() + at % kPositions * half;
      sin[i] = block->sin.data() + at % kPositions * half;
    }
    const Rotation<T> a{data<T>(x), data<T>(y), x.stride(0), x.stride(1), x.stride(2), heads, s, half,
                        cos.data(), sin.data(), count == samples * s && samples > 1, back ? W(-1) : W(1)};
    over_rows(samples * s, heads * d, [&](int64_t begin, int64_t end) { turn(a, begin, end); });
  });
  return y;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "rotary(Tensor x, float base, float[] frequencies, float magnitude, SymInt offset, Tensor? positions, bool back) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) { library.impl("rotary", TORCH_BOX(&rotary)); }
