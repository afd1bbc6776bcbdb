// Attention of one new token of each text, over keys and values that are kept: turns its queries and key to their position,
// adds its key and value to what is kept, and attends, in one pass over the fused qkv product.
//
// A key and value head belongs to one thread. Sums are by position, so a text's output does not depend on other texts.

#include "rotary_table.h"

namespace hybridpar {
namespace {

constexpr int kParts = 16;  // partial sums of a product: an AVX-512 register of float
constexpr int kTogether = 4;  // keys or values that are read at once

template <class T>
struct Step {
  const T* qkv;  // [texts, rows]: of each group its queries, its key, its value
  T *keys, *values;  // [texts, groups, capacity, d]
  T* out;  // [texts, heads * d]
  const int64_t* position;  // of each text
  const Wide<T>* const* cos;  // of each text's position, [half]
  const Wide<T>* const* sin;
  const int64_t* queries;  // query heads of each group
  const int64_t* slot;  // the first head of each group in a row of qkv
  const int64_t* head;  // the first query head of each group
  int64_t groups, rows, capacity, heads, d, half;  // half of the features that are turned; 0: none
  int64_t window;  // keys that a query sees at most; 0: all
  Wide<T> scale, softcap;
};

template <class T, class To>
HYBRIDPAR_INLINE void turn(const Step<T>& p, int64_t text, const T* from, To* to) {
  const int64_t half = p.half;
  if (half) {
    const Wide<T> *cos = p.cos[text], *sin = p.sin[text];
    for (int64_t i = 0; i < half; ++i) {
      const Wide<T> first = wide(from[i]), second = wide(from[i + half]);
      to[i] = narrow<To>(first * cos[i] - second * sin[i]);
      to[i + half] = narrow<To>(second * cos[i] + first * sin[i]);
    }
  }
  for (int64_t i = 2 * half; i < p.d; ++i) to[i] = narrow<To>(wide(from[i]));
}

// scores [count] = scale * keys [count, d] q
template <int N, class T, class W = Wide<T>>
HYBRIDPAR_INLINE void products(const W* q, const T* keys, int64_t d, W scale, W* scores) {
  W sum[N][kParts] = {};
  int64_t i = 0;
  for (; i + kParts <= d; i += kParts)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma omp simd
      for (int j = 0; j < kParts; ++j) sum[n][j] = multiply_add(q[i + j], wide(keys[n * d + i + j]), sum[n][j]);
  for (int n = 0; n < N; ++n) {
    W* parts = sum[n];
    for (int64_t j = 0; i + j < d; ++j) parts[j] = multiply_add(q[i + j], wide(keys[n * d + i + j]), parts[j]);
    scores[n] = sum_lanes<kParts / 2>(parts) * scale;
  }
}

// sum [d] += weights [N] values [N, d]
template <int N, class T, class W = Wide<T>>
HYBRIDPAR_INLINE void add_values(const W* weights, const T* values, int64_t d, W* sum) {
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) {
    W total = sum[i];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) total = multiply_add(weights[n], wide(values[n * d + i]), total);
    sum[i] = total;
  }
}

// Buffers of a thread, in the type of the arithmetic.
template <class W>
struct Scratch {
  W *q, *sum;  // [d]
  W* scores;  // [capacity]
};

template <class T>
HYBRIDPAR_INLINE void attend(const Step<T>& p, const T* keys, const T* values, int64_t count, const Scratch<Wide<T>>& at,
                             T* out) {
  using W = Wide<T>;
  const int64_t d = p.d;
  W *scores = at.scores, *sum = at.sum;
  int64_t key = 0;
  for (; key + kTogether <= count; key += kTogether)
    products<kTogether, T>(at.q, keys + key * d, d, p.scale, scores + key);
  for (; key < count; ++key) products<1, T>(at.q, keys + key * d, d, p.scale, scores + key);
  if (p.softcap) {
    const W softcap = p.softcap, turns = W(2) / softcap;
    each(count, [=](int64_t j, int) {
      const auto half = sigmoid(scores[j] * turns);
      scores[j] = softcap * (half.value - half.rest);
    });
  }
  W tops[kLanes], totals[kLanes] = {};
  std::fill_n(tops, kLanes, std::numeric_limits<W>::lowest());
  each(count, [&](int64_t j, int lane) { tops[lane] = scores[j] > tops[lane] ? scores[j] : tops[lane]; });
  const W top = max_lanes(tops);
  each(count, [&](int64_t j, int lane) {
    scores[j] = exponential(scores[j] - top);
    totals[lane] += scores[j];
  });
  const W factor = W(1) / sum_lanes(totals);
  std::fill_n(sum, d, W(0));
  for (key = 0; key + kTogether <= count; key += kTogether)
    add_values<kTogether, T>(scores + key, values + key * d, d, sum);
  for (; key < count; ++key) add_values<1, T>(scores + key, values + key * d, d, sum);
  for (int64_t i = 0; i < d; ++i) out[i] = narrow<T>(sum[i] * factor);
}

// begin, end: pairs of a text and a group
template <class T>
HYBRIDPAR_INLINE void next_any(const Step<T>& p, int64_t begin, int64_t end) {
  const int64_t d = p.d;
  std::vector<Wide<T>> buffer(static_cast<size_t>(2 * d + p.capacity));
  const Scratch<Wide<T>> at{buffer.data(), buffer.data() + d, buffer.data() + 2 * d};
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t text = pair / p.groups, g = pair % p.groups, position = p.position[text], queries = p.queries[g];
    const T* from = p.qkv + text * p.rows + p.slot[g] * d;
    T *keys = p.keys + pair * p.capacity * d, *values = p.values + pair * p.capacity * d;
    turn(p, text, from + queries * d, keys + position * d);
    std::copy_n(from + (queries + 1) * d, d, values + position * d);
    const int64_t first = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
    for (int64_t n = 0; n < queries; ++n) {
      turn(p, text, from + n * d, at.q);
      attend(p, keys + first * d, values + first * d, position + 1 - first, at,
             p.out + (text * p.heads + p.head[g] + n) * d);
    }
  }
}

}  // namespace

namespace numbers {
namespace {
#define HYBRIDPAR_NEXT_TOKEN(T) \
  HYBRIDPAR_CLONES void next_pairs(const Step<T>& p, int64_t begin, int64_t end) { next_any(p, begin, end); }
HYBRIDPAR_NEXT_TOKEN(float)
HYBRIDPAR_NEXT_TOKEN(double)
HYBRIDPAR_NEXT_TOKEN(BFloat16)
}  // namespace
}  // namespace numbers

namespace {

// qkv [texts, 1, rows], keys and values [texts, groups, capacity, d], positions [texts] or [1] -> [texts, 1, heads * d]
// features: how many of a head's first features rotary positions turn; see rotary for the arguments before it
Tensor next_token_attention(const Tensor& qkv, const Tensor& keys, const Tensor& values, const Tensor& positions,
                            const std::vector<int64_t>& queries, int64_t window, double scale, double softcap, double base,
                            const std::vector<double>& given, double magnitude, int64_t features) {
  const char* op = "next_token_attention";
  const int64_t groups = static_cast<int64_t>(queries.size());
  check_contiguous(op, "qkv", qkv);
  check_contiguous(op, "keys", keys);
  check_contiguous(op, "values", values);
  check_contiguous(op, "positions", positions);
  STD_TORCH_CHECK(qkv.dim() == 3 && qkv.size(1) == 1, op, ": qkv must be [texts, 1, rows]");
  const int64_t texts = qkv.size(0), rows = qkv.size(2);
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.size(0) == texts && keys.size(1) == groups, op,
                  ": keys and values must be [texts, groups, capacity, d]");
  const int64_t capacity = keys.size(2), d = keys.size(3), half = features / 2;
  for (int64_t dim = 0; dim < 4; ++dim)
    STD_TORCH_CHECK(values.size(dim) == keys.size(dim), op, ": keys and values must have one shape");
  STD_TORCH_CHECK(keys.scalar_type() == qkv.scalar_type() && values.scalar_type() == qkv.scalar_type(), op,
                  ": qkv, keys and values must be of one type");
  std::vector<int64_t> slot, head;
  int64_t heads = 0;
  for (int64_t g = 0; g < groups; ++g) {
    STD_TORCH_CHECK(queries[g] > 0, op, ": each group needs a query head");
    slot.push_back(heads + 2 * g);
    head.push_back(heads);
    heads += queries[g];
  }
  STD_TORCH_CHECK(rows == (heads + 2 * groups) * d, op, ": qkv must have rows for each head of the groups");
  STD_TORCH_CHECK(features >= 0 && features % 2 == 0 && features <= d, op, ": features must be pairs of a head's");
  STD_TORCH_CHECK(given.empty() || static_cast<int64_t>(given.size()) == half, op, ": needs a frequency for each pair");
  STD_TORCH_CHECK(positions.scalar_type() == ScalarType::Long && (positions.numel() == texts || positions.numel() == 1), op,
                  ": positions must be int64, one for each text or for all");
  std::vector<int64_t> position(texts);
  for (int64_t text = 0; text < texts; ++text) {
    position[text] = data<int64_t>(positions)[positions.numel() == 1 ? 0 : text];
    STD_TORCH_CHECK(position[text] >= 0 && position[text] < capacity, op, ": position ", position[text],
                    " is not within the capacity of ", capacity);
  }
  Tensor out = make({texts, 1, heads * d}, qkv.scalar_type());
  const auto run = [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    std::map<int64_t, std::shared_ptr<const RotaryTable<W>>> tables;
    std::vector<const W*> cos(texts), sin(texts);
    if (half) {
      const std::vector<double> frequencies = pair_frequencies(base, given, half);
      for (int64_t text = 0; text < texts; ++text) {
        auto& block = tables[position[text] / kPositions];
        if (!block) block = rotary_table<W>(frequencies, magnitude, position[text] / kPositions);
        cos[text] = block->cos.data() + position[text] % kPositions * half;
        sin[text] = block->sin.data() + position[text] % kPositions * half;
      }
    }
    const Step<T> p{data<T>(qkv), data<T>(keys), data<T>(values), data<T>(out), position.data(), cos.data(), sin.data(),
                    queries.data(), slot.data(), head.data(), groups, rows, capacity, heads, d, half, window,
                    static_cast<W>(scale), static_cast<W>(softcap)};
    const int64_t longest = *std::max_element(position.begin(), position.end()) + 1;
    const int64_t work = 2 * longest * d * (heads / groups);
    torch::stable::parallel_for(0, texts * groups, std::max<int64_t>(1, 2 * kGrain / work), [&](int64_t begin, int64_t end) {
      numbers::next_pairs(p, begin, end);
    });
  };
  if (texts == 0 || groups == 0) return out;
  if (qkv.scalar_type() == ScalarType::Float) {
    run(float());
  } else if (qkv.scalar_type() == ScalarType::BFloat16) {
    run(BFloat16());
  } else {
    STD_TORCH_CHECK(qkv.scalar_type() == ScalarType::Double, op, ": qkv must be float32, bfloat16 or float64");
    run(double());
  }
  return out;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "next_token_attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor positions, int[] queries, int window, "
      "float scale, float softcap, float base, float[] frequencies, float magnitude, int features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("next_token_attention", TORCH_BOX(&next_token_attention));
}
