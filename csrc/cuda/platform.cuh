// What depends on the compiler: element types, starting a kernel. With a C++ compiler instead of nvcc,
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

// 1 / x to the last bit or so, for x up to 2^126
HYBRIDPAR_DEVICE float reciprocal(float x) { return __fdividef(1.0f, x); }
HYBRIDPAR_DEVICE double reciprocal(double x) { return 1.0 / x; }

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
