// One object for every x86-64: hot loops are compiled for AVX-512, AVX2 and SSE2, and the loader picks.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRIDPAR_HAS_CLONES
#pragma GCC diagnostic push  // what GCC 12 says of its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define HYBRIDPAR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define HYBRIDPAR_CLONES __attribute__((flatten))
#endif
#define HYBRIDPAR_FLATTEN __attribute__((flatten))

// Whether the CPU has what vectors.h is compiled for.
inline bool has_bfloat16() {
#ifdef HYBRIDPAR_HAS_CLONES
  static const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
#else
  return false;
#endif
}

// Whether its products of bfloat16 are faster than those of float: on AMD's; Intel's multiply at half the speed.
inline bool has_fast_bfloat16() {
#ifdef HYBRIDPAR_HAS_CLONES
  static const bool has = has_bfloat16() && __builtin_cpu_is("amd");
  return has;
#else
  return false;
#endif
}

// Calls FUNCTION of namespace numbers; if CAN, for bfloat16 that of vectors.
#ifdef HYBRIDPAR_HAS_CLONES
#define HYBRIDPAR_RUN(CAN, T, FUNCTION, ...)     \
  do {                                           \
    if constexpr (std::is_same_v<T, BFloat16>) { \
      if (CAN) {                                 \
        vectors::FUNCTION(__VA_ARGS__);          \
        break;                                   \
      }                                          \
    }                                            \
    numbers::FUNCTION(__VA_ARGS__);              \
  } while (false)
#else
#define HYBRIDPAR_RUN(CAN, T, FUNCTION, ...) numbers::FUNCTION(__VA_ARGS__)
#endif

// Inlined into each clone, so that it is compiled for the clone's instructions.
#define HYBRIDPAR_INLINE static inline __attribute__((always_inline))
#define HYBRIDPAR_INLINE_MEMBER inline __attribute__((always_inline))
