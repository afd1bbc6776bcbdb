// softmax(scale q k^T) v on Hopper, forward, without the matrix of probabilities: an online softmax.
//
// A block of threads takes 64 rows of queries for each of its consumer groups (4 warps), and goes through tiles of keys
// from the last that its rows see to the first. One thread of another group, the producer, has the TMA unit copy tiles
// into a ring in shared memory. A consumer starts S = q k^T of the next tile, then out += P v of this one, and computes
// the exponentials of the next while the latter runs. With TURNS consumers take turns in starting products, so that
// one's exponentials run beside the others' products. P goes from the registers of S into the second product.
//
// Blocks of threads stay, one on each multiprocessor, and take one block of queries after another, long ones first.
// FLOPs: 4 b n s^2 d, half if causal. Source: arXiv 2407.08608.

#include <cmath>
#include <limits>
#include <type_traits>

#include "hopper.cuh"
#include "kernels.h"

namespace hybridpar {
namespace {

constexpr int kMostHeads = AttentionHopper::kMostHeads;
constexpr int kGroup = 128;  // threads
constexpr int kPanel = 64;  // columns of 16 bits that a swizzled row of shared memory holds

struct Arguments {
  CUtensorMap q, k, v;  // (d, s, head, sample)
  void* out;  // [samples, s, heads, d]
  float* lse;  // [samples, heads, s]
  int s, heads;
  int row_blocks, blocks;  // of queries: of a head; in all
  int near;  // heads whose keys and values share the L2 cache
  int* counter;  // zero, or null
  float scale, scale_log2;
  uint16_t kv_head[kMostHeads];
};

template <int D_, int KEYS_, int CONSUMERS_, int STAGES_, bool TURNS_>
struct Shape {
  static constexpr int D = D_, KEYS = KEYS_, CONSUMERS = CONSUMERS_, STAGES = STAGES_;
  static constexpr bool TURNS = TURNS_;
  static constexpr int ROWS = 64 * CONSUMERS, THREADS = kGroup * (CONSUMERS + 1);
  static constexpr int Q_PANEL = ROWS * 128, KEY_PANEL = KEYS * 128;  // bytes
  static constexpr int Q = D / kPanel * Q_PANEL, TILE = D / kPanel * KEY_PANEL;
  static constexpr int BARRIERS = 2 + 4 * STAGES;
  static constexpr int SHARED = 1024 + Q + 2 * STAGES * TILE + 8 * BARRIERS + 8;  // 1024: to align what is swizzled
  static_assert(KEY_PANEL % 1024 == 0 && SHARED <= 232448);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr float kHidden = -INFINITY;

HYBRIDPAR_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Addresses in shared memory.
template <class S>
struct Layout {
  uint32_t base;
  HYBRIDPAR_DEVICE_MEMBER uint32_t q() const { return base; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t k() const { return base + S::Q; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t v() const { return base + S::Q + S::STAGES * S::TILE; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t barriers() const { return base + S::Q + 2 * S::STAGES * S::TILE; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t q_full() const { return barriers(); }
  HYBRIDPAR_DEVICE_MEMBER uint32_t q_empty() const { return barriers() + 8; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t k_full(int stage) const { return barriers() + 16 + 8 * stage; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t k_empty(int stage) const { return k_full(stage) + 8 * S::STAGES; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t v_full(int stage) const { return k_full(stage) + 16 * S::STAGES; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t v_empty(int stage) const { return k_full(stage) + 24 * S::STAGES; }
  HYBRIDPAR_DEVICE_MEMBER uint32_t index() const { return k_full(0) + 32 * S::STAGES; }  // of the block of queries
};

// A place in a ring of stages; `parity` is that of its barrier when the stage is used for this round.
template <int STAGES>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  HYBRIDPAR_DEVICE_MEMBER void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Block {
  int row, head, sample, tiles;
};

// All blocks of queries in order: those of a few heads whose keys the L2 cache can hold, the longest rows first.
template <class S, bool CAUSAL>
HYBRIDPAR_DEVICE Block block_of(const Arguments& a, int index) {
  const int of_near = a.near * a.row_blocks, some = index / of_near, rest = index - some * of_near;
  const int heads = min(a.near, a.blocks / a.row_blocks - some * a.near), from_end = rest / heads;
  const int sample_head = some * a.near + rest - from_end * heads, sample = sample_head / a.heads;
  const int row = (CAUSAL ? a.row_blocks - 1 - from_end : from_end) * S::ROWS;
  const int end = CAUSAL ? min(a.s, row + S::ROWS) : a.s;
  return {row, sample_head - sample * a.heads, sample, (end + S::KEYS - 1) / S::KEYS};
}

// The number of the block of queries that comes next here. With a counter who is free takes the next; without one they
// are dealt out there and back.
struct Deal {
  int round = 0;
  HYBRIDPAR_DEVICE_MEMBER int next(const Arguments& a) {
    const int grid = gridDim.x, first = blockIdx.x, done = round++;
    if (a.counter && done > 0) return grid + atomicAdd(a.counter, 1);
    return done * grid + (done % 2 ? grid - 1 - first : first);
  }
};

template <class S, bool CAUSAL>
HYBRIDPAR_DEVICE void produce(const Arguments& a, const Layout<S>& at) {
  Place<1> q;
  Place<S::STAGES> k, v;
  Deal deal;
  int index = deal.next(a);
  for (;;) {
    barrier_wait(at.q_empty(), q.parity ^ 1);
    store_shared(at.index(), index);
    if (index >= a.blocks) break;
    const Block block = block_of<S, CAUSAL>(a, index);
    index = deal.next(a);
    const int kv = a.kv_head[block.head];
    const auto load = [&](const CUtensorMap& map, int tile, uint32_t to, uint32_t full, uint32_t empty, auto& place) {
      barrier_wait(empty, place.parity ^ 1);
      barrier_expect(full, S::TILE);
#pragma unroll
      for (int panel = 0; panel < S::D / kPanel; ++panel)
        copy_box(to + place.stage * S::TILE + panel * S::KEY_PANEL, map, panel * kPanel, tile * S::KEYS, kv,
                 block.sample, full);
      place.next();
    };
    const auto load_k = [&](int tile) { load(a.k, tile, at.k(), at.k_full(k.stage), at.k_empty(k.stage), k); };
    const auto load_v = [&](int tile) { load(a.v, tile, at.v(), at.v_full(v.stage), at.v_empty(v.stage), v); };
    barrier_expect(at.q_full(), S::Q);
#pragma unroll
    for (int panel = 0; panel < S::D / kPanel; ++panel)
      copy_box(at.q() + panel * S::Q_PANEL, a.q, panel * kPanel, block.row, block.head, block.sample, at.q_full());
    q.next();
    load_k(block.tiles - 1);
#pragma unroll 1
    for (int tile = block.tiles - 2; tile >= 0; --tile) {  // in the order in which consumers wait for them
      load_k(tile);
      load_v(tile + 1);
    }
    load_v(0);
  }
  barrier_arrive(at.q_full());
}

// Of 4 numbers in each of 4 neighbouring threads: thread t gets those numbered t of all.
HYBRIDPAR_DEVICE void transpose_four(uint32_t (&x)[4], int thread) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & bit)) {
        const bool upper = thread & bit;
        const uint32_t given = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
        x[i] = upper ? given : x[i];
        x[i + bit] = upper ? x[i + bit] : given;
      }
}

template <class T, class S, bool CAUSAL>
HYBRIDPAR_DEVICE void consume(const Arguments& a, const Layout<S>& at, int group) {
  constexpr int D = S::D, KEYS = S::KEYS;
  const int thread = threadIdx.x % kGroup, quad = thread % 4;
  const int own_row = 64 * group + thread / 32 * 16 + thread % 32 / 4;  // and the one 8 further
  const bool leads = thread % 32 == 0;
  const uint64_t q_tile = operand(at.q() + group * 64 * 128, 16);
  const uint64_t k_tile = operand(at.k(), 16), v_tile = operand(at.v(), S::KEY_PANEL);
  Place<1> q_place;
  Place<S::STAGES> k_place, v_place;
  float scores[KEYS / 2], out[D / 2];
  uint32_t p[KEYS / 4];
  float top[2], total[2], shrink[2];

  const auto start_scores = [&] {
    const uint64_t k = k_tile + k_place.stage * (S::TILE / 16);
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      multiply<T>(scores, q_tile + (i / 4 * S::Q_PANEL + i % 4 * 32) / 16,
                  k + (i / 4 * S::KEY_PANEL + i % 4 * 32) / 16, i > 0);
    products_commit();
  };
  const auto start_out = [&] {
    const uint64_t v = v_tile + v_place.stage * (S::TILE / 16);
    products_begin();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) multiply<T>(out, &p[4 * i], v + i * (16 * 128 / 16));
    products_commit();
  };
  const auto release_k = [&] {
    if (leads) barrier_arrive(at.k_empty(k_place.stage));
    k_place.next();
  };
  const auto release_v = [&] {
    if (leads) barrier_arrive(at.v_empty(v_place.stage));
    v_place.next();
  };
  // scores become exponentials; what came before is worth `shrink` of what it was
  const auto soften = [&](auto first, auto masked, const Block& block, int tile) {
    constexpr bool kFirst = decltype(first)::value, kMasked = decltype(masked)::value;
    if constexpr (kMasked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = block.row + own_row + 8 * h;
        const int last = (CAUSAL ? row : a.s - 1) - tile * KEYS - 2 * quad;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
          float& x = scores[i / 2 * 4 + 2 * h + i % 2];
          if (i / 2 * 8 + i % 2 > last) x = kHidden;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = kFirst ? scores[2 * h] : fmaxf(top[h], scores[2 * h]);
#pragma unroll
      for (int i = 1; i < KEYS / 4; ++i) most = fmaxf(most, scores[i / 2 * 4 + 2 * h + i % 2]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float base = kMasked && most == kHidden ? 0.0f : most * a.scale_log2;
      if constexpr (!kFirst) {
        shrink[h] = exp2_fast(top[h] * a.scale_log2 - base);
        total[h] *= shrink[h];
      } else {
        total[h] = 0.0f;
      }
      top[h] = most;
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        float& x = scores[i / 2 * 4 + 2 * h + i % 2];
        x = exp2_fast(fmaf(x, a.scale_log2, -base));
        total[h] += x;
      }
    }
  };
  const auto narrow_p = [&] {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) p[i] = narrow_two(T(), scores[2 * i], scores[2 * i + 1]);
  };

  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (S::TURNS && group == S::CONSUMERS - 1) named_arrive(1, 2 * kGroup);  // the first may start
  for (;;) {
    barrier_wait(at.q_full(), q_place.parity);
    const int index = load_shared(at.index());
    if (index >= a.blocks) return;
    const Block block = block_of<S, CAUSAL>(a, index);
    barrier_wait(at.k_full(k_place.stage), k_place.parity);
    start_scores();
    products_wait<0>();
    ready(scores);
    release_k();
    soften(yes, yes, block, block.tiles - 1);
    narrow_p();
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out[i] = 0.0f;
    barrier_wait(at.v_full(v_place.stage), v_place.parity);

    const auto step = [&](auto masked, int tile) {
      barrier_wait(at.k_full(k_place.stage), k_place.parity);
      if constexpr (S::TURNS) named_sync(1 + group, 2 * kGroup);
      start_scores();
      start_out();
      if constexpr (S::TURNS) named_arrive(1 + (group + 1) % S::CONSUMERS, 2 * kGroup);
      products_wait<1>();
      ready(scores);
      release_k();
      soften(no, masked, block, tile);
      ready(scores);
      // Waits for the next values here, as the compiler moves no exponentials beyond a loop: out += P v still runs.
      Place<S::STAGES> next_v = v_place;
      next_v.next();
      barrier_wait(at.v_full(next_v.stage), next_v.parity);
      products_wait<0>();
      ready(out);
      release_v();
      narrow_p();
#pragma unroll
      for (int i = 0; i < D / 2; ++i) out[i] *= shrink[i / 2 % 2];
    };
    int tile = block.tiles - 2;
    const int seen_whole = CAUSAL ? (block.row + 64 * group + 1) / KEYS : a.s / KEYS;
    for (; tile >= seen_whole; --tile) step(yes, tile);
    for (; tile >= 0; --tile) step(no, tile);

    if (leads) barrier_arrive(at.q_empty());
    q_place.next();
    start_out();
    products_wait<0>();
    ready(out);
    release_v();

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = total[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float factor = 1.0f / sum;
      const int row = block.row + own_row + 8 * h;
      const int64_t at_row = (static_cast<int64_t>(block.sample) * a.s + row) * a.heads + block.head;
      uint4* to = reinterpret_cast<uint4*>(static_cast<T*>(a.out) + at_row * D) + quad;
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {  // 4 threads have 32 columns: 8 each, in turns of 2, become 8 neighbours
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &out[16 * j + 4 * i + 2 * h];
          words[i] = narrow_two(T(), x[0] * factor, x[1] * factor);
        }
        transpose_four(words, quad);
        if (row < a.s) to[4 * j] = make_uint4(words[0], words[1], words[2], words[3]);
      }
      if (quad == 0 && row < a.s)
        a.lse[(static_cast<int64_t>(block.sample) * a.heads + block.head) * a.s + row] = top[h] * a.scale + logf(sum);
    }
  }
}

#endif

template <class T, class S, bool CAUSAL>
__global__ void __launch_bounds__(S::THREADS, 1) attention_hopper_kernel(const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  const Layout<S> at{(shared_address(memory) + 1023) / 1024 * 1024};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
  if (threadIdx.x == 0) {
    prefetch_map(a.q);
    prefetch_map(a.k);
    prefetch_map(a.v);
    constexpr int kWarps = 4 * S::CONSUMERS;  // each says when its products have read a tile
    barrier_init(at.q_full(), 1);
    barrier_init(at.q_empty(), kWarps);
    for (int stage = 0; stage < S::STAGES; ++stage) {
      barrier_init(at.k_full(stage), 1);
      barrier_init(at.k_empty(stage), kWarps);
      barrier_init(at.v_full(stage), 1);
      barrier_init(at.v_empty(stage), kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<S::CONSUMERS == 2 ? 40 : 32>();
    if (threadIdx.x == 0) produce<S, CAUSAL>(a, at);
  } else {
    take_registers<S::CONSUMERS == 2 ? 232 : 160>();
    consume<T, S, CAUSAL>(a, at, group - 1);
  }
#endif
}

void check(bool good, const char* what) {
  if (!good) throw std::runtime_error(std::string("hybridpar: attention_hopper: ") + what);
}

// A map of x [samples, heads, s, d] for boxes of 64 columns of `rows` positions; what is beyond s reads as zeros.
CUtensorMap make_map(Type type, const Strided4& x, int64_t samples, int64_t heads, int64_t s, int d, int rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    check(error == cudaSuccess && found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const auto bytes = [](int64_t stride, int64_t n) { return static_cast<cuuint64_t>(n > 1 ? 2 * stride : 16); };
  const cuuint64_t sizes[] = {size(d), size(s), size(heads), size(samples)};
  const cuuint64_t strides[] = {bytes(x.position, s), bytes(x.head, heads), bytes(x.sample, samples)};
  const cuuint32_t box[] = {kPanel, static_cast<cuuint32_t>(rows), 1, 1}, each[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, type == Type::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(x.data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refuses the layout of q, k or v");
  return map;
}

template <class T, class S, bool CAUSAL>
void start(Type type, const AttentionHopper& x, void* stream) {
  constexpr int64_t kCache = 32 << 20;  // bytes of keys and values to keep in the L2 cache
  Arguments a;
  a.q = make_map(type, x.q, x.samples, x.heads, x.s, S::D, S::ROWS);
  a.k = make_map(type, x.k, x.samples, x.kv_heads, x.s, S::D, S::KEYS);
  a.v = make_map(type, x.v, x.samples, x.kv_heads, x.s, S::D, S::KEYS);
  a.out = x.out;
  a.lse = x.lse;
  a.s = static_cast<int>(x.s);
  a.heads = static_cast<int>(x.heads);
  const int64_t row_blocks = (x.s + S::ROWS - 1) / S::ROWS, blocks = row_blocks * x.samples * x.heads;
  check(blocks <= std::numeric_limits<int>::max() / 2, "more than 2^30 blocks of queries");
  a.row_blocks = static_cast<int>(row_blocks);
  a.blocks = static_cast<int>(blocks);
  const int64_t near = std::max<int64_t>(1, kCache / (4 * S::D * x.s)) * std::max<int64_t>(1, x.heads / x.kv_heads);
  a.near = static_cast<int>(std::min(near, x.samples * x.heads));
  a.scale = static_cast<float>(x.scale);
  a.scale_log2 = static_cast<float>(x.scale * 1.4426950408889634);
  std::copy(x.kv_head, x.kv_head + x.heads, a.kv_head);

  int device = 0, processors = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  check(major == 9, "needs a GPU of compute capability 9.0");
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  a.counter = CAUSAL && a.blocks > processors ? x.counter : nullptr;
  if (a.counter) cudaMemsetAsync(a.counter, 0, sizeof(int), static_cast<cudaStream_t>(stream));
  const auto kernel = attention_hopper_kernel<T, S, CAUSAL>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
  kernel<<<std::min(a.blocks, processors), S::THREADS, S::SHARED, static_cast<cudaStream_t>(stream)>>>(a);
  const cudaError_t error = cudaGetLastError();
  check(error == cudaSuccess, cudaGetErrorString(error));
}

template <class T, class S>
void start(Type type, const AttentionHopper& x, void* stream) {
  return x.causal ? start<T, S, true>(type, x, stream) : start<T, S, false>(type, x, stream);
}

template <class T>
void start(Type type, const AttentionHopper& x, void* stream) {
  // the fastest of four each on an H200, over 2k and 16k positions, with and without a causal mask
  if (x.d == 64) return start<T, Shape<64, 128, 3, 2, true>>(type, x, stream);
  start<T, Shape<128, 128, 2, 2, false>>(type, x, stream);
}

}  // namespace

void launch_attention_hopper(Type type, const AttentionHopper& a, void* stream) {
  if (type == Type::Half) return start<Half>(type, a, stream);
  start<BFloat16>(type, a, stream);
}

}  // namespace hybridpar
