// Scaled dot-product attention of bfloat16 by AVX512-BF16, whose instruction multiplies pairs of numbers and adds both to
// a float: twice as many a cycle as of float on AMD's CPUs (has_fast_bfloat16).
//
// As on GPUs, probabilities and the gradients of scores are rounded to bfloat16 before they are multiplied. Subnormal
// factors and sums count as zeros.

#include "attention.h"

#ifdef HYBRIDPAR_HAS_CLONES
#include "vectors.h"

namespace hybridpar::vectors {
namespace {

struct Pairs {
  using Element = uint32_t;  // the one with the lower index in the lower half
  static constexpr int64_t kDeep = 2;
  static constexpr int kTileRows = 8;

  static void left(const Strided<const BFloat16>& from, int64_t b, int64_t n, int64_t first, int64_t count, int64_t rows,
                   int64_t d, int64_t padded_d, uint32_t* to) {
    for (int64_t i = 0; i < rows; ++i) {
      char* row = reinterpret_cast<char*>(to) + i * padded_d * 2;
      const size_t size = i < count ? static_cast<size_t>(d) * 2 : 0;
      if (size) std::memcpy(row, from.row(b, n, first + i), size);
      std::memset(row + size, 0, static_cast<size_t>(padded_d) * 2 - size);
    }
  }

  static uint32_t word(const BFloat16* row, int64_t i, int64_t d) {
    const uint32_t low = row[2 * i].bits;
    return 2 * i + 1 < d ? low | static_cast<uint32_t>(row[2 * i + 1].bits) << 16 : low;
  }

  static const uint32_t* right(const uint32_t* left, int64_t rows, int64_t padded_d, uint32_t* to) {
    for (int64_t i = 0; i < rows; i += 2) {
      const auto* low = reinterpret_cast<const __m256i*>(left + i * padded_d / 2);
      const auto* high = reinterpret_cast<const __m256i*>(left + (i + 1) * padded_d / 2);
      for (int64_t j = 0; j < padded_d / 16; ++j) {
        const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(high + j)), 16);
        const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(_mm256_loadu_si256(low + j)), upper);
        _mm512_storeu_si512(to + i / 2 * padded_d + 16 * j, both);
      }
    }
    return to;
  }

  static const uint32_t* left_block(const float* block, int64_t rows, int64_t width, uint32_t* to) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < width; j += 32) {
        const float* from = block + r * kKeys + j;
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
        _mm512_storeu_si512(to + (r * kKeys + j) / 2, (__m512i)both);
      }
    return to;
  }

  static const uint32_t* turned_block(const float* block, int64_t rows, int64_t width, uint32_t* to) {
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t j = 0; j < width; j += 16) {
        const float* from = block + r * kKeys + j;
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + kKeys)));
        _mm512_storeu_si512(to + r / 2 * kKeys + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    return to;
  }

  template <bool add>
  static void product(const uint32_t* a, int64_t a_row, int64_t a_k, const uint32_t* b, int64_t b_k, float* c, int64_t c_row,
                      int64_t rows, int64_t cols, int64_t depth, float scale) {
    for (int64_t w = 0; w < cols; w += kTileCols)
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const uint32_t *left = a + r * a_row, *right = b + w;
        float* to = c + r * c_row + w;
        __m512 sum[kTileRows][2];
#pragma GCC unroll 8
        for (int i = 0; i < kTileRows; ++i)
          for (int half = 0; half < 2; ++half)
            sum[i][half] = add ? _mm512_loadu_ps(to + i * c_row + 16 * half) : _mm512_setzero_ps();
        for (int64_t k = 0; k < depth; ++k) {
          const auto first = (__m512bh)_mm512_loadu_si512(right + k * b_k);
          const auto second = (__m512bh)_mm512_loadu_si512(right + k * b_k + 16);
#pragma GCC unroll 8
          for (int i = 0; i < kTileRows; ++i) {
            const auto factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(left[i * a_row + k * a_k]));
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], factor, first);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], factor, second);
          }
        }
        const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 8
        for (int i = 0; i < kTileRows; ++i)
          for (int half = 0; half < 2; ++half)
            _mm512_storeu_ps(to + i * c_row + 16 * half, add ? sum[i][half] : _mm512_mul_ps(sum[i][half], factor));
      }
  }
};

}  // namespace

HYBRIDPAR_FLATTEN void forward_heads(const Problem<BFloat16>& p, const ForwardOut<BFloat16>& o, int64_t begin, int64_t end) {
  forward_any<Pairs>(p, o, begin, end);
}

HYBRIDPAR_FLATTEN void backward_heads(const Problem<BFloat16>& p, const BackwardOut<BFloat16>& o, int64_t begin,
                                      int64_t end) {
  backward_any<Pairs>(p, o, begin, end);
}

}  // namespace hybridpar::vectors
#include "vectors_end.h"
#endif
