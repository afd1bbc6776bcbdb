// Rotary position embedding: turns the pairs (x[i], x[i + d/2]) of each head by an angle a position (arXiv 2104.09864).
//
// A thread makes the cosines and sines of V pairs at one position and uses them for kHeads heads, of which the first
// are on their way meanwhile. Angles are in double, as positions go to 10^5 and more; what is left of them after whole
// turns is small enough for the type of the arithmetic. A frequency is the one before times a constant.

#include "device.cuh"

namespace hybridpar {
namespace {

constexpr int kThreads = 128, kHeads = 8;
constexpr int kTogether = 2;  // heads that a thread reads before it turns the first
constexpr int kBlocks = 8;  // of a multiprocessor, that registers are to do for

// Polynomials for an eighth of a turn to either side: Cephes (S. L. Moshier), sinf and cosf.
HYBRIDPAR_DEVICE void cos_sin(double angle, float& cos, float& sin) {
  constexpr double kWhole = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded, to its lowest bits
  const double sum = fma(angle, 0.6366197723675814, kWhole);  // 2 / pi
  uint64_t quarter;
  memcpy(&quarter, &sum, sizeof quarter);
  const float x = static_cast<float>(fma(kWhole - sum, 1.5707963267948966, angle)), z = x * x;
  const float s = x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
  const float c = 1.0f - 0.5f * z +
                  z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  cos = quarter & 1 ? s : c;
  sin = quarter & 1 ? c : s;
  if ((quarter + 1) & 2) cos = -cos;
  if (quarter & 2) sin = -sin;
}

HYBRIDPAR_DEVICE void cos_sin(double angle, double& cos, double& sin) {
  constexpr double kInverse = 0.3183098861837907;  // 1 / pi
  const double turns = rint(angle * kInverse);
  const double part = fma(-turns, 3.141592653589793, angle);  // pi in two parts
  sincospi(fma(-turns, 1.2246467991473532e-16, part) * kInverse, &sin, &cos);
  if (static_cast<int64_t>(turns) & 1) {
    cos = -cos;
    sin = -sin;
  }
}

// step: from a frequency to the next, and its logarithm
template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks) rotary_kernel(const Rotation a, const double log2_step,
                                                                   const double step) {
  using W = Wide<T>;
  const int groups = static_cast<int>((a.heads + kHeads - 1) / kHeads);
  const int c = (blockIdx.y / groups * blockDim.x + threadIdx.x) * V;
  const int64_t first_head = static_cast<int64_t>(blockIdx.y % groups) * kHeads, rest = a.heads - first_head;
  const int heads = rest < kHeads ? static_cast<int>(rest) : kHeads;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (at >= a.samples * a.s || c >= a.half) return;
  const int64_t sample = divide(at, a.s), s = at - sample * a.s;
  const T* x = static_cast<const T*>(a.x) + sample * a.sample + first_head * a.head + s * a.position + c;
  T* y = static_cast<T*>(a.y) + (at * a.heads + first_head) * 2 * a.half + c;
  Pack<T, V> one[kTogether], two[kTogether];
  const auto read = [&](int n) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (n + u < heads) {
        one[u] = load<V>(x + (n + u) * a.head);
        two[u] = load<V>(x + (n + u) * a.head + a.half);
      }
  };
  read(0);
  const int64_t position = a.positions ? a.positions[a.each_sample ? at : s] : a.offset + s;
  double angle = static_cast<double>(position) * exp2(log2_step * c);
  W cos[V], sin[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    cos_sin(angle, cos[k], sin[k]);
    sin[k] *= static_cast<W>(a.sign);
    angle *= step;
  }
#pragma unroll 1
  for (int n = 0; n < heads; read(n += kTogether))
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (n + u < heads) {
        W first[V], second[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
          first[k] = one[u][k] * cos[k] - two[u][k] * sin[k];
          second[k] = two[u][k] * cos[k] + one[u][k] * sin[k];
        }
        store(y + (n + u) * 2 * a.half, first);
        store(y + (n + u) * 2 * a.half + a.half, second);
      }
}

}  // namespace

void launch_rotary(Type type, const Rotation& a, void* stream) {
  const int64_t places = a.samples * a.s;
  if (places == 0 || a.heads == 0 || a.half == 0) return;
  // a power of two divides all of these where it divides their bits together
  choose(type, a.half | a.sample | a.head | a.position, {a.x, a.y}, [&](auto element, auto vector) {
    const unsigned threads = std::min<unsigned>(kThreads, (a.half + vector - 1) / vector);
    const dim3 block(threads, kThreads / threads);
    const int64_t groups = (a.heads + kHeads - 1) / kHeads, columns = threads * vector;
    const dim3 grid(static_cast<unsigned>((places + block.y - 1) / block.y),
                    static_cast<unsigned>(groups * ((a.half + columns - 1) / columns)));
    const double log2_step = std::log2(a.base) / -a.half;
    launch("rotary", rotary_kernel<decltype(element), vector()>, grid, block, stream, a, log2_step,
           std::exp2(log2_step));
  });
}

}  // namespace hybridpar
