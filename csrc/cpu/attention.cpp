// softmax(q k^T / sqrt(d)) v without ever holding the s x s matrix: blocks of kQueries x kKeys scores stay in the
// first-level cache (arXiv 2205.14135), and the backward pass makes them again from the logarithm of the row sums.
//
// All arithmetic is in float (double for double), also for bfloat16. Keys and values of a head are first laid out as
// the products want them, padded with zeros to whole tiles: a cost of s d against the products' s^2 d. A head belongs
// to one thread, so gradients are summed in one order.

#include "philox.h"

namespace hybridpar {
namespace {

constexpr int64_t kQueries = 32, kKeys = 128;
constexpr int kTileRows = 4, kTileCols = 32;

HYBRIDPAR_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// c[r][w] = (add ? c[r][w] : 0) + sum over k of a[r * a_row + k * a_k] * b[k * b_k + w], accumulated in registers
template <bool add, class W>
HYBRIDPAR_INLINE void tile(const W* a, int64_t a_row, int64_t a_k, const W* b, int64_t b_k, W* c, int64_t c_row,
                           int64_t depth) {
  W sum[kTileRows][kTileCols];
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r)
#pragma omp simd
    for (int w = 0; w < kTileCols; ++w) sum[r][w] = add ? c[r * c_row + w] : W(0);
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      const W factor = a[r * a_row + k * a_k];
#pragma omp simd
      for (int w = 0; w < kTileCols; ++w) sum[r][w] = multiply_add(factor, b[k * b_k + w], sum[r][w]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r)
#pragma omp simd
    for (int w = 0; w < kTileCols; ++w) c[r * c_row + w] = sum[r][w];
}

// c [rows, cols] = or += a [rows, depth] b [depth, cols]; rows and cols are whole tiles
template <bool add, class W>
HYBRIDPAR_INLINE void product(const W* a, int64_t a_row, int64_t a_k, const W* b, int64_t b_k, W* c, int64_t c_row,
                              int64_t rows, int64_t cols, int64_t depth) {
  for (int64_t w = 0; w < cols; w += kTileCols)
    for (int64_t r = 0; r < rows; r += kTileRows)
      tile<add>(a + r * a_row, a_row, a_k, b + w, b_k, c + r * c_row + w, c_row, depth);
}

template <class T>
struct Strided {  // [samples, heads, positions, d], the last dimension without gaps
  T* at;
  int64_t sample, head, position;

  HYBRIDPAR_INLINE_MEMBER T* row(int64_t b, int64_t n, int64_t s) const {
    return at + b * sample + n * head + s * position;
  }
};

template <class T>
struct Problem {
  Strided<const T> q, k, v;
  const bool* real;  // [samples, s], or null: all keys are
  const int64_t* kv_head;  // of each query head
  int64_t samples, heads, kv_heads, s, d;
  Wide<T> scale;
  bool causal;
  Mask mask;  // dropout: element (sample, head * s + query, key)
  int64_t padded_s() const { return round_up(s, kKeys); }
  int64_t padded_d() const { return round_up(d, kTileCols); }
  // keys that a block of queries sees: none after its last one
  HYBRIDPAR_INLINE_MEMBER int64_t keys_seen(int64_t query) const {
    return causal ? std::min(s, query + kQueries) : s;
  }
};

// to [padded rows, padded_d] = from [count, d] * factor, zeros around
template <class T>
HYBRIDPAR_INLINE void load_rows(const Strided<const T>& from, int64_t b, int64_t n, int64_t first, int64_t count,
                                int64_t rows, int64_t d, int64_t padded_d, Wide<T> factor, Wide<T>* to) {
  for (int64_t i = 0; i < rows; ++i) {
    Wide<T>* row = to + i * padded_d;
    const int64_t size = i < count ? d : 0;
    if (size) {
      const T* source = from.row(b, n, first + i);
      each(size, [=](int64_t j, int) { row[j] = wide(source[j]) * factor; });
    }
    for (int64_t j = size; j < padded_d; ++j) row[j] = 0;
  }
}

// blocks of kKeys positions: to [block][padded_d][kKeys] = from [s, d] transposed, zeros around
template <class T>
HYBRIDPAR_INLINE void load_transposed(const Strided<const T>& from, int64_t b, int64_t n, int64_t s, int64_t padded_s,
                                      int64_t d, int64_t padded_d, Wide<T>* to) {
  for (int64_t block = 0; block < padded_s; block += kKeys) {
    Wide<T>* base = to + block * padded_d;
    for (int64_t j = 0; j < kKeys; ++j) {
      if (block + j < s) {
        const T* source = from.row(b, n, block + j);
        for (int64_t i = 0; i < d; ++i) base[i * kKeys + j] = wide(source[i]);
      } else {
        for (int64_t i = 0; i < d; ++i) base[i * kKeys + j] = 0;
      }
    }
    for (int64_t i = d * kKeys; i < padded_d * kKeys; ++i) base[i] = 0;
  }
}

// Sets the scores [kQueries, kKeys] that are not to be seen to -infinity.
template <class T>
HYBRIDPAR_INLINE void hide(const Problem<T>& p, int64_t b, int64_t query, int64_t key, Wide<T>* scores) {
  constexpr Wide<T> kHidden = -std::numeric_limits<Wide<T>>::infinity();
  const int64_t inside = std::min(kKeys, p.s - key);
  const bool* real = p.real ? p.real + b * p.s + key : nullptr;
  for (int64_t r = 0; r < kQueries; ++r) {
    Wide<T>* row = scores + r * kKeys;
    const int64_t seen = p.causal ? std::min(inside, query + r - key + 1) : inside;
    if (real)
      for (int64_t j = 0; j < inside; ++j) row[j] = real[j] ? row[j] : kHidden;
    for (int64_t j = std::max<int64_t>(0, seen); j < kKeys; ++j) row[j] = kHidden;
  }
}

// Which probabilities of the block dropout keeps: 1 / (1 - p) or 0.
template <class T>
HYBRIDPAR_INLINE void keep(const Problem<T>& p, int64_t b, int64_t n, int64_t query, int64_t key, Wide<T>* factors) {
  const int64_t inside = std::min(kKeys, p.s - key);
  const Wide<T> scale = static_cast<Wide<T>>(p.mask.scale);
  const uint32_t threshold = p.mask.threshold;
  for (int64_t r = 0; r < std::min(kQueries, p.s - query); ++r) {
    Wide<T>* row = factors + r * kKeys;
    Stream stream = p.mask.stream;
    stream.sample += static_cast<uint32_t>(b);
    const int64_t index = p.mask.start + (n * p.s + query + r) * p.s + key;
    blocks(stream, index, inside, [=](const uint32_t* words, int64_t at, int64_t size) {
      for (int64_t j = 0; j < size; ++j) row[at + j] = words[j] >= threshold ? scale : Wide<T>(0);
    });
  }
}

template <class W>
using Buffer = std::unique_ptr<W[]>;

template <class W>
Buffer<W> buffer(int64_t size) {
  return Buffer<W>(new W[static_cast<size_t>(size)]);
}

template <class T>
struct ForwardOut {
  Strided<T> out;
  Wide<T>* lse;  // [samples, heads, s]: log of the sum of exponentials; +infinity where nothing is seen
};

template <class T>
HYBRIDPAR_INLINE void forward_any(const Problem<T>& p, const ForwardOut<T>& o, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t ps = p.padded_s(), pd = p.padded_d();
  auto keys_t = buffer<W>(ps * pd), values = buffer<W>(ps * pd), queries = buffer<W>(kQueries * pd),
       sums = buffer<W>(kQueries * pd), scores = buffer<W>(kQueries * kKeys), kept = buffer<W>(kQueries * kKeys);
  W top[kQueries], total[kQueries];
  for (int64_t head = begin; head < end; ++head) {
    const int64_t b = head / p.heads, n = head % p.heads, g = p.kv_head[n];
    load_transposed(p.k, b, g, p.s, ps, p.d, pd, keys_t.get());
    load_rows(p.v, b, g, 0, p.s, ps, p.d, pd, W(1), values.get());
    for (int64_t query = 0; query < p.s; query += kQueries) {
      const int64_t count = std::min(kQueries, p.s - query);
      load_rows(p.q, b, n, query, count, kQueries, p.d, pd, p.scale, queries.get());
      std::fill_n(sums.get(), kQueries * pd, W(0));
      std::fill_n(top, kQueries, std::numeric_limits<W>::lowest());
      std::fill_n(total, kQueries, W(0));
      const int64_t seen = p.keys_seen(query);
      for (int64_t key = 0; key < seen; key += kKeys) {
        const int64_t width = std::min(kKeys, round_up(seen - key, kTileCols));
        product<false>(queries.get(), pd, 1, keys_t.get() + key * pd, kKeys, scores.get(), kKeys, kQueries, width, p.d);
        if (p.real || key + kKeys > p.s || (p.causal && key + kKeys > query)) hide(p, b, query, key, scores.get());
        if (p.mask.threshold) keep(p, b, n, query, key, kept.get());
        for (int64_t r = 0; r < count; ++r) {
          W* row = scores.get() + r * kKeys;
          W tops[kLanes];
          std::fill_n(tops, kLanes, top[r]);
          each(width, [&](int64_t j, int lane) { tops[lane] = row[j] > tops[lane] ? row[j] : tops[lane]; });
          const W new_top = max_lanes(tops), shrink = exponential(top[r] - new_top);
          W added[kLanes] = {};
          each(width, [&](int64_t j, int lane) {
            row[j] = exponential(row[j] - new_top);
            added[lane] += row[j];
          });
          total[r] = total[r] * shrink + sum_lanes(added);
          top[r] = new_top;
          if (p.mask.threshold) {
            const W* factors = kept.get() + r * kKeys;
            for (int64_t j = 0; j < std::min(width, p.s - key); ++j) row[j] *= factors[j];
          }
          if (shrink != W(1)) {
            W* sum = sums.get() + r * pd;
            each(pd, [=](int64_t j, int) { sum[j] *= shrink; });
          }
        }
        product<true>(scores.get(), kKeys, 1, values.get() + key * pd, pd, sums.get(), pd, round_up(count, kTileRows),
                      pd, width);
      }
      for (int64_t r = 0; r < count; ++r) {
        const W factor = total[r] == W(0) ? W(0) : W(1) / total[r];
        const W* sum = sums.get() + r * pd;
        T* to = o.out.row(b, n, query + r);
        each(p.d, [=](int64_t j, int) { to[j] = narrow<T>(sum[j] * factor); });
        o.lse[head * p.s + query + r] =
            total[r] == W(0) ? std::numeric_limits<W>::infinity() : top[r] + std::log(total[r]);
      }
    }
  }
}

template <class T>
struct BackwardOut {
  Strided<const T> out, dout;
  const Wide<T>* lse;
  Strided<T> dq, dk, dv;
};

// begin, end: pairs of a sample and a key and value head, with all query heads that it serves
template <class T>
HYBRIDPAR_INLINE void backward_any(const Problem<T>& p, const BackwardOut<T>& o, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t ps = p.padded_s(), pd = p.padded_d();
  auto keys_t = buffer<W>(ps * pd), values_t = buffer<W>(ps * pd), keys = buffer<W>(ps * pd), dkeys = buffer<W>(ps * pd),
       dvalues = buffer<W>(ps * pd), queries = buffer<W>(kQueries * pd), dout = buffer<W>(kQueries * pd),
       dqueries = buffer<W>(kQueries * pd), p_block = buffer<W>(kQueries * kKeys),
       ds_block = buffer<W>(kQueries * kKeys), kept = buffer<W>(kQueries * kKeys);
  W delta[kQueries];
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t b = pair / p.kv_heads, g = pair % p.kv_heads;
    load_transposed(p.k, b, g, p.s, ps, p.d, pd, keys_t.get());
    load_transposed(p.v, b, g, p.s, ps, p.d, pd, values_t.get());
    load_rows(p.k, b, g, 0, p.s, ps, p.d, pd, W(1), keys.get());
    std::fill_n(dkeys.get(), ps * pd, W(0));
    std::fill_n(dvalues.get(), ps * pd, W(0));
    for (int64_t n = 0; n < p.heads; ++n) {
      if (p.kv_head[n] != g) continue;
      for (int64_t query = 0; query < p.s; query += kQueries) {
        const int64_t count = std::min(kQueries, p.s - query);
        load_rows(p.q, b, n, query, count, kQueries, p.d, pd, p.scale, queries.get());
        load_rows(o.dout, b, n, query, count, kQueries, p.d, pd, W(1), dout.get());
        std::fill_n(dqueries.get(), kQueries * pd, W(0));
        for (int64_t r = 0; r < count; ++r) {
          const T* out = o.out.row(b, n, query + r);
          const W* grad = dout.get() + r * pd;
          W lanes[kLanes] = {};
          each(p.d, [&](int64_t j, int lane) { lanes[lane] = multiply_add(wide(out[j]), grad[j], lanes[lane]); });
          delta[r] = sum_lanes(lanes);
        }
        const int64_t seen = p.keys_seen(query);
        for (int64_t key = 0; key < seen; key += kKeys) {
          const int64_t width = std::min(kKeys, round_up(seen - key, kTileCols));
          product<false>(queries.get(), pd, 1, keys_t.get() + key * pd, kKeys, p_block.get(), kKeys, kQueries, width,
                         p.d);
          product<false>(dout.get(), pd, 1, values_t.get() + key * pd, kKeys, ds_block.get(), kKeys, kQueries, width,
                         p.d);
          if (p.real || key + kKeys > p.s || (p.causal && key + kKeys > query)) hide(p, b, query, key, p_block.get());
          if (p.mask.threshold) keep(p, b, n, query, key, kept.get());
          for (int64_t r = 0; r < kQueries; ++r) {
            W *row = p_block.get() + r * kKeys, *ds = ds_block.get() + r * kKeys;
            if (r >= count) {
              each(width, [=](int64_t j, int) { row[j] = ds[j] = 0; });
              continue;
            }
            const W lse = o.lse[(b * p.heads + n) * p.s + query + r], level = delta[r];
            if (p.mask.threshold) {
              const W* factors = kept.get() + r * kKeys;
              const int64_t inside = std::min(width, p.s - key);
              for (int64_t j = 0; j < inside; ++j) {
                const W probability = exponential(row[j] - lse);
                ds[j] = probability * (ds[j] * factors[j] - level);
                row[j] = probability * factors[j];
              }
              for (int64_t j = inside; j < width; ++j) row[j] = ds[j] = 0;
            } else {
              each(width, [=](int64_t j, int) {
                const W probability = exponential(row[j] - lse);
                ds[j] = probability * (ds[j] - level);
                row[j] = probability;
              });
            }
          }
          product<true>(ds_block.get(), kKeys, 1, keys.get() + key * pd, pd, dqueries.get(), pd,
                        round_up(count, kTileRows), pd, width);
          product<true>(ds_block.get(), 1, kKeys, queries.get(), pd, dkeys.get() + key * pd, pd, width, pd, kQueries);
          product<true>(p_block.get(), 1, kKeys, dout.get(), pd, dvalues.get() + key * pd, pd, width, pd, kQueries);
        }
        for (int64_t r = 0; r < count; ++r) {
          const W* from = dqueries.get() + r * pd;
          const W scale = p.scale;
          T* to = o.dq.row(b, n, query + r);
          each(p.d, [=](int64_t j, int) { to[j] = narrow<T>(from[j] * scale); });
        }
      }
    }
    for (int64_t s = 0; s < p.s; ++s) {
      const W *dk = dkeys.get() + s * pd, *dv = dvalues.get() + s * pd;
      T *to_k = o.dk.row(b, g, s), *to_v = o.dv.row(b, g, s);
      each(p.d, [=](int64_t j, int) {
        to_k[j] = narrow<T>(dk[j]);  // the queries were scaled already
        to_v[j] = narrow<T>(dv[j]);
      });
    }
  }
}

#define HYBRIDPAR_ATTENTION(T)                                                                                      \
  HYBRIDPAR_CLONES void forward_heads(const Problem<T>& p, const ForwardOut<T>& o, int64_t begin, int64_t end) {    \
    forward_any(p, o, begin, end);                                                                                  \
  }                                                                                                                 \
  HYBRIDPAR_CLONES void backward_heads(const Problem<T>& p, const BackwardOut<T>& o, int64_t begin, int64_t end) {  \
    backward_any(p, o, begin, end);                                                                                 \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_ATTENTION)

template <class T>
Strided<T> strided(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && (x.size(3) <= 1 || x.stride(3) == 1), op,
                  ": needs [samples, heads, positions, d] without gaps in d");
  return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// [samples, positions, heads, d] seen as [samples, heads, positions, d]
template <class T>
Strided<T> by_position(const Tensor& x) {
  return {static_cast<T*>(x.data_ptr()), x.stride(0), x.stride(2), x.stride(1)};
}

template <class T>
Problem<T> problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const std::optional<Tensor>& real, const std::vector<int64_t>& kv_head, double scale, bool causal,
                   int64_t key0, int64_t key1, int64_t step, int64_t sample, int64_t threshold, double keep_scale,
                   int64_t start) {
  const int64_t heads = q.size(1), s = q.size(2);
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
                  ": q, k and v must be of one type");
  STD_TORCH_CHECK(static_cast<int64_t>(kv_head.size()) == heads, op, ": kv_head needs an entry for each query head");
  for (int64_t g : kv_head) STD_TORCH_CHECK(g >= 0 && g < k.size(1), op, ": kv_head names a head that is not there");
  STD_TORCH_CHECK(!real || (real->is_contiguous() && real->numel() == q.size(0) * s), op,
                  ": the padding mask must be [samples, positions]");
  const Mask mask{make_stream(key0, key1, step, sample), 1, s, start, static_cast<uint32_t>(threshold),
                  keep_scale};
  return {strided<const T>(op, q), strided<const T>(op, k), strided<const T>(op, v), data<bool>(real), kv_head.data(),
          q.size(0), heads, k.size(1), s, q.size(3), static_cast<Wide<T>>(scale), causal, mask};
}

// out [samples, positions, heads, d], lse [samples, heads, positions]
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const std::optional<Tensor>& real, const std::vector<int64_t>& kv_head,
                                     double scale, bool causal, int64_t key0, int64_t key1, int64_t step,
                                     int64_t sample, int64_t threshold, double keep_scale, int64_t start) {
  Tensor out = make({q.size(0), q.size(2), q.size(1), q.size(3)}, q.scalar_type());
  Tensor lse = make({q.size(0), q.size(1), q.size(2)}, wide_type(q));
  by_type("attention", q, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>("attention", q, k, v, real, kv_head, scale, causal, key0, key1, step, sample, threshold,
                              keep_scale, start);
    const ForwardOut<T> o{by_position<T>(out), data<Wide<T>>(lse)};
    torch::stable::parallel_for(0, p.samples * p.heads, 1,
                                [&](int64_t begin, int64_t end) { forward_heads(p, o, begin, end); });
  });
  return {out, lse};
}

// dq like out, dk and dv [samples, positions, kv heads, d]
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& real, const std::vector<int64_t>& kv_head, double scale, bool causal, int64_t key0,
    int64_t key1, int64_t step, int64_t sample, int64_t threshold, double keep_scale, int64_t start) {
  Tensor dq = make_like(out);
  Tensor dk = make({k.size(0), k.size(2), k.size(1), k.size(3)}, k.scalar_type());
  Tensor dv = make_like(dk);
  by_type("attention_backward", q, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>("attention_backward", q, k, v, real, kv_head, scale, causal, key0, key1, step, sample,
                              threshold, keep_scale, start);
    const BackwardOut<T> o{by_position<const T>(out), strided<const T>("attention_backward", dout),
                           data<Wide<T>>(lse), by_position<T>(dq), by_position<T>(dk), by_position<T>(dv)};
    torch::stable::parallel_for(0, p.samples * p.kv_heads, 1,
                                [&](int64_t begin, int64_t end) { backward_heads(p, o, begin, end); });
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? real, int[] kv_head, float scale, bool causal, int key0, int "
      "key1, SymInt step, SymInt sample, int threshold, float keep_scale, SymInt start) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? real, int[] "
      "kv_head, float scale, bool causal, int key0, int key1, SymInt step, SymInt sample, int threshold, float "
      "keep_scale, SymInt start) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
}
