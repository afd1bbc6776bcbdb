// The Philox4x32-10 generator on the CPU, to be inlined into hot loops. The same bits as hybridpar/random.py, which says
// how key and counter are made and where the constants come from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rows.h"

namespace hybridpar {

constexpr int64_t kBlock = 1024;  // elements generated at a time, into a buffer on the stack

struct Stream {
  uint32_t key0, key1, step, sample;
};

// 4 * quads words of output for the counters quad, quad + 1, ...
HYBRIDPAR_INLINE void generate(const Stream& stream, uint64_t quad, int64_t quads, uint32_t* out) {
  const uint32_t key0 = stream.key0, key1 = stream.key1, step = stream.step, sample = stream.sample;
#pragma omp simd
  for (int64_t i = 0; i < quads; ++i) {
    const uint64_t q = quad + static_cast<uint64_t>(i);
    // 64-bit lanes, of which the upper half never counts: the multiplication reads the lower halves only.
    uint64_t c0 = q & 0xffffffffu, c1 = q >> 32, c2 = step, c3 = sample;
    uint32_t k0 = key0, k1 = key1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t product0 = (c0 & 0xffffffffu) * 0xD2511F53u;
      const uint64_t product1 = (c2 & 0xffffffffu) * 0xCD9E8D57u;
      c0 = (product1 >> 32) ^ c1 ^ k0;
      c2 = (product0 >> 32) ^ c3 ^ k1;
      c1 = product1;
      c3 = product0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[4 * i] = static_cast<uint32_t>(c0);
    out[4 * i + 1] = static_cast<uint32_t>(c1);
    out[4 * i + 2] = static_cast<uint32_t>(c2);
    out[4 * i + 3] = static_cast<uint32_t>(c3);
  }
}

// Calls use(words, at, n) for blocks of the n elements that begin at `index`.
template <class Use>
HYBRIDPAR_INLINE void blocks(const Stream& stream, int64_t index, int64_t n, const Use& use) {
  uint32_t words[kBlock + 8];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t size = std::min(kBlock, n - at);
    const int64_t offset = (index + at) & 3;
    generate(stream, static_cast<uint64_t>(index + at) >> 2, (offset + size + 3) / 4, words);
    use(words + offset, at, size);
  }
}

inline Stream make_stream(int64_t key0, int64_t key1, int64_t step, int64_t sample) {
  return {static_cast<uint32_t>(key0), static_cast<uint32_t>(key1), static_cast<uint32_t>(step),
          static_cast<uint32_t>(sample)};
}

// What dropout draws from. counter: int64 [2], the step and the sample of the first of `samples`; without one nothing
// may be dropped.
inline Stream dropout_stream(const char* op, int64_t key0, int64_t key1, const Optional& counter,
                             int64_t threshold, int64_t samples) {
  constexpr int64_t kWords = int64_t(1) << 32;
  STD_TORCH_CHECK(threshold >= 0 && threshold < kWords, op, ": threshold ", threshold, " does not fit 32 bits");
  if (threshold == 0) return {};
  STD_TORCH_CHECK(counter && counter->scalar_type() == ScalarType::Long && counter->numel() == 2 &&
                      counter->is_contiguous() && counter->is_cpu(),
                  op, ": dropout needs a counter, int64 [2] beside x");
  const int64_t step = data<int64_t>(counter)[0], sample = data<int64_t>(counter)[1];
  STD_TORCH_CHECK(step >= 0 && step < kWords && sample >= 0 && sample <= kWords - samples, op, ": step ", step,
                  " and samples ", sample, " to ", sample + samples, " must be within 0 to 2**32 - 1");
  return make_stream(key0, key1, step, sample);
}

// Which elements of [samples, rows, cols] dropout keeps: element (i, r, c) has the counter of sample + i and of
// index = start + r * stride + c, and stays where its bits are at least `threshold`.
struct Mask {
  Stream stream;
  int64_t rows;  // of a sample
  int64_t stride, start;
  uint32_t threshold;  // 0: keeps everything
  double scale;

  // Where row `row` of all samples begins.
  HYBRIDPAR_INLINE_MEMBER Stream stream_of(int64_t row) const {
    Stream mine = stream;
    mine.sample += static_cast<uint32_t>(row / rows);
    return mine;
  }
  HYBRIDPAR_INLINE_MEMBER int64_t index_of(int64_t row) const { return start + row % rows * stride; }
};

inline Mask make_mask(const char* op, const Tensor& x, int64_t key0, int64_t key1, const Optional& counter,
                      int64_t threshold, double scale, int64_t stride, int64_t start) {
  const int64_t samples = x.dim() > 1 ? x.size(0) : 1;
  return {dropout_stream(op, key0, key1, counter, threshold, samples),
          std::max<int64_t>(1, num_rows(x) / std::max<int64_t>(1, samples)), stride, start,
          static_cast<uint32_t>(threshold), scale};
}

#define HYBRIDPAR_MASK \
  "int key0, int key1, Tensor? counter, int threshold, float scale, SymInt stride, SymInt start"

}  // namespace hybridpar
