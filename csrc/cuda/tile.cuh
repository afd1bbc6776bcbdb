// Kernels over the elements of [rows, cols] with something along the columns: a thread keeps V columns, and what is
// along them in registers, and goes down the rows of its part. So no element needs a division to find its column, and
// column sums need no atomics. It reads kRows of them before it uses the first, to have enough bytes on their way.
#pragma once

#include "device.cuh"

namespace hybridpar {

constexpr int kTileThreads = 128;

struct Tile {
  dim3 grid, block;
  int64_t rows_each;

  Tile(int64_t rows, int64_t cols, int vector) {
    const Parts parts = parts_of_elements(rows, cols);
    rows_each = parts.rows_each;
    block.x = round_up(std::min<int64_t>(kTileThreads, (cols + vector - 1) / vector), 32);
    block.y = kTileThreads / block.x;
    const int64_t columns = static_cast<int64_t>(block.x) * vector;
    grid = dim3(static_cast<unsigned>((cols + columns - 1) / columns), static_cast<unsigned>(parts.count));
  }
};

// Where a thread is: its first column, its rows begin, begin + step, ... below end.
template <int V>
struct Place {
  int64_t column, begin, end, step;

  HYBRIDPAR_DEVICE_MEMBER Place(int64_t rows, int64_t cols, int64_t rows_each)
      : column((static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * V),
        begin(blockIdx.y * rows_each + threadIdx.y),
        end(blockIdx.y * rows_each + rows_each < rows ? blockIdx.y * rows_each + rows_each : rows),
        step(blockDim.y) {
    if (column >= cols) begin = end;  // outside: nothing to do
  }
};

// The threads' sums of V columns, added over the rows of threads of the block, to their place in partial [parts,
// width]. Every thread of the block must call it.
template <int V, class W>
HYBRIDPAR_DEVICE void store_sums(const W (&sums)[V], W* partial, int64_t width, int64_t column, bool inside) {
  __shared__ W slots[V][kTileThreads];
  const int mine = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < V; ++k) slots[k][mine] = sums[k];
  __syncthreads();
  if (inside && threadIdx.y == 0) {
    W total[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      total[k] = sums[k];
#pragma unroll 1
      for (int y = 1; y < blockDim.y; ++y) total[k] += slots[k][y * blockDim.x + threadIdx.x];
    }
    store<W, V>(partial + blockIdx.y * width + column, total);
  }
  __syncthreads();  // before the slots are used again
}

}  // namespace hybridpar
