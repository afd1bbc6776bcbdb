// Kernels over whole rows: blockDim.x threads share a row, blockDim.y rows are in a block.
#pragma once

#include "device.cuh"

namespace hybridpar {

// Threads for rows of `cols` in packs of `vector`: one for each pack up to `least`, then for up to `kept` packs, and
// no more than `most`. A block has about `together` threads.
struct RowShape {
  dim3 block;

  RowShape(int cols, int vector, int kept, int least, int together, int most = kMostThreads) {
    const int packs = (cols + vector - 1) / vector;
    const int threads = packs <= least ? packs : std::max(least, (packs + kept - 1) / kept);
    block.x = std::min(most, round_up(threads, 32));
    block.y = std::max<unsigned>(1, together / block.x);
  }
};

// A thread has the packs of V columns at first(), first() + stride(), ...
template <int V>
HYBRIDPAR_DEVICE int first() {
  return threadIdx.x * V;
}
template <int V>
HYBRIDPAR_DEVICE int stride() {
  return blockDim.x * V;
}

// Blocks for so many rows, and which of them a thread's is: in the last block, perhaps none.
inline dim3 row_grid(int64_t rows, const dim3& block) {
  return dim3(static_cast<unsigned>((rows + block.y - 1) / block.y));
}
HYBRIDPAR_DEVICE int64_t row_of() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

}  // namespace hybridpar
