// Loops over bfloat16 for CPUs with AVX512-BF16: 16 numbers at once, rounded by the CPU's instruction, which the compiler does
// not use by itself. The same results as of namespace numbers, to the bit.
//
// The code between `#include "vectors.h"` and `#include "vectors_end.h"` is compiled for such CPUs alone; callers ask
// has_bfloat16() before. All that is defined there is in namespace vectors: what other files define, too, the linker takes
// from any of them (tested: tests/csrc/test_instructions.py).

#include "rows.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi,bmi2")

namespace hybridpar::vectors {

struct Floats {
  __m512 all;

  HYBRIDPAR_INLINE_MEMBER Floats(__m512 x) : all(x) {}
  HYBRIDPAR_INLINE_MEMBER Floats(float x) : all(_mm512_set1_ps(x)) {}
};
HYBRIDPAR_INLINE Floats operator+(Floats a, Floats b) { return _mm512_add_ps(a.all, b.all); }
HYBRIDPAR_INLINE Floats operator-(Floats a, Floats b) { return _mm512_sub_ps(a.all, b.all); }
HYBRIDPAR_INLINE Floats operator*(Floats a, Floats b) { return _mm512_mul_ps(a.all, b.all); }
HYBRIDPAR_INLINE Floats operator/(Floats a, Floats b) { return _mm512_div_ps(a.all, b.all); }
HYBRIDPAR_INLINE Floats operator-(Floats a) { return _mm512_xor_ps(a.all, _mm512_set1_ps(-0.0f)); }
HYBRIDPAR_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a.all, b.all, c.all); }
HYBRIDPAR_INLINE Floats at_most(Floats x, Floats limit) { return _mm512_min_ps(limit.all, x.all); }  // x where x is NaN
HYBRIDPAR_INLINE Floats at_least(Floats x, Floats limit) { return _mm512_max_ps(limit.all, x.all); }
HYBRIDPAR_INLINE Floats zero_below(Floats x, Floats limit, Floats y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.all, limit.all, _CMP_NLT_UQ), y.all);
}
HYBRIDPAR_INLINE Floats power_of_two(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.all), 23));
}

// Elements first to first + 15, of which `mask` says which are there.
struct At {
  int64_t first;
  __mmask16 mask;
};

HYBRIDPAR_INLINE At operator+(int64_t offset, At at) { return {offset + at.first, at.mask}; }

HYBRIDPAR_INLINE Floats load(const float* x, At at) { return _mm512_maskz_loadu_ps(at.mask, x + at.first); }
HYBRIDPAR_INLINE Floats load(const BFloat16* x, At at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(at.mask, x + at.first)), 16));
}
HYBRIDPAR_INLINE void put(float* to, At at, Floats x) { _mm512_mask_storeu_ps(to + at.first, at.mask, x.all); }
HYBRIDPAR_INLINE void put(BFloat16* to, At at, Floats x) {
  constexpr int kUnlike = 0x01 | 0x20 | 0x80;  // NaN and subnormals, of which the instruction makes something else
  if (__builtin_expect(_mm512_mask_fpclass_ps_mask(at.mask, x.all, kUnlike), 0)) {
    float one[16];
    _mm512_storeu_ps(one, x.all);
    for (int i = 0; i < 16; ++i)
      if (at.mask >> i & 1) to[at.first + i] = narrow<BFloat16>(one[i]);
    return;
  }
  _mm256_mask_storeu_epi16(to + at.first, at.mask, (__m256i)_mm512_cvtneps_pbh(x.all));
}

// f(at, lanes) for all of [0, n): `lanes` are where at is among kLanes.
template <class F, class... S>
HYBRIDPAR_INLINE void each(int64_t n, const F& f, const S&... later) {
  constexpr __mmask16 kAll = 0xffff;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    (ask(later, i), ...);
    f(At{i, kAll}, At{0, kAll});
    f(At{i + 16, kAll}, At{16, kAll});
  }
  for (int64_t first = i; i < n; i += 16) {
    const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(16, n - i)) - 1);
    f(At{i, mask}, At{i - first, mask});
  }
}

#include "functions.h"

template <class F>
HYBRIDPAR_INLINE void map(int64_t n, const BFloat16* x, BFloat16* to, const F& f) {
  each(n, [=](At i, At) { put(to, i, f(load(x, i))); }, ahead(x), ahead(to));
}

}  // namespace hybridpar::vectors
