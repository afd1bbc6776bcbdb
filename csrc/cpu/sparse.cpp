// The elements of a tensor that are far from zero: which they are, packed into a message, and added to a tensor.
//
// Sizes are compared as integers, of the bits without the sign: NaN is larger than all numbers, so it is never left out. All passes go
// by pieces of the tensor, and where a piece writes follows from counts alone: threads change no bit.
//
// A message of `count` of n elements has their values in order, and where they are, in the form that takes fewer bytes:
//   count = n                                      nothing
//   ceil(n / 8) <= ceil(n / 255) + count           a bit for each element, the first one lowest in its byte
//   else                                           a byte for each 255 elements, how many of them there are; then a byte for each
//                                                  value, its place among these 255

#include "rows.h"

namespace hybridpar {
namespace {

constexpr int64_t kBlock = 255;
constexpr int64_t kPiece = 255 * 256;  // whole blocks and whole bytes

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
HYBRIDPAR_INLINE Bits<T> size_of(T x) {
  Bits<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & (~Bits<T>(0) >> 1);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool by_bits(int64_t n, int64_t count) { return ceil_div(n, 8) <= ceil_div(n, kBlock) + count; }
int64_t place_bytes(int64_t n, int64_t count) {
  return count == n ? 0 : by_bits(n, count) ? ceil_div(n, 8) : ceil_div(n, kBlock) + count;
}

// f(piece, begin, end) for all pieces of n elements.
template <class F>
void over_pieces(int64_t n, const F& f) {
  torch::stable::parallel_for(0, ceil_div(n, kPiece), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i, i * kPiece, std::min(n, (i + 1) * kPiece));
  });
}

template <class F>
void by_precision(const char* op, const Tensor& x, const F& f) {
  check_contiguous(op, "x", x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double, op,
                  ": needs float32 or float64");
  x.scalar_type() == ScalarType::Float ? f(float()) : f(double());
}

template <class T>
std::vector<int64_t> counts_of(const T* x, int64_t n, Bits<T> least) {
  std::vector<int64_t> counts(ceil_div(n, kPiece));
  over_pieces(n, [&](int64_t piece, int64_t begin, int64_t end) {
    int64_t count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = begin; i < end; ++i) count += size_of(x[i]) >= least;
    counts[piece] = count;
  });
  return counts;
}

template <class T>
Bits<T> least_of(const char* op, const Tensor& threshold, const Tensor& x) {
  STD_TORCH_CHECK(threshold.numel() == 1 && threshold.scalar_type() == x.scalar_type(), op,
                  ": needs a threshold of one element, of x's type");
  return size_of(*data<T>(threshold));
}

// x [..] -> [1]: the k-th largest size, by the bits of sizes from the highest on; never 0 but for k = n
Tensor sparse_threshold(const Tensor& x, int64_t k) {
  const int64_t n = x.numel();
  STD_TORCH_CHECK(k >= 1 && k <= n, "sparse_threshold: k must be from 1 to the number of elements");
  Tensor out = make({1}, x.scalar_type());
  by_precision("sparse_threshold", x, [&](auto element) {
    using T = decltype(element);
    constexpr int kDigit = 8;
    const T* from = data<T>(x);
    Bits<T> found = 0;
    int64_t rest = k;
    for (int shift = 8 * sizeof(T) - kDigit; shift >= 0 && k < n; shift -= kDigit) {
      const Bits<T> known = shift + kDigit == 8 * sizeof(T) ? 0 : ~Bits<T>(0) << (shift + kDigit);
      std::vector<int64_t> counts(ceil_div(n, kPiece) << kDigit, 0);
      over_pieces(n, [&](int64_t piece, int64_t begin, int64_t end) {
        int64_t* of_piece = counts.data() + (piece << kDigit);
        for (int64_t i = begin; i < end; ++i) {
          const Bits<T> size = size_of(from[i]);
          if ((size & known) == found) ++of_piece[(size >> shift) & 255];
        }
      });
      for (int digit = 255;; --digit) {
        int64_t with = 0;
        for (size_t at = digit; at < counts.size(); at += 256) with += counts[at];
        if (rest <= with || digit == 0) {
          found |= static_cast<Bits<T>>(digit) << shift;
          break;
        }
        rest -= with;
      }
    }
    if (k < n) found = std::max<Bits<T>>(found, 1);
    std::memcpy(data<T>(out), &found, sizeof found);
  });
  return out;
}

// -> int64 [1]: how many elements of x are at least that large
Tensor sparse_count(const Tensor& x, const Tensor& threshold) {
  Tensor out = make({1}, ScalarType::Long);
  by_precision("sparse_count", x, [&](auto element) {
    using T = decltype(element);
    int64_t total = 0;
    for (int64_t count : counts_of(data<T>(x), x.numel(), least_of<T>("sparse_count", threshold, x))) total += count;
    *data<int64_t>(out) = total;
  });
  return out;
}

template <class T, class V>
void pack(T* x, int64_t n, Bits<T> least, V* values, uint8_t* places, int64_t count) {
  std::vector<int64_t> starts = counts_of(x, n, least);
  int64_t total = 0;
  for (int64_t& start : starts) total += std::exchange(start, total);
  STD_TORCH_CHECK(total >= count, "sparse_pack_: there are fewer elements above the threshold than are to be packed");
  const bool all = count == n, bits = by_bits(n, count);
  uint8_t* offsets = places + ceil_div(n, kBlock);
  over_pieces(n, [=, &starts](int64_t piece, int64_t begin, int64_t end) {
    int64_t at = starts[piece];
    if (!all && bits) std::memset(places + begin / 8, 0, ceil_div(end - begin, 8));
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t before = std::min(at, count), stop = std::min(end, block + kBlock);
      for (int64_t i = block; i < stop; ++i) {
        if (size_of(x[i]) < least || at >= count) continue;
        values[at] = narrow<V>(static_cast<Wide<V>>(x[i]));
        x[i] -= static_cast<T>(wide(values[at]));
        if (!all && bits) places[i / 8] |= 1 << (i % 8);
        else if (!all) offsets[at] = static_cast<uint8_t>(i - block);
        ++at;
      }
      if (!all && !bits) places[block / kBlock] = static_cast<uint8_t>(std::min(at, count) - before);
    }
  });
}

template <class T, class V>
void add(T* to, int64_t n, const V* values, const uint8_t* places, int64_t count, bool overwrite) {
  const bool all = count == n, bits = by_bits(n, count);
  const int64_t pieces = ceil_div(n, kPiece), blocks = ceil_div(n, kBlock);
  std::vector<int64_t> starts(pieces + 1, 0);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = piece * kPiece, end = std::min(n, begin + kPiece);
    int64_t own = 0;
    if (all) own = end - begin;
    else if (bits) for (int64_t i = begin / 8; i < ceil_div(end, 8); ++i) own += __builtin_popcount(places[i]);
    else for (int64_t i = begin / kBlock; i < ceil_div(end, kBlock); ++i) own += places[i];
    starts[piece + 1] = starts[piece] + own;
  }
  STD_TORCH_CHECK(starts[pieces] == count, "sparse_add_: the message is damaged: ", starts[pieces], " places of ", count, " values");
  const uint8_t* offsets = places + blocks;
  over_pieces(n, [=, &starts](int64_t piece, int64_t begin, int64_t end) {
    int64_t at = starts[piece];
    const auto take = [&](int64_t i) { to[i] = (overwrite ? T(0) : to[i]) + static_cast<T>(wide(values[at])); ++at; };
    if (all) {
      for (int64_t i = begin; i < end; ++i, ++at) {
        const T value = static_cast<T>(wide(values[at]));
        to[i] = overwrite ? value : to[i] + value;
      }
      return;
    }
    if (overwrite) std::memset(static_cast<void*>(to + begin), 0, (end - begin) * sizeof(T));
    if (bits) {
      for (int64_t i = begin; i < end; i += 8)
        for (unsigned left = places[i / 8]; left != 0; left &= left - 1)
          if (const int64_t where = i + __builtin_ctz(left); where < end) take(where);
    } else {
      for (int64_t block = begin; block < end; block += kBlock)
        for (int own = places[block / kBlock]; own > 0; --own)
          if (const int64_t where = block + offsets[at]; where < end) take(where);
          else ++at;
    }
  });
}

template <class F>
void by_message(const char* op, const Tensor& x, const Tensor& values, const Tensor& places, const F& f) {
  check_contiguous(op, "values", values);
  check_contiguous(op, "places", places);
  STD_TORCH_CHECK(values.numel() <= x.numel() && places.scalar_type() == ScalarType::Byte &&
                      places.numel() == place_bytes(x.numel(), values.numel()), op, ": places must be as many bytes as their form takes");
  by_precision(op, x, [&](auto element) {
    using T = decltype(element);
    if (values.scalar_type() == x.scalar_type()) f(element, data<T>(values));
    else if (values.scalar_type() == ScalarType::BFloat16) f(element, data<BFloat16>(values));
    else STD_TORCH_CHECK(false, op, ": values must be of x's type or bfloat16");
  });
}

// The first elements of x that are at least as large as the threshold, as many as values have room: packed, and taken off x.
void sparse_pack_(const Tensor& x, const Tensor& threshold, const Tensor& values, const Tensor& places) {
  by_message("sparse_pack_", x, values, places, [&](auto element, auto* to) {
    using T = decltype(element);
    pack(data<T>(x), x.numel(), least_of<T>("sparse_pack_", threshold, x), to, data<uint8_t>(places), values.numel());
  });
}

// Adds a message to x; overwrite: to zero.
void sparse_add_(const Tensor& x, const Tensor& values, const Tensor& places, bool overwrite) {
  by_message("sparse_add_", x, values, places, [&](auto element, auto* from) {
    using T = decltype(element);
    add(data<T>(x), x.numel(), from, data<uint8_t>(places), values.numel(), overwrite);
  });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("sparse_threshold(Tensor x, SymInt k) -> Tensor");
  library.def("sparse_count(Tensor x, Tensor threshold) -> Tensor");
  library.def("sparse_pack_(Tensor(a!) x, Tensor threshold, Tensor(b!) values, Tensor(c!) places) -> ()");
  library.def("sparse_add_(Tensor(a!) x, Tensor values, Tensor places, bool overwrite) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("sparse_threshold", TORCH_BOX(&sparse_threshold));
  library.impl("sparse_count", TORCH_BOX(&sparse_count));
  library.impl("sparse_pack_", TORCH_BOX(&sparse_pack_));
  library.impl("sparse_add_", TORCH_BOX(&sparse_add_));
}
