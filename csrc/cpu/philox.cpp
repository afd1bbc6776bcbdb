// Philox4x32-10 on the CPU: random bits, normal numbers, dropout. The same bits as hybridpar/random.py, which says how
// key and counter are made and where the constants come from. Compile with -ffp-contract=off: the normal numbers
// promise one rounding for each operation written here.
//
// Every operator fills [num_samples, rows, cols]; element (i, r, c) has the counter of sample + i and of
// index = start + r * stride + c. Threads split the elements anywhere: no element depends on another.

#include "philox.h"

namespace hybridpar {
namespace {

struct Box {
  int64_t num_samples, rows, cols, stride, start;
};

template <class T>
HYBRIDPAR_INLINE T apply(T x, Wide<T> scale) {
  return narrow<T>(wide(x) * scale);
}

template <class T>
HYBRIDPAR_INLINE void drop(const Stream& stream, int64_t index, int64_t n, const T* x, T* out, uint32_t threshold,
                           Wide<T> scale) {
  blocks(stream, index, n, [=](const uint32_t* words, int64_t at, int64_t size) {
    const T* from = x + at;
    T* to = out + at;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const T kept = apply(from[i], scale);
      to[i] = words[i] >= threshold ? kept : T{};
    }
  });
}

// --- normal numbers ---

constexpr double kCentre[2][8] = {
    {2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0},
    {5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0}};
constexpr double kTail[2][8] = {
    {7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0},
    {1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0}};
constexpr double kArtanh[12] = {2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13,
                                2.0 / 11, 2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3,  2.0};

template <int N>
HYBRIDPAR_INLINE double polynomial(double x, const double (&coefficients)[N]) {
  double y = x * coefficients[0];
#pragma GCC unroll 12
  for (int k = 1; k < N - 1; ++k) y = (y + coefficients[k]) * x;
  return y + coefficients[N - 1];
}

HYBRIDPAR_INLINE double logarithm(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint64_t mantissa_bits = (bits & ((uint64_t(1) << 52) - 1)) | (uint64_t(1023) << 52);
  double mantissa;
  std::memcpy(&mantissa, &mantissa_bits, sizeof mantissa);
  const bool high = mantissa > 1.4142135623730951;
  mantissa = high ? mantissa * 0.5 : mantissa;
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const int32_t exponent = static_cast<int32_t>(bits >> 52) - 1023 + (high ? 1 : 0);
  return static_cast<double>(exponent) * 0.6931471805599453 + s * polynomial(s * s, kArtanh);
}

// Both ranges are computed and one is taken, so that the loop has no branch.
HYBRIDPAR_INLINE double quantile(uint32_t bits) {
  const double q = (static_cast<double>(bits) - 2147483647.5) * 0x1p-32;
  const double size = std::fabs(q);
  const double centre_at = 0.180625 - q * q;
  const double centre = q * (polynomial(centre_at, kCentre[0]) / polynomial(centre_at, kCentre[1]));
  const double tail_at = std::sqrt(-logarithm(0.5 - size)) - 1.6;
  const double tail = polynomial(tail_at, kTail[0]) / polynomial(tail_at, kTail[1]);
  return size > 0.425 ? (q < 0 ? -tail : tail) : centre;
}

template <class T>
HYBRIDPAR_INLINE void normal(const Stream& stream, int64_t index, int64_t n, T* out) {
  blocks(stream, index, n, [=](const uint32_t* words, int64_t at, int64_t size) {
    T* to = out + at;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(quantile(words[i]));
  });
}

// --- the functions that exist in several versions; a template cannot ---

HYBRIDPAR_CLONES void bits_run(const Stream& stream, int64_t index, int64_t n, uint32_t* out) {
  blocks(stream, index, n, [=](const uint32_t* words, int64_t at, int64_t size) {
    std::memcpy(out + at, words, static_cast<size_t>(size) * sizeof(uint32_t));
  });
}

HYBRIDPAR_CLONES void normal_run(const Stream& stream, int64_t index, int64_t n, float* out) {
  normal(stream, index, n, out);
}

HYBRIDPAR_CLONES void normal_run_double(const Stream& stream, int64_t index, int64_t n, double* out) {
  normal(stream, index, n, out);
}

#define HYBRIDPAR_DROP(T)                                                                                        \
  HYBRIDPAR_CLONES void drop_run(const Stream& stream, int64_t index, int64_t n, const T* x, T* out,             \
                                 uint32_t threshold, double scale) {                                             \
    drop(stream, index, n, x, out, threshold, static_cast<Wide<T>>(scale));                                      \
  }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_DROP)

// --- operators ---

// Calls run(stream, index, n, at): n elements of one sample that follow each other, at position `at` of the tensor.
template <class Run>
void for_each_run(Stream stream, Box box, const Run& run) {
  if (box.stride == box.cols || box.rows == 1) {  // rows follow each other without a gap
    box.cols *= box.rows;
    box.rows = 1;
  }
  torch::stable::parallel_for(0, box.num_samples * box.rows * box.cols, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / box.cols, col = begin % box.cols;
      const int64_t n = std::min(box.cols - col, end - begin);
      Stream mine = stream;
      mine.sample += static_cast<uint32_t>(row / box.rows);
      run(mine, box.start + row % box.rows * box.stride + col, n, begin);
      begin += n;
    }
  });
}

Tensor philox_bits(int64_t key0, int64_t key1, int64_t step, int64_t sample, int64_t num_samples, int64_t rows,
                   int64_t cols, int64_t stride, int64_t start) {
  Tensor out = make({num_samples, rows, cols}, ScalarType::Int);
  uint32_t* to = data<uint32_t>(out);
  for_each_run(make_stream(key0, key1, step, sample), {num_samples, rows, cols, stride, start},
               [=](const Stream& stream, int64_t index, int64_t n, int64_t at) {
                 bits_run(stream, index, n, to + at);
               });
  return out;
}

Tensor philox_normal(int64_t key0, int64_t key1, int64_t rows, int64_t cols, int64_t stride, int64_t start,
                     bool is_double) {
  Tensor out = make({rows, cols}, is_double ? ScalarType::Double : ScalarType::Float);
  for_each_run(make_stream(key0, key1, 0, 0), {1, rows, cols, stride, start},
               [&](const Stream& stream, int64_t index, int64_t n, int64_t at) {
                 if (is_double)
                   normal_run_double(stream, index, n, data<double>(out) + at);
                 else
                   normal_run(stream, index, n, data<float>(out) + at);
               });
  return out;
}

Tensor philox_dropout(const Tensor& x, int64_t key0, int64_t key1, const Optional& counter,
                      int64_t threshold, double scale, int64_t stride, int64_t start) {
  const char* op = "philox_dropout";
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous(), op, ": x must be contiguous [samples, rows, cols]");
  const Stream stream = dropout_stream(op, key0, key1, counter, threshold, x.size(0));
  Tensor out = make_like(x);
  const Box box{x.size(0), x.size(1), x.size(2), stride, start};
  by_type(op, x, [&](auto element) {
    using T = decltype(element);
    const T* from = data<T>(x);
    T* to = data<T>(out);
    for_each_run(stream, box, [=](const Stream& mine, int64_t index, int64_t n, int64_t at) {
      drop_run(mine, index, n, from + at, to + at, static_cast<uint32_t>(threshold), scale);
    });
  });
  return out;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY(hybridpar, library) {
  library.def(
      "philox_bits(int key0, int key1, SymInt step, SymInt sample, SymInt num_samples, SymInt rows, SymInt cols, "
      "SymInt stride, SymInt start) -> Tensor");
  library.def(
      "philox_normal(int key0, int key1, SymInt rows, SymInt cols, SymInt stride, SymInt start, bool double) -> "
      "Tensor");
  library.def("philox_dropout(Tensor x, " HYBRIDPAR_MASK ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CompositeExplicitAutograd, library) {
  library.impl("philox_bits", TORCH_BOX(&philox_bits));
  library.impl("philox_normal", TORCH_BOX(&philox_normal));
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) { library.impl("philox_dropout", TORCH_BOX(&philox_dropout)); }
