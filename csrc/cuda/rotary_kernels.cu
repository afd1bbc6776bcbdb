// Rotary position embedding: turns the pairs (x[i], x[i + d/2]) of each head by an angle a position (arXiv 2104.09864).
//
// A thread makes the cosines and sines of V pairs at one position and uses them for kHeads heads. Angles are in
// double, as positions go to 10^5 and more; what is left of them after whole turns is small enough for the type of the
// arithmetic.

#include "device.cuh"

namespace hybridpar {
namespace {

constexpr int kThreads = 128, kHeads = 8;
constexpr int kTogether = 4;  // heads that a thread reads before it turns the first

HYBRIDPAR_DEVICE void cos_sin_pi(float x, float& cos, float& sin) { sincospif(x, &sin, &cos); }
HYBRIDPAR_DEVICE void cos_sin_pi(double x, double& cos, double& sin) { sincospi(x, &sin, &cos); }

template <class W>
HYBRIDPAR_DEVICE void cos_sin(double angle, W& cos, W& sin) {
  constexpr double kInverse = 0.3183098861837907;  // 1 / pi
  const double turns = rint(angle * kInverse);
  const double part = fma(-turns, 3.141592653589793, angle);  // pi in two parts
  cos_sin_pi(static_cast<W>(fma(-turns, 1.2246467991473532e-16, part) * kInverse), cos, sin);
  if (static_cast<int64_t>(turns) & 1) {
    cos = -cos;
    sin = -sin;
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const Rotation a, const double log2_base) {
  using W = Wide<T>;
  const int64_t first_head = static_cast<int64_t>(blockIdx.y) * kHeads, rest = a.heads - first_head;
  const int heads = rest < kHeads ? static_cast<int>(rest) : kHeads;
  for (int c = threadIdx.x * V; c < a.half; c += blockDim.x * V) {
    double frequency[V];
#pragma unroll
    for (int k = 0; k < V; ++k) frequency[k] = exp2(log2_base * (static_cast<double>(c + k) / -a.half));
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; at < a.samples * a.s;
         at += static_cast<int64_t>(gridDim.x) * blockDim.y) {
      const int64_t sample = divide(at, a.s), s = at - sample * a.s;
      const int64_t position = a.positions ? a.positions[a.each_sample ? at : s] : a.offset + s;
      W cos[V], sin[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        cos_sin(static_cast<double>(position) * frequency[k], cos[k], sin[k]);
        sin[k] *= static_cast<W>(a.sign);
      }
      const T* x = static_cast<const T*>(a.x) + sample * a.sample + first_head * a.head + s * a.position + c;
      T* y = static_cast<T*>(a.y) + (at * a.heads + first_head) * 2 * a.half + c;
#pragma unroll 1
      for (int n = 0; n < heads; n += kTogether) {
        Pack<T, V> one[kTogether], two[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
          if (n + u < heads) {
            one[u] = load<V>(x + (n + u) * a.head);
            two[u] = load<V>(x + (n + u) * a.head + a.half);
          }
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
    }
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
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>((places + block.y - 1) / block.y, 2048)),
                    static_cast<unsigned>((a.heads + kHeads - 1) / kHeads));
    launch("rotary", rotary_kernel<decltype(element), vector()>, grid, block, stream, a, std::log2(a.base));
  });
}

}  // namespace hybridpar
