// Scaled dot-product attention (attention.h), with products in float (double for double), also of bfloat16 where the CPU's are
// not faster.

#include "attention.h"

namespace hybridpar {
namespace {

template <class T>
struct Plain {
  using Element = Wide<T>;
  using W = Wide<T>;
  static constexpr int64_t kDeep = 1;
  static constexpr int kTileRows = 4;

  HYBRIDPAR_INLINE_MEMBER static void left(const Strided<const T>& from, int64_t b, int64_t n, int64_t first, int64_t count,
                                           int64_t rows, int64_t d, int64_t padded_d, W* to) {
    for (int64_t i = 0; i < rows; ++i) {
      W* row = to + i * padded_d;
      const int64_t size = i < count ? d : 0;
      if (size) {
        const T* source = from.row(b, n, first + i);
        each(size, [=](int64_t j, int) { row[j] = wide(source[j]); });
      }
      for (int64_t j = size; j < padded_d; ++j) row[j] = 0;
    }
  }
  HYBRIDPAR_INLINE_MEMBER static const W* right(const W* left, int64_t, int64_t, W*) { return left; }
  HYBRIDPAR_INLINE_MEMBER static const W* left_block(const W* block, int64_t, int64_t, W*) { return block; }
  HYBRIDPAR_INLINE_MEMBER static const W* turned_block(const W* block, int64_t, int64_t, W*) { return block; }
  HYBRIDPAR_INLINE_MEMBER static W word(const T* row, int64_t i, int64_t) { return wide(row[i]); }

  // accumulated in registers
  template <bool add>
  HYBRIDPAR_INLINE_MEMBER static void tile(const W* a, int64_t a_row, int64_t a_k, const W* b, int64_t b_k, W* c,
                                           int64_t c_row, int64_t depth, W scale) {
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
      for (int w = 0; w < kTileCols; ++w) c[r * c_row + w] = add ? sum[r][w] : sum[r][w] * scale;
  }

  template <bool add>
  HYBRIDPAR_INLINE_MEMBER static void product(const W* a, int64_t a_row, int64_t a_k, const W* b, int64_t b_k, W* c,
                                              int64_t c_row, int64_t rows, int64_t cols, int64_t depth, W scale) {
    for (int64_t w = 0; w < cols; w += kTileCols)
      for (int64_t r = 0; r < rows; r += kTileRows)
        tile<add>(a + r * a_row, a_row, a_k, b + w, b_k, c + r * c_row + w, c_row, depth, scale);
  }
};

}  // namespace

namespace numbers {
namespace {
#define HYBRIDPAR_ATTENTION(T)                                                                                      \
  HYBRIDPAR_CLONES void forward_heads(const Problem<T>& p, const ForwardOut<T>& o, int64_t begin, int64_t end) {    \
    forward_any<Plain<T>>(p, o, begin, end);                                                                                  \
  }                                                                                                                 \
  HYBRIDPAR_CLONES void backward_heads(const Problem<T>& p, const BackwardOut<T>& o, int64_t begin, int64_t end) {  \
    backward_any<Plain<T>>(p, o, begin, end);                                                                                 \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_ATTENTION)
}  // namespace
}  // namespace numbers

namespace {

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

bool holds(const Optional& x, ScalarType type, int64_t size) {
  return !x || (x->scalar_type() == type && x->is_contiguous() && x->numel() == size);
}

template <class T>
Problem<T> problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Optional& real, const Optional& first, const Optional& position,
                   const std::vector<int64_t>& kv_head, double scale, double softcap, bool causal,
                   int64_t window, int64_t key0, int64_t key1, const Optional& counter, int64_t threshold,
                   double keep_scale, int64_t start, const Optional& mask_row, int64_t mask_keys) {
  const int64_t samples = q.size(0), heads = q.size(1), queries = q.size(2), s = k.size(2);
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
                  ": q, k and v must be of one type");
  STD_TORCH_CHECK(static_cast<int64_t>(kv_head.size()) == heads, op, ": kv_head needs an entry for each query head");
  for (int64_t g : kv_head) STD_TORCH_CHECK(g >= 0 && g < k.size(1), op, ": kv_head names a head that is not there");
  STD_TORCH_CHECK(position || queries <= s, op, ": needs a key for each query at least, or positions");
  STD_TORCH_CHECK(holds(real, ScalarType::Bool, samples * s), op, ": the padding mask must be bool [samples, keys]");
  STD_TORCH_CHECK(holds(first, ScalarType::Int, samples * queries), op, ": first must be int32 [samples, queries]");
  STD_TORCH_CHECK(holds(position, ScalarType::Int, queries), op, ": position must be int32 [queries]");
  STD_TORCH_CHECK(holds(mask_row, ScalarType::Int, queries), op, ": mask_row must be int32 [queries]");
  STD_TORCH_CHECK(!mask_row == (mask_keys == 0), op, ": mask_row and mask_keys go together");
  STD_TORCH_CHECK(causal || (!first && !position && window == 0), op,
                  ": first keys, positions and windows are of causal attention");
  const Mask mask{dropout_stream(op, key0, key1, counter, threshold, samples), 1, s, start,
                  static_cast<uint32_t>(threshold), keep_scale};
  return {strided<const T>(op, q), strided<const T>(op, k), strided<const T>(op, v), data<bool>(real),
          data<int32_t>(first), data<int32_t>(position), kv_head.data(), samples, heads, k.size(1), queries, s, q.size(3),
          static_cast<Wide<T>>(scale), causal, static_cast<Wide<T>>(softcap), window, mask, data<int32_t>(mask_row),
          mask_keys ? mask_keys : s};
}

// out [samples, queries, heads, d], lse [samples, heads, queries]. If the keys are a block of a sample's, dropout's mask has
// the rows mask_row and mask_keys columns
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Optional& real, const Optional& first, const Optional& position,
                                     const std::vector<int64_t>& kv_head, double scale, double softcap, bool causal,
                                     int64_t window, int64_t key0, int64_t key1, const Optional& counter,
                                     int64_t threshold, double keep_scale, int64_t start, const Optional& mask_row,
                                     int64_t mask_keys) {
  Tensor out = make({q.size(0), q.size(2), q.size(1), q.size(3)}, q.scalar_type());
  Tensor lse = make({q.size(0), q.size(1), q.size(2)}, wide_type(q));
  by_type("attention", q, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>("attention", q, k, v, real, first, position, kv_head, scale, softcap, causal, window,
                              key0, key1, counter, threshold, keep_scale, start, mask_row, mask_keys);
    const ForwardOut<T> o{by_position<T>(out), data<Wide<T>>(lse)};
    torch::stable::parallel_for(0, p.samples * p.heads, 1, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_fast_bfloat16(), T, forward_heads, p, o, begin, end);
    });
  });
  return {out, lse};
}

// dq like out, dk and dv [samples, keys, kv heads, d]
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Optional& real, const Optional& first, const Optional& position, const std::vector<int64_t>& kv_head,
    double scale, double softcap, bool causal, int64_t window, int64_t key0, int64_t key1, const Optional& counter,
    int64_t threshold, double keep_scale, int64_t start, const Optional& mask_row, int64_t mask_keys) {
  Tensor dq = make_like(out);
  Tensor dk = make({k.size(0), k.size(2), k.size(1), k.size(3)}, k.scalar_type());
  Tensor dv = make_like(dk);
  by_type("attention_backward", q, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>("attention_backward", q, k, v, real, first, position, kv_head, scale, softcap, causal,
                              window, key0, key1, counter, threshold, keep_scale, start, mask_row, mask_keys);
    const BackwardOut<T> o{by_position<const T>(out), strided<const T>("attention_backward", dout),
                           data<Wide<T>>(lse), by_position<T>(dq), by_position<T>(dk), by_position<T>(dv)};
    torch::stable::parallel_for(0, p.samples * p.kv_heads, 1, [&](int64_t begin, int64_t end) {
      HYBRIDPAR_RUN(has_fast_bfloat16(), T, backward_heads, p, o, begin, end);
    });
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? real, Tensor? first, Tensor? position, int[] kv_head, float "
      "scale, float softcap, bool causal, int window, int key0, int key1, Tensor? counter, int threshold, float "
      "keep_scale, SymInt start, Tensor? mask_row=None, SymInt mask_keys=0) -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? real, "
      "Tensor? first, Tensor? position, int[] kv_head, float scale, float softcap, bool causal, int window, int key0, "
      "int key1, Tensor? counter, int threshold, float keep_scale, SymInt start, Tensor? mask_row=None, SymInt "
      "mask_keys=0) -> (Tensor, Tensor, Tensor)");
  library.def(  // of Hopper GPUs alone (csrc/cuda)
      "attention_hopper(Tensor q, Tensor k, Tensor v, int[] kv_head, float scale, bool causal) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
}
