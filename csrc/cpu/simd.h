// One object for every x86-64: hot loops are compiled for AVX-512, AVX2 and SSE2, and the loader picks.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRIDPAR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define HYBRIDPAR_CLONES __attribute__((flatten))
#endif

// Inlined into each clone, so that it is compiled for the clone's instructions.
#define HYBRIDPAR_INLINE static inline __attribute__((always_inline))
#define HYBRIDPAR_INLINE_MEMBER inline __attribute__((always_inline))
