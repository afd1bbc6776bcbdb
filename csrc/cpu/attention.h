// softmax(q k^T / sqrt(d)) v without ever holding the s x s matrix: blocks of kQueries x kKeys scores stay in the
// first-level cache (arXiv 2205.14135), and the backward pass makes them again from the logarithm of the row sums.
//
// Sums and the softmax are in float (double for double). Keys and values of a head are first laid out as the products
// want them, padded with zeros to whole tiles: a cost of s d against the products' s^2 d. A head belongs to one thread, so
// gradients are summed in one order.
//
// M says how factors lie in memory and multiplies them. Of a factor's rows or columns M::kDeep neighbours along the depth
// share an element, for CPUs whose instructions multiply so:
//
//     M::left(from, ..., to)             [rows][padded_d / kDeep], from rows of a Strided, zeros around
//     M::right(left, rows, ...)          the same numbers, for the other side: [rows / kDeep][padded_d]
//     M::left_block(block, ...)          a block [kQueries][kKeys] of float as [kQueries][kKeys / kDeep]
//     M::turned_block(block, ...)        it turned, for the left: element (key, query) at [query / kDeep][key]
//     M::word(row, i, d)                 element i of a row of a Strided
//     M::product<add>(...)               c [rows, cols] += a b, or = scale a b; whole tiles, kTileRows x kTileCols
//
// What need not be laid out anew is returned as it is.
#pragma once

#include "philox.h"

namespace hybridpar {

constexpr int64_t kQueries = 32, kKeys = 128;
constexpr int kTileCols = 32;

HYBRIDPAR_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
  const int32_t* first;  // [samples, queries], the first key that each query may see, or null: key 0
  const int32_t* position;  // [queries], or null: the queries have the last positions
  const int64_t* kv_head;  // of each query head
  int64_t samples, heads, kv_heads, queries, s, d;  // s keys
  Wide<T> scale;
  bool causal;
  Wide<T> softcap;  // scores become softcap * tanh(score / softcap); 0: they do not
  int64_t window;  // a query sees so many keys at most, its own included; 0: all
  Mask mask;  // dropout: element (sample, head * mask_keys + mask_row, key)
  const int32_t* mask_row;  // [queries], or null: their positions
  int64_t mask_keys;
  int64_t padded_s() const { return round_up(s, kKeys); }
  int64_t padded_d() const { return round_up(d, kTileCols); }
  HYBRIDPAR_INLINE_MEMBER int64_t position_of(int64_t query) const {
    return position ? position[query] : query + s - queries;
  }
};

// The keys that a block of queries sees. Query r sees those of first[r] <= key < stop[r] that are real, so none of the
// block sees a key outside begin <= key < end, and each sees all real ones of all_begin <= key < all_end.
struct Seen {
  int64_t first[kQueries], stop[kQueries];
  int64_t begin, end, all_begin, all_end;
};

template <class T>
HYBRIDPAR_INLINE void see(const Problem<T>& p, int64_t b, int64_t query, int64_t count, Seen& seen) {
  seen.begin = seen.all_end = p.s;
  seen.end = seen.all_begin = 0;
  for (int64_t r = 0; r < kQueries; ++r) {
    if (r >= count) {  // no query: sees nothing
      seen.first[r] = seen.stop[r] = 0;
      continue;
    }
    const int64_t position = p.position_of(query + r);
    int64_t first = p.first ? p.first[b * p.queries + query + r] : 0;
    if (p.window) first = std::max(first, position - p.window + 1);
    seen.first[r] = std::max<int64_t>(first, 0);
    seen.stop[r] = p.causal ? std::min(p.s, position + 1) : p.s;
    seen.begin = std::min(seen.begin, seen.first[r]);
    seen.all_begin = std::max(seen.all_begin, seen.first[r]);
    seen.end = std::max(seen.end, seen.stop[r]);
    seen.all_end = std::min(seen.all_end, seen.stop[r]);
  }
  seen.begin = seen.begin / kTileCols * kTileCols;
}

// A block of keys: from `key` to the next multiple of kKeys, where the factors' layout begins anew. Products have `width`
// columns, whole tiles.
struct KeyBlock {
  int64_t key, size, width;
  HYBRIDPAR_INLINE_MEMBER KeyBlock(int64_t key, int64_t end)
      : key(key), size(kKeys - key % kKeys), width(std::min(size, round_up(end - key, kTileCols))) {}
  HYBRIDPAR_INLINE_MEMBER int64_t next() const { return key + size; }
  // of its first key in what load_transposed lays out
  HYBRIDPAR_INLINE_MEMBER int64_t transposed_at(int64_t padded) const {
    return (key - key % kKeys) * padded + key % kKeys;
  }
};

template <class W>
using Buffer = std::unique_ptr<W[]>;

template <class W>
Buffer<W> buffer(int64_t size) {
  return Buffer<W>(new W[static_cast<size_t>(size)]);
}

// blocks of kKeys positions: to [block][padded_d / kDeep][kKeys] = from [s, d] transposed, zeros around
template <class M, class T>
HYBRIDPAR_INLINE void load_transposed(const Strided<const T>& from, int64_t b, int64_t n, int64_t s, int64_t padded_s,
                                      int64_t d, int64_t padded_d, typename M::Element* to) {
  const int64_t depth = (d + M::kDeep - 1) / M::kDeep, padded = padded_d / M::kDeep;
  for (int64_t block = 0; block < padded_s; block += kKeys) {
    auto* base = to + block * padded;
    for (int64_t j = 0; j < kKeys; ++j) {
      if (block + j < s) {
        const T* source = from.row(b, n, block + j);
        for (int64_t i = 0; i < depth; ++i) base[i * kKeys + j] = M::word(source, i, d);
      } else {
        for (int64_t i = 0; i < depth; ++i) base[i * kKeys + j] = 0;
      }
    }
    for (int64_t i = depth * kKeys; i < padded * kKeys; ++i) base[i] = 0;
  }
}

// to [padded_s / kDeep][padded_d] = from [s, d] for the right side, zeros around
template <class M, class T>
HYBRIDPAR_INLINE void load_right(const Strided<const T>& from, int64_t b, int64_t n, int64_t s, int64_t padded_s, int64_t d,
                                 int64_t padded_d, typename M::Element* to) {
  if constexpr (M::kDeep == 1) return M::left(from, b, n, 0, s, padded_s, d, padded_d, to);
  auto rows = buffer<typename M::Element>(kKeys * padded_d / M::kDeep);
  for (int64_t block = 0; block < padded_s; block += kKeys) {
    M::left(from, b, n, block, std::min(kKeys, s - block), kKeys, d, padded_d, rows.get());
    M::right(rows.get(), kKeys, padded_d, to + block * padded_d / M::kDeep);
  }
}

// Sets the scores [kQueries, kKeys] that are not to be seen to -infinity.
template <class T>
HYBRIDPAR_INLINE void hide(const Problem<T>& p, int64_t b, const Seen& seen, const KeyBlock& block, Wide<T>* scores) {
  if (!p.real && block.key >= seen.all_begin && block.next() <= seen.all_end) return;
  constexpr Wide<T> kHidden = -std::numeric_limits<Wide<T>>::infinity();
  const int64_t inside = std::min(block.size, p.s - block.key);
  const bool* real = p.real ? p.real + b * p.s + block.key : nullptr;
  for (int64_t r = 0; r < kQueries; ++r) {
    Wide<T>* row = scores + r * kKeys;
    if (real)
      for (int64_t j = 0; j < inside; ++j) row[j] = real[j] ? row[j] : kHidden;
    const int64_t first = std::min(block.size, seen.first[r] - block.key), stop = seen.stop[r] - block.key;
    for (int64_t j = 0; j < first; ++j) row[j] = kHidden;
    for (int64_t j = std::max<int64_t>(0, stop); j < block.size; ++j) row[j] = kHidden;
  }
}

// Caps `rows` rows of scores [kQueries, kKeys].
template <class T>
HYBRIDPAR_INLINE void cap(const Problem<T>& p, int64_t rows, int64_t width, Wide<T>* scores) {
  using W = Wide<T>;
  const W softcap = p.softcap, turns = W(2) / softcap;
  for (int64_t r = 0; r < rows; ++r) {
    W* row = scores + r * kKeys;
    each(width, [=](int64_t j, int) {
      const auto half = sigmoid(row[j] * turns);  // tanh(x) = sigmoid(2 x) - sigmoid(-2 x)
      row[j] = softcap * (half.value - half.rest);
    });
  }
}

// Which probabilities of the block dropout keeps: 1 / (1 - p) or 0.
template <class T>
HYBRIDPAR_INLINE void keep(const Problem<T>& p, int64_t b, int64_t n, int64_t query, const KeyBlock& block,
                           Wide<T>* factors) {
  const int64_t inside = std::min(block.size, p.s - block.key);
  const Wide<T> scale = static_cast<Wide<T>>(p.mask.scale);
  const uint32_t threshold = p.mask.threshold;
  for (int64_t r = 0; r < std::min(kQueries, p.queries - query); ++r) {
    Wide<T>* row = factors + r * kKeys;
    Stream stream = p.mask.stream;
    stream.sample += static_cast<uint32_t>(b);
    const int64_t mask_row = p.mask_row ? p.mask_row[query + r] : p.position_of(query + r);
    const int64_t index = p.mask.start + (n * p.mask_keys + mask_row) * p.mask_keys + block.key;
    blocks(stream, index, inside, [=](const uint32_t* words, int64_t at, int64_t size) {
      for (int64_t j = 0; j < size; ++j) row[at + j] = words[j] >= threshold ? scale : Wide<T>(0);
    });
  }
}

template <class T>
struct ForwardOut {
  Strided<T> out;
  Wide<T>* lse;  // [samples, heads, queries]: log of the sum of exponentials; +infinity where nothing is seen
};

// M: Plain<T> or Pairs
template <class M, class T>
HYBRIDPAR_INLINE void forward_any(const Problem<T>& p, const ForwardOut<T>& o, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t ps = p.padded_s(), pd = p.padded_d();
  constexpr int64_t kDeep = M::kDeep;
  using E = typename M::Element;
  auto keys_t = buffer<E>(ps * pd / kDeep), values = buffer<E>(ps * pd / kDeep),
       queries = buffer<E>(kQueries * pd / kDeep), weights = buffer<E>(kQueries * kKeys / kDeep);
  auto sums = buffer<W>(kQueries * pd), scores = buffer<W>(kQueries * kKeys), kept = buffer<W>(kQueries * kKeys);
  W top[kQueries], total[kQueries];
  Seen seen;
  const int64_t depth = (p.d + kDeep - 1) / kDeep;
  for (int64_t head = begin; head < end; ++head) {
    const int64_t b = head / p.heads, n = head % p.heads, g = p.kv_head[n];
    load_transposed<M>(p.k, b, g, p.s, ps, p.d, pd, keys_t.get());
    load_right<M>(p.v, b, g, p.s, ps, p.d, pd, values.get());
    for (int64_t query = 0; query < p.queries; query += kQueries) {
      const int64_t count = std::min(kQueries, p.queries - query);
      M::left(p.q, b, n, query, count, kQueries, p.d, pd, queries.get());
      std::fill_n(sums.get(), kQueries * pd, W(0));
      std::fill_n(top, kQueries, std::numeric_limits<W>::lowest());
      std::fill_n(total, kQueries, W(0));
      const int64_t rows = round_up(count, M::kTileRows);
      see(p, b, query, count, seen);
      for (int64_t key = seen.begin; key < seen.end;) {
        const KeyBlock block(key, seen.end);
        const int64_t width = block.width;
        M::template product<false>(queries.get(), pd / kDeep, 1, keys_t.get() + block.transposed_at(pd / kDeep), kKeys,
                                   scores.get(), kKeys, kQueries, width, depth, p.scale);
        if (p.softcap) cap(p, count, width, scores.get());
        hide(p, b, seen, block, scores.get());
        if (p.mask.threshold) keep(p, b, n, query, block, kept.get());
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
        const E* left = M::left_block(scores.get(), rows, width, weights.get());
        M::template product<true>(left, kKeys / kDeep, 1, values.get() + key * pd / kDeep, pd, sums.get(), pd, rows, pd,
                                  width / kDeep, W(1));
        key = block.next();
      }
      for (int64_t r = 0; r < count; ++r) {
        const W factor = total[r] == W(0) ? W(0) : W(1) / total[r];
        const W* sum = sums.get() + r * pd;
        T* to = o.out.row(b, n, query + r);
        each(p.d, [=](int64_t j, int) { to[j] = narrow<T>(sum[j] * factor); });
        o.lse[head * p.queries + query + r] =
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
template <class M, class T>
HYBRIDPAR_INLINE void backward_any(const Problem<T>& p, const BackwardOut<T>& o, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t ps = p.padded_s(), pd = p.padded_d();
  constexpr int64_t kDeep = M::kDeep;
  using E = typename M::Element;
  auto keys_t = buffer<E>(ps * pd / kDeep), values_t = buffer<E>(ps * pd / kDeep), keys = buffer<E>(ps * pd / kDeep),
       queries = buffer<E>(kQueries * pd / kDeep), dout = buffer<E>(kQueries * pd / kDeep),
       right_queries = buffer<E>(kQueries * pd / kDeep), right_dout = buffer<E>(kQueries * pd / kDeep),
       left = buffer<E>(kQueries * kKeys / kDeep);
  auto dkeys = buffer<W>(ps * pd), dvalues = buffer<W>(ps * pd), dqueries = buffer<W>(kQueries * pd),
       p_block = buffer<W>(kQueries * kKeys), ds_block = buffer<W>(kQueries * kKeys), kept = buffer<W>(kQueries * kKeys),
       slopes = buffer<W>(kKeys);
  W delta[kQueries];
  Seen seen;
  const int64_t depth = (p.d + kDeep - 1) / kDeep;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t b = pair / p.kv_heads, g = pair % p.kv_heads;
    load_transposed<M>(p.k, b, g, p.s, ps, p.d, pd, keys_t.get());
    load_transposed<M>(p.v, b, g, p.s, ps, p.d, pd, values_t.get());
    load_right<M>(p.k, b, g, p.s, ps, p.d, pd, keys.get());
    std::fill_n(dkeys.get(), ps * pd, W(0));
    std::fill_n(dvalues.get(), ps * pd, W(0));
    for (int64_t n = 0; n < p.heads; ++n) {
      if (p.kv_head[n] != g) continue;
      for (int64_t query = 0; query < p.queries; query += kQueries) {
        const int64_t count = std::min(kQueries, p.queries - query);
        M::left(p.q, b, n, query, count, kQueries, p.d, pd, queries.get());
        M::left(o.dout, b, n, query, count, kQueries, p.d, pd, dout.get());
        const E* queries_right = M::right(queries.get(), kQueries, pd, right_queries.get());
        const E* dout_right = M::right(dout.get(), kQueries, pd, right_dout.get());
        std::fill_n(dqueries.get(), kQueries * pd, W(0));
        for (int64_t r = 0; r < count; ++r) {
          const T *out = o.out.row(b, n, query + r), *grad = o.dout.row(b, n, query + r);
          W lanes[kLanes] = {};
          each(p.d, [&](int64_t j, int lane) { lanes[lane] = multiply_add(wide(out[j]), wide(grad[j]), lanes[lane]); });
          delta[r] = sum_lanes(lanes);
        }
        const int64_t rows = round_up(count, M::kTileRows);
        see(p, b, query, count, seen);
        for (int64_t key = seen.begin; key < seen.end;) {
          const KeyBlock block(key, seen.end);
          const int64_t width = block.width, at = block.transposed_at(pd / kDeep);
          M::template product<false>(queries.get(), pd / kDeep, 1, keys_t.get() + at, kKeys, p_block.get(), kKeys,
                                     kQueries, width, depth, p.scale);
          M::template product<false>(dout.get(), pd / kDeep, 1, values_t.get() + at, kKeys, ds_block.get(), kKeys,
                                     kQueries, width, depth, W(1));
          if (p.softcap) cap(p, count, width, p_block.get());
          hide(p, b, seen, block, p_block.get());
          if (p.mask.threshold) keep(p, b, n, query, block, kept.get());
          for (int64_t r = 0; r < kQueries; ++r) {
            W *row = p_block.get() + r * kKeys, *ds = ds_block.get() + r * kKeys;
            if (r >= count) {
              each(width, [=](int64_t j, int) { row[j] = ds[j] = 0; });
              continue;
            }
            const W lse = o.lse[(b * p.heads + n) * p.queries + query + r], level = delta[r];
            if (p.softcap) {  // the derivative of the cap, 0 where a key is hidden
              const W softcap = p.softcap;
              W* slope = slopes.get();
              each(width, [=](int64_t j, int) {
                const W share = at_least(row[j], -softcap) / softcap;
                slope[j] = W(1) - share * share;
              });
            }
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
            if (p.softcap) {
              const W* slope = slopes.get();
              each(width, [=](int64_t j, int) { ds[j] *= slope[j]; });
            }
          }
          const E* ds = M::left_block(ds_block.get(), rows, width, left.get());
          M::template product<true>(ds, kKeys / kDeep, 1, keys.get() + key * pd / kDeep, pd, dqueries.get(), pd, rows, pd,
                                    width / kDeep, W(1));
          ds = M::turned_block(ds_block.get(), kQueries, width, left.get());
          M::template product<true>(ds, 1, kKeys, queries_right, pd, dkeys.get() + key * pd, pd, width, pd,
                                    kQueries / kDeep, W(1));
          const E* weights = M::turned_block(p_block.get(), kQueries, width, left.get());
          M::template product<true>(weights, 1, kKeys, dout_right, pd, dvalues.get() + key * pd, pd, width, pd,
                                    kQueries / kDeep, W(1));
          key = block.next();
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
      const W scale = p.scale;
      each(p.d, [=](int64_t j, int) {
        to_k[j] = narrow<T>(dk[j] * scale);
        to_v[j] = narrow<T>(dv[j]);
      });
    }
  }
}

namespace vectors {  // in attention_pairs.cpp
void forward_heads(const Problem<BFloat16>& p, const ForwardOut<BFloat16>& o, int64_t begin, int64_t end);
void backward_heads(const Problem<BFloat16>& p, const BackwardOut<BFloat16>& o, int64_t begin, int64_t end);
}  // namespace vectors

}  // namespace hybridpar
