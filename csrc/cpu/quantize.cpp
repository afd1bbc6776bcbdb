// Tiles of integers: each 64 numbers of a row, the last ones padded with zeros, as one scale and 64 codes of 8 or 4 bits.
//
//     row    [ codes of tile 0 | codes of tile 1 | .. | scale 0 | scale 1 | .. ]    64 or 32 bytes a tile, and 2 (bfloat16)
//
// rotate: a tile is turned by the Hadamard matrix of order 64 first, which spreads an outlier over all of it. Every operation
// has one rounding and the order is written out, so the bytes are those of the torch reference (ops/quantize.py).

#include "rows.h"

namespace hybridpar {
namespace {

constexpr int kTile = 64, kHalf = kTile / 2;
constexpr int kScaleBytes = 2;
constexpr uint16_t kNaN = 0x7fc0;  // the scale of a tile with a number that is not finite
constexpr float kLeast = 0x1p-100f;  // largest magnitude below which a tile counts as zero

template <class W>
struct Bits;  // of a number's magnitude, which are in its order
template <>
struct Bits<float> {
  using type = int32_t;
  static constexpr type kMagnitude = 0x7fffffff;
};
template <>
struct Bits<double> {
  using type = int64_t;
  static constexpr type kMagnitude = 0x7fffffffffffffff;
};

// What is added and taken away again to round to the nearest integer, to even where two are.
template <class W>
constexpr W kRounding = std::is_same_v<W, float> ? W(12582912.0) : W(6755399441055744.0);

// Times the Hadamard matrix, in six equal steps: to[2 i], to[2 i + 1] = the sum and the difference of x[i] and x[i + 32].
template <class V>
HYBRIDPAR_INLINE void rotate_tile(V* x) {
  V other[kTile];
  repeat<3>([&](auto) {
#pragma omp simd
    for (int i = 0; i < kHalf; ++i) {
      other[2 * i] = static_cast<V>(x[i] + x[i + kHalf]);
      other[2 * i + 1] = static_cast<V>(x[i] - x[i + kHalf]);
    }
#pragma omp simd
    for (int i = 0; i < kHalf; ++i) {
      x[2 * i] = static_cast<V>(other[i] + other[i + kHalf]);
      x[2 * i + 1] = static_cast<V>(other[i] - other[i + kHalf]);
    }
  });
}

// The largest magnitude / limit, rounded up to a bfloat16 (so that no code is above the limit); 0 and NaN as said above.
template <class W>
HYBRIDPAR_INLINE uint16_t scale_of(const W* x, W limit) {
  using B = typename Bits<W>::type;
  B largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < kTile; ++i) {
    B bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= Bits<W>::kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  W magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  if (magnitude < W(kLeast)) return 0;
  const float scale = static_cast<float>(magnitude / limit);
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  if (bits >= 0x7f7f0001u) return kNaN;  // also what is not finite
  return static_cast<uint16_t>((bits + 0xffffu) >> 16);
}

template <class T, int kBits>
HYBRIDPAR_INLINE void encode(const T* x, int64_t cols, uint8_t* to, bool rotate) {
  using W = Wide<T>;
  const int64_t tiles = (cols + kTile - 1) / kTile;
  uint8_t* scales = to + tiles * kTile * kBits / 8;
  constexpr W limit = (1 << (kBits - 1)) - 1;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t n = std::min<int64_t>(kTile, cols - tile * kTile);
    const T* from = x + tile * kTile;
    W number[kTile];
    if (n == kTile) {
#pragma omp simd
      for (int i = 0; i < kTile; ++i) number[i] = wide(from[i]);
    } else {
      for (int i = 0; i < kTile; ++i) number[i] = i < n ? wide(from[i]) : W(0);
    }
    if (rotate) rotate_tile(number);
    const uint16_t scale = scale_of(number, limit);
    std::memcpy(scales + tile * kScaleBytes, &scale, sizeof scale);
    const W wide_scale = wide(BFloat16{scale});
    const W inverse = wide_scale > W(0) ? W(1) / wide_scale : W(0);  // 0 for NaN, too
    if (scale == 0 || scale == kNaN) std::fill_n(number, kTile, W(0));
    uint8_t* codes = to + tile * kTile * kBits / 8;
    if constexpr (kBits == 8) {
#pragma omp simd
      for (int i = 0; i < kTile; ++i) {
        const W rounded = (number[i] * inverse + kRounding<W>) - kRounding<W>;
        codes[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded));
      }
    } else {
#pragma omp simd
      for (int i = 0; i < kHalf; ++i) {
        const W low = (number[i] * inverse + kRounding<W>) - kRounding<W>;
        const W high = (number[i + kHalf] * inverse + kRounding<W>) - kRounding<W>;
        codes[i] = static_cast<uint8_t>((static_cast<int32_t>(low) & 15) | (static_cast<int32_t>(high) << 4));
      }
    }
  }
}

template <class T, int kBits>
HYBRIDPAR_INLINE void decode(const uint8_t* from, int64_t cols, T* x, bool rotate) {
  using W = Wide<T>;
  const int64_t tiles = (cols + kTile - 1) / kTile;
  const uint8_t* scales = from + tiles * kTile * kBits / 8;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t n = std::min<int64_t>(kTile, cols - tile * kTile);
    const uint8_t* codes = from + tile * kTile * kBits / 8;
    int16_t number[kTile];  // sums of 64 codes of 8 bits are exact in it
    if constexpr (kBits == 8) {
#pragma omp simd
      for (int i = 0; i < kTile; ++i) number[i] = static_cast<int8_t>(codes[i]);
    } else {
#pragma omp simd
      for (int i = 0; i < kHalf; ++i) {
        number[i] = static_cast<int16_t>(((codes[i] & 15) ^ 8) - 8);
        number[i + kHalf] = static_cast<int16_t>((codes[i] >> 4 ^ 8) - 8);
      }
    }
    if (rotate) rotate_tile(number);
    uint16_t bits;
    std::memcpy(&bits, scales + tile * kScaleBytes, sizeof bits);
    const W scale = W(wide(BFloat16{bits})) * (rotate ? W(1) / kTile : W(1));
    T* to = x + tile * kTile;
    if (n == kTile) {
#pragma omp simd
      for (int i = 0; i < kTile; ++i) to[i] = narrow<T>(static_cast<W>(number[i]) * scale);
    } else {
      for (int i = 0; i < n; ++i) to[i] = narrow<T>(static_cast<W>(number[i]) * scale);
    }
  }
}

template <class T>
struct Rows {
  T* x;
  uint8_t* message;
  int64_t cols, row_bytes;
  bool rotate;
};

#define HYBRIDPAR_QUANTIZE(T)                                                                                       \
  HYBRIDPAR_CLONES void encode_rows8(const Rows<T>& a, int64_t begin, int64_t end) {                                \
    for (int64_t r = begin; r < end; ++r) encode<T, 8>(a.x + r * a.cols, a.cols, a.message + r * a.row_bytes, a.rotate); \
  }                                                                                                                 \
  HYBRIDPAR_CLONES void encode_rows4(const Rows<T>& a, int64_t begin, int64_t end) {                                \
    for (int64_t r = begin; r < end; ++r) encode<T, 4>(a.x + r * a.cols, a.cols, a.message + r * a.row_bytes, a.rotate); \
  }                                                                                                                 \
  HYBRIDPAR_CLONES void decode_rows8(const Rows<T>& a, int64_t begin, int64_t end) {                                \
    for (int64_t r = begin; r < end; ++r) decode<T, 8>(a.message + r * a.row_bytes, a.cols, a.x + r * a.cols, a.rotate); \
  }                                                                                                                 \
  HYBRIDPAR_CLONES void decode_rows4(const Rows<T>& a, int64_t begin, int64_t end) {                                \
    for (int64_t r = begin; r < end; ++r) decode<T, 4>(a.message + r * a.row_bytes, a.cols, a.x + r * a.cols, a.rotate); \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_QUANTIZE)

int64_t bytes_of_row(const char* op, const Tensor& x, int64_t bits) {
  STD_TORCH_CHECK(x.dim() == 2, op, ": x must be [rows, cols]");
  STD_TORCH_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, not ", bits);
  check_contiguous(op, "x", x);
  return (x.size(1) + kTile - 1) / kTile * (kTile * bits / 8 + kScaleBytes);
}

// x [rows, cols] -> [rows, bytes of a row]
Tensor quantize(const Tensor& x, int64_t bits, bool rotate) {
  const int64_t row_bytes = bytes_of_row("quantize", x, bits), rows = x.size(0), cols = x.size(1);
  Tensor message = make({rows, row_bytes}, ScalarType::Byte);
  by_type("quantize", x, [&](auto element) {
    using T = decltype(element);
    const Rows<T> a{data<T>(x), data<uint8_t>(message), cols, row_bytes, rotate};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) {
      bits == 8 ? encode_rows8(a, begin, end) : encode_rows4(a, begin, end);
    });
  });
  return message;
}

// What `quantize` made of some x, into x.
void dequantize_(const Tensor& x, const Tensor& message, int64_t bits, bool rotate) {
  const int64_t row_bytes = bytes_of_row("dequantize_", x, bits), rows = x.size(0), cols = x.size(1);
  check_contiguous("dequantize_", "message", message);
  STD_TORCH_CHECK(message.scalar_type() == ScalarType::Byte && message.numel() == rows * row_bytes,
                  "dequantize_: message must be ", rows, " * ", row_bytes, " bytes");
  by_type("dequantize_", x, [&](auto element) {
    using T = decltype(element);
    const Rows<T> a{data<T>(x), data<uint8_t>(message), cols, row_bytes, rotate};
    over_rows(rows, cols, [&](int64_t begin, int64_t end) {
      bits == 8 ? decode_rows8(a, begin, end) : decode_rows4(a, begin, end);
    });
  });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("quantize(Tensor x, int bits, bool rotate) -> Tensor");
  library.def("dequantize_(Tensor(a!) x, Tensor message, int bits, bool rotate) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("quantize", TORCH_BOX(&quantize));
  library.impl("dequantize_", TORCH_BOX(&dequantize_));
}
