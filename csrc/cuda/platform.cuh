// The part that depends on the compiler: element types, starting a kernel. With a C++ compiler instead of nvcc,
// tests/csrc/emulated runs the same kernels on the CPU, a thread at a time.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hybridpar {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

}  // namespace hybridpar

#ifdef __CUDACC__
#include <cuda_runtime.h>

#define HYBRIDPAR_DEVICE static __device__ __forceinline__
#define HYBRIDPAR_DEVICE_MEMBER __device__ __forceinline__

namespace hybridpar {

HYBRIDPAR_DEVICE float wide(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
HYBRIDPAR_DEVICE float wide(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two elements, the first in the lower half; rounds to nearest even.
HYBRIDPAR_DEVICE uint32_t narrow_two(BFloat16, float first, float second) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}
HYBRIDPAR_DEVICE uint32_t narrow_two(Half, float first, float second) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}

// Global memory, 16 bytes at a time where P is a multiple of them: the compiler stores in parts what was made in parts.
template <class P>
HYBRIDPAR_DEVICE P load_bytes(const void* from) {
  P x;
  if constexpr (sizeof(P) % sizeof(uint4) == 0) {
    uint4 whole[sizeof(P) / sizeof(uint4)];
#pragma unroll
    for (int i = 0; i < sizeof(P) / sizeof(uint4); ++i) whole[i] = static_cast<const uint4*>(from)[i];
    memcpy(&x, whole, sizeof(P));
  } else {
    x = *static_cast<const P*>(from);
  }
  return x;
}
template <class P>
HYBRIDPAR_DEVICE void store_bytes(void* to, const P& x) {
  if constexpr (sizeof(P) % sizeof(uint4) == 0) {
    uint4 whole[sizeof(P) / sizeof(uint4)];
    memcpy(whole, &x, sizeof(P));
#pragma unroll
    for (int i = 0; i < sizeof(P) / sizeof(uint4); ++i)
      asm("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(static_cast<uint4*>(to) + i)),
          "r"(whole[i].x), "r"(whole[i].y), "r"(whole[i].z), "r"(whole[i].w)
          : "memory");
  } else {
    *static_cast<P*>(to) = x;
  }
}

// 2^x to 2 units in the last place; what is below the normal numbers is 0.
HYBRIDPAR_DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, void* stream,
            const Arguments&... arguments) {
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("hybridpar: the CUDA kernel of ") + name +
                             " did not start: " + cudaGetErrorString(error));
}

}  // namespace hybridpar
#else
#include "emulated.h"
#endif
