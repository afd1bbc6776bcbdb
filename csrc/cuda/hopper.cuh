// Hopper's own instructions (sm_90a): barriers in shared memory, copies of tiles by the TMA unit, and the products of a
// warpgroup (4 warps, 128 threads), which run beside its other instructions. Terms are those of the PTX manual.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "platform.cuh"

namespace hybridpar {

// --- barriers in shared memory: a phase ends when `count` arrivals and all announced bytes are in ---

HYBRIDPAR_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
HYBRIDPAR_DEVICE int load_shared(uint32_t address) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
HYBRIDPAR_DEVICE void store_shared(uint32_t address, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
HYBRIDPAR_DEVICE void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to the TMA unit.
HYBRIDPAR_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
HYBRIDPAR_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
HYBRIDPAR_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended; the one before the first counts as ended.
HYBRIDPAR_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "WAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra DONE;\n\tbra WAIT;\n"
      "DONE:\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}

// Barriers of the block by number: `threads` in all, those that wait and those that only arrive.
HYBRIDPAR_DEVICE void named_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
HYBRIDPAR_DEVICE void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// --- copies ---

HYBRIDPAR_DEVICE void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}
// A box of a tensor of 4 dimensions to shared memory; its bytes count at `barrier`.
HYBRIDPAR_DEVICE void copy_box(uint32_t to, const CUtensorMap& map, int x0, int x1, int x2, int x3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(to), "l"(reinterpret_cast<uint64_t>(&map)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}

// --- registers of a warpgroup ---

template <int N>
HYBRIDPAR_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
HYBRIDPAR_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// --- products ---

HYBRIDPAR_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HYBRIDPAR_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
HYBRIDPAR_DEVICE void products_wait() {  // until at most N committed groups run
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from using results before the wait that comes before this.
template <int N>
HYBRIDPAR_DEVICE void ready(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A tile in shared memory whose rows of 128 bytes are swizzled, 8 rows to 1024 bytes, as the TMA unit writes them.
// `panel`: bytes from 64 columns to the next 64, for an operand whose rows are summed over.
HYBRIDPAR_DEVICE uint64_t operand(uint32_t address, int panel) {
  return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | static_cast<uint64_t>(panel / 16) << 16 |
         (address & 0x3ffff) / 16;
}

// d += a b, or d = a b where not `add`. d: 64 rows, 2 columns an element; thread t of the group has, of row
// 16 (t / 32) + t % 32 / 4 and of the row 8 further, in turns, the columns 8 j + 2 (t % 4) and the next. All operands
// must stay as they are until the products are waited for.
//
// First: a [64, 16] and b [columns, 16] in shared memory, both summed over their rows' elements.
// Second: a [64, 16] in registers, b [16, columns] in shared memory.
#define HYBRIDPAR_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HYBRIDPAR_REGS_32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define HYBRIDPAR_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HYBRIDPAR_REGS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define HYBRIDPAR_PRODUCT_SS(COUNT, COLUMNS, TYPE, A, B, ADD)                                                 \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " ADD ", 0;\n\t"                                     \
               "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" HYBRIDPAR_NAMES_##COUNT \
               "}, " A ", " B ", add, 1, 1, 0, 0;\n\t}"                                                       \
               : HYBRIDPAR_REGS_##COUNT                                                                      \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define HYBRIDPAR_PRODUCT_RS(COUNT, COLUMNS, TYPE, A, B)                                                      \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, 1, 0;\n\t"                                        \
               "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" HYBRIDPAR_NAMES_##COUNT \
               "}, {" A "}, " B ", add, 1, 1, 1;\n\t}"                                                     \
               : HYBRIDPAR_REGS_##COUNT                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define HYBRIDPAR_PRODUCTS(COUNT, COLUMNS, A, B, ADD, A_REGS, B_OF_REGS)                          \
  template <class T>                                                                           \
  HYBRIDPAR_DEVICE void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) {         \
    if constexpr (std::is_same_v<T, BFloat16>)                                                 \
      HYBRIDPAR_PRODUCT_SS(COUNT, COLUMNS, "bf16", A, B, ADD);                                   \
    else                                                                                       \
      HYBRIDPAR_PRODUCT_SS(COUNT, COLUMNS, "f16", A, B, ADD);                                    \
  }                                                                                            \
  template <class T>                                                                           \
  HYBRIDPAR_DEVICE void multiply(float (&d)[COUNT], const uint32_t* a, uint64_t b) {            \
    if constexpr (std::is_same_v<T, BFloat16>)                                                 \
      HYBRIDPAR_PRODUCT_RS(COUNT, COLUMNS, "bf16", A_REGS, B_OF_REGS);                           \
    else                                                                                       \
      HYBRIDPAR_PRODUCT_RS(COUNT, COLUMNS, "f16", A_REGS, B_OF_REGS);                            \
  }

HYBRIDPAR_PRODUCTS(32, "64", "%32", "%33", "%34", "%32, %33, %34, %35", "%36")
HYBRIDPAR_PRODUCTS(64, "128", "%64", "%65", "%66", "%64, %65, %66, %67", "%68")

}  // namespace hybridpar
