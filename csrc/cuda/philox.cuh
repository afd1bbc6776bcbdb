// The Philox4x32-10 generator, and dropout's mask of it. The same bits as hybridpar/random.py, which says how key and
// counter are made and where the constants come from.
#pragma once

#include "device.cuh"

namespace hybridpar {

// Of a number that nothing changes while the kernel runs.
HYBRIDPAR_DEVICE uint32_t low_word(const int64_t* x) { return __ldg(reinterpret_cast<const uint32_t*>(x)); }

struct Words {
  uint32_t a, b, c, d;
};

HYBRIDPAR_DEVICE Words generate(const Mask& mask, uint32_t step, uint32_t sample, uint64_t quad) {
  uint32_t c0 = static_cast<uint32_t>(quad), c1 = static_cast<uint32_t>(quad >> 32), c2 = step, c3 = sample;
  uint32_t k0 = mask.key0, k1 = mask.key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// Four of the eight words, from number `offset` (0 .. 3) on.
HYBRIDPAR_DEVICE Words from(const Words& x, const Words& next, uint32_t offset) {
  const bool two = offset & 2, one = offset & 1;
  const uint32_t a = two ? x.c : x.a, b = two ? x.d : x.b, c = two ? next.a : x.c, d = two ? next.b : x.d,
                 e = two ? next.c : next.a;
  return {one ? b : a, one ? c : b, one ? d : c, one ? e : d};
}

// Which of the N elements from (row, column) on stay. A call of the generator makes four; N elements that begin in the
// middle of four need one call more.
template <int N>
HYBRIDPAR_DEVICE void kept(const Mask& mask, int64_t row, int64_t column, bool (&stays)[N]) {
  static_assert(N == 1 || N % 4 == 0);
  const int64_t sample = divide(row, mask.rows);
  const uint64_t index = static_cast<uint64_t>(mask.start + (row - sample * mask.rows) * mask.stride + column);
  const uint32_t offset = index & 3;
  const uint32_t step = low_word(mask.counter), number = low_word(mask.counter + 1) + static_cast<uint32_t>(sample);
  Words words = generate(mask, step, number, index >> 2);
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    Words next = {};
    if (N > 1 && (k + 4 < N || offset)) next = generate(mask, step, number, (index >> 2) + k / 4 + 1);
    const Words mine = from(words, next, offset);
    stays[k] = mine.a >= mask.threshold;
    if constexpr (N > 1) {
      stays[k + 1] = mine.b >= mask.threshold;
      stays[k + 2] = mine.c >= mask.threshold;
      stays[k + 3] = mine.d >= mask.threshold;
    }
    words = next;
  }
}

}  // namespace hybridpar
