// The numbers of each row that are farthest from zero, as values and a bit for each number of the row:
//
//     row    [ values, in order | bits of all numbers, the first one lowest in its byte ]
//
// Sizes are compared as integers, of the bits without the sign: NaN is larger than all numbers. Of equal ones the first are taken.
// A row depends on nothing but itself, so threads change no bit, and the bytes are those of the torch reference (ops/largest.py).

#include "rows.h"

namespace hybridpar {
namespace {

template <class T>
using Size = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

// How many sizes of a row are at least `least`.
template <class S>
HYBRIDPAR_INLINE int64_t count_of(const S* sizes, int64_t cols, S least) {
  S count = 0;  // by pieces of as many as it can count
  int64_t total = 0;
  for (int64_t from = 0; from < cols; from += 32768, count = 0) {
    const int64_t stop = std::min<int64_t>(cols, from + 32768);
#pragma omp simd reduction(+ : count)
    for (int64_t i = from; i < stop; ++i) count += static_cast<S>(sizes[i] >= least);
    total += count;
  }
  return total;
}

template <class T, class V>
struct Rows {
  T* x;
  uint8_t* values;  // a row's are `stride` bytes behind those of the one before; the same of places
  uint8_t* places;
  int64_t cols, k, stride, places_stride;
};

template <class T, class V>
HYBRIDPAR_INLINE V value_of(T x) {
  if constexpr (std::is_same_v<T, V>) return x;
  else return narrow<V>(static_cast<Wide<V>>(wide(x)));
}

// The row's k largest sizes by halving: of the bits of the least one, the highest is found first.
template <class T, class V>
HYBRIDPAR_INLINE void take_largest(const Rows<T, V>& a, int64_t row, Size<T>* sizes) {
  using S = Size<T>;
  const T* x = a.x + row * a.cols;
  std::memcpy(sizes, x, a.cols * sizeof(T));
  constexpr S magnitude = static_cast<S>(~S(0)) >> 1;
#pragma omp simd
  for (int64_t i = 0; i < a.cols; ++i) sizes[i] &= magnitude;
  S least = 0;
  for (int bit = 8 * sizeof(S) - 2; bit >= 0; --bit) {
    const S tried = least | static_cast<S>(S(1) << bit);
    const int64_t count = count_of(sizes, a.cols, tried);
    if (count >= a.k) least = tried;
    if (count == a.k) break;
  }
  int64_t equal = a.k - count_of(sizes, a.cols, static_cast<S>(least + 1));  // `least` is below S's largest
  uint8_t* to = a.values + row * a.stride;
  uint8_t* places = a.places + row * a.places_stride;
  for (int64_t i = 0; i < a.cols; i += 8) {
    unsigned bits = 0;
    const int64_t n = std::min<int64_t>(8, a.cols - i);
    for (int64_t j = 0; j < n; ++j) bits |= static_cast<unsigned>(sizes[i + j] >= least) << j;
    unsigned taken = 0;
    for (; bits != 0; bits &= bits - 1) {
      const int j = __builtin_ctz(bits);
      if (sizes[i + j] == least && equal-- <= 0) continue;
      const V value = value_of<T, V>(x[i + j]);
      std::memcpy(to, &value, sizeof value);
      to += sizeof value;
      taken |= 1u << j;
    }
    places[i / 8] = static_cast<uint8_t>(taken);
  }
}

// f(column, at): for the marked numbers of a row, the first k of them.
template <class F>
HYBRIDPAR_INLINE void over_places(const uint8_t* places, int64_t cols, int64_t k, const F& f) {
  int64_t at = 0;
  for (int64_t i = 0; i < cols; i += 8)
    for (unsigned left = places[i / 8]; left != 0; left &= left - 1)
      if (const int64_t column = i + __builtin_ctz(left); column < cols && at < k) f(column, at++);
}

template <class T, class V>
HYBRIDPAR_INLINE void take_marked(const Rows<T, V>& a, int64_t row) {
  const T* x = a.x + row * a.cols;
  uint8_t* to = a.values + row * a.stride;
  std::memset(to, 0, a.k * sizeof(V));
  over_places(a.places + row * a.places_stride, a.cols, a.k, [=](int64_t column, int64_t at) {
    const V value = value_of<T, V>(x[column]);
    std::memcpy(to + at * sizeof value, &value, sizeof value);
  });
}

template <class T, class V>
HYBRIDPAR_INLINE void put_marked(const Rows<T, V>& a, int64_t row) {
  T* x = a.x + row * a.cols;
  const uint8_t* from = a.values + row * a.stride;
  std::memset(static_cast<void*>(x), 0, a.cols * sizeof(T));
  over_places(a.places + row * a.places_stride, a.cols, a.k, [=](int64_t column, int64_t at) {
    V value;
    std::memcpy(&value, from + at * sizeof value, sizeof value);
    if constexpr (std::is_same_v<T, V>) x[column] = value;
    else x[column] = narrow<T>(static_cast<Wide<T>>(wide(value)));
  });
}

#define HYBRIDPAR_LARGEST_OF(T, V)                                                                            \
  HYBRIDPAR_CLONES void largest_rows(const Rows<T, V>& a, int64_t begin, int64_t end) {                       \
    const std::unique_ptr<Size<T>[]> sizes(new Size<T>[a.cols]);                                              \
    for (int64_t row = begin; row < end; ++row) take_largest(a, row, sizes.get());                            \
  }                                                                                                           \
  void pick_rows(const Rows<T, V>& a, int64_t begin, int64_t end) {                                           \
    for (int64_t row = begin; row < end; ++row) take_marked(a, row);                                          \
  }                                                                                                           \
  void spread_rows(const Rows<T, V>& a, int64_t begin, int64_t end) {                                         \
    for (int64_t row = begin; row < end; ++row) put_marked(a, row);                                           \
  }
#define HYBRIDPAR_LARGEST(T) HYBRIDPAR_LARGEST_OF(T, T)
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_LARGEST)
HYBRIDPAR_LARGEST_OF(float, BFloat16)
HYBRIDPAR_LARGEST_OF(double, BFloat16)
HYBRIDPAR_LARGEST_OF(Half, BFloat16)

// f(Rows): of values in x's type, or in bfloat16.
template <class F>
void by_types(const char* op, const Tensor& x, bool rounded, const F& f) {
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    rounded ? f(Rows<T, BFloat16>{data<T>(x)}) : f(Rows<T, T>{data<T>(x)});
  });
}

int64_t value_bytes(const char* op, const Tensor& x, bool rounded) {
  STD_TORCH_CHECK(x.dim() == 2, op, ": x must be [rows, cols]");
  check_contiguous(op, "x", x);
  if (rounded) return 2;
  return x.scalar_type() == ScalarType::Double ? 8 : x.scalar_type() == ScalarType::Float ? 4 : 2;
}

void check_bytes(const char* op, const char* name, const Tensor& x, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Byte && x.dim() == 2 && x.size(0) == rows && x.size(1) == cols &&
                      (x.stride(1) == 1 || cols <= 1), op, ": ", name, " must be bytes [", rows, ", ", cols, "], rows without gaps");
}

// x [rows, cols] -> bytes [rows, k values and cols bits]
Tensor largest(const Tensor& x, int64_t k, bool rounded) {
  const int64_t item = value_bytes("largest", x, rounded), rows = x.size(0), cols = x.size(1);
  STD_TORCH_CHECK(k >= 1 && k <= cols, "largest: k must be from 1 to the columns of x");
  const int64_t row_bytes = k * item + (cols + 7) / 8;
  Tensor message = make({rows, row_bytes}, ScalarType::Byte);
  by_types("largest", x, rounded, [&](auto a) {
    a.values = data<uint8_t>(message), a.places = a.values + k * item;
    a.cols = cols, a.k = k, a.stride = a.places_stride = row_bytes;
    over_rows(rows, cols, [&](int64_t begin, int64_t end) { largest_rows(a, begin, end); });
  });
  return message;
}

// The marked numbers of x, the first k of each row -> bytes [rows, k values]; zeros where fewer are marked.
Tensor pick(const Tensor& x, const Tensor& places, int64_t k, bool rounded) {
  const int64_t item = value_bytes("pick", x, rounded), rows = x.size(0), cols = x.size(1);
  check_bytes("pick", "places", places, rows, (cols + 7) / 8);
  STD_TORCH_CHECK(k >= 0 && k <= cols, "pick: k must be from 0 to the columns of x");
  Tensor values = make({rows, k * item}, ScalarType::Byte);
  by_types("pick", x, rounded, [&](auto a) {
    a.values = data<uint8_t>(values), a.places = data<uint8_t>(places);
    a.cols = cols, a.k = k, a.stride = k * item, a.places_stride = places.stride(0);
    over_rows(rows, cols, [&](int64_t begin, int64_t end) { pick_rows(a, begin, end); });
  });
  return values;
}

// x: the values [rows, k values] at the marked places, zeros elsewhere, also where more are marked than there are values.
void spread_(const Tensor& x, const Tensor& values, const Tensor& places, bool rounded) {
  const int64_t item = value_bytes("spread_", x, rounded), rows = x.size(0), cols = x.size(1), k = values.size(-1) / item;
  check_bytes("spread_", "values", values, rows, k * item);
  check_bytes("spread_", "places", places, rows, (cols + 7) / 8);
  by_types("spread_", x, rounded, [&](auto a) {
    a.values = data<uint8_t>(values), a.places = data<uint8_t>(places);
    a.cols = cols, a.k = k, a.stride = values.stride(0), a.places_stride = places.stride(0);
    over_rows(rows, cols, [&](int64_t begin, int64_t end) { spread_rows(a, begin, end); });
  });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("largest(Tensor x, int k, bool rounded) -> Tensor");
  library.def("pick(Tensor x, Tensor places, int k, bool rounded) -> Tensor");
  library.def("spread_(Tensor(a!) x, Tensor values, Tensor places, bool rounded) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("largest", TORCH_BOX(&largest));
  library.impl("pick", TORCH_BOX(&pick));
  library.impl("spread_", TORCH_BOX(&spread_));
}
