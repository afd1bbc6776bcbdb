// What the operators (*.cpp, which know torch) ask of the kernels (*_kernels.cu, which do not): so nvcc reads no header
// of torch, which would take most of the compile time.
//
// Pointers are to memory of the device, to elements of Type, or of the type of the arithmetic (`wide`: float, double
// for Double). `stream` is a cudaStream_t. Nothing waits. Sizes may be 0. Raises: std::runtime_error if the launch
// fails.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hybridpar {

enum class Type { Float, Double, BFloat16, Half };

// Which elements of [rows, cols] dropout keeps: element (r, c) has the counter of sample + r / rows and of
// index = start + r % rows * stride + c, and stays, times `scale`, where its bits are at least `threshold`.
struct Mask {
  uint32_t key0, key1;
  const int64_t* counter;  // step, sample: read on the device, so that a CUDA graph can run with others each time
  int64_t rows;  // of a sample
  int64_t stride, start;
  uint32_t threshold;
  double scale;
};

// Rows in consecutive parts whose sums are kept apart. Depends on the sizes alone, so sums have the same bits on every
// GPU.
struct Parts {
  int64_t count, rows_each;

  Parts(int64_t rows, int64_t most, int64_t least_rows)
      : rows_each(std::max(least_rows, (rows + most - 1) / most)) {
    count = (rows + rows_each - 1) / rows_each;
  }
};

// out[i] = the sums over parts of partial [parts, num, cols], for i < num; null: not wanted
struct ColumnSums {
  const void* partial;  // wide
  int64_t parts;
  int num, cols;
  void* out[3];
};
void launch_column_sums(Type type, const ColumnSums& a, void* stream);

// --- elements of [rows, cols], with a vector `bias` along cols that may be null ---

// Enough parts of 16 rows or more to fill a GPU, with blocks of 1024 columns.
inline Parts parts_of_elements(int64_t rows, int64_t cols) {
  return Parts(rows, std::max<int64_t>(1, 2048 / std::max<int64_t>(1, (cols + 1023) / 1024)), 16);
}

// forward: sum = residual + dropout(x + bias); nothing is dropped without `masked`
struct Addition {
  const void *x, *bias, *residual;
  void* sum;
  int64_t rows, cols;
  bool masked;
  Mask mask;
};
void launch_add(Type type, const Addition& a, void* stream);

// dropped = dropout(x); partial (may be null): its column sums [parts_of_elements, cols]. dropped null: nothing is
// dropped, sums alone.
struct Dropout {
  const void* x;
  void *dropped, *partial;
  int64_t rows, cols;
  Mask mask;
};
void launch_drop(Type type, const Dropout& a, void* stream);

// out = f(x + bias), or the gradient dx from dy, with its column sums `partial` [parts_of_elements, width of x] unless
// that is null. cols: of y; x of swiglu has 2 cols, gate then up.
struct Activation {
  const void *x, *bias, *dy;
  void *out, *partial;
  int64_t rows, cols;
};
void launch_gelu(Type type, const Activation& a, void* stream);
void launch_gelu_backward(Type type, const Activation& a, void* stream);
void launch_swiglu(Type type, const Activation& a, void* stream);
void launch_swiglu_backward(Type type, const Activation& a, void* stream);

// --- whole rows ---

struct NormForward {
  const void *x, *bias_of_x, *residual;  // residual null: no addition before; bias_of_x may be null
  const void *weight, *bias;  // bias may be null
  void *sum, *y, *stats;  // stats wide [rows, 2]: mean (0 where not centred), 1 / deviation
  int64_t rows;
  int cols;
  double eps;
  bool centre, masked;
  Mask mask;
};
void launch_norm(Type type, const NormForward& a, void* stream);

// Small rows in more parts, as several of them share a block.
inline Parts parts_of_rows(int64_t rows, int64_t cols) {
  return Parts(rows, cols <= 256 ? 4096 : cols <= 512 ? 2048 : cols <= 1024 ? 1024 : 512, 8);
}

struct NormBackward {
  const void *dy, *dsum, *x, *weight, *stats;  // dsum may be null
  void *dx, *dropped;  // dropped null: nothing is dropped
  void* partial;  // wide [parts_of_rows, 3, cols]: of dy * normalised x; of dy; of what reaches x + bias
  int64_t rows;
  int cols;
  bool centre, with_bias;  // without centre the second sums are not written, without with_bias the third
  Mask mask;
};
void launch_norm_backward(Type type, const NormBackward& a, void* stream);

// rows are samples * heads * queries; forward: x scores; backward: x probabilities, dy their gradient
struct Softmax {
  const void *x, *dy;
  const uint8_t* real;  // [samples, keys], or null
  void* out;
  int64_t rows, rows_per_sample, queries;
  int keys;
  double scale;
  bool causal;  // query i sees keys up to i + keys - queries
};
void launch_softmax(Type type, const Softmax& a, void* stream);
void launch_softmax_backward(Type type, const Softmax& a, void* stream);

struct CrossEntropy {
  const void* logits;  // [rows, cols]
  void* gradient;  // backward: of logits, which it may be; as far from a multiple of 16 bytes
  const int64_t* column;  // of the row's label; negative: on another rank
  void* numbers;  // wide [3, 4 or 4, rows]: forward to, backward from
  int64_t rows;
  int cols, real;  // columns beyond `real` are padding
  bool with_sum;
};
void launch_cross_entropy(Type type, const CrossEntropy& a, void* stream);
void launch_cross_entropy_backward(Type type, const CrossEntropy& a, void* stream);

struct Rotation {
  const void* x;
  void* y;  // [samples, s, heads, 2 half] without gaps
  int64_t sample, head, position;  // strides of x
  int64_t samples, heads, s;
  int half;
  const int64_t* positions;  // [s], or [samples, s] with `each_sample`; null: from `offset` on
  bool each_sample;
  int64_t offset;
  double base, sign;  // sign -1 turns back
};
void launch_rotary(Type type, const Rotation& a, void* stream);

// Memory of elements of 16 bits on a Hopper GPU; d without gaps, the rest of the strides and addresses multiples of 16
// bytes.
struct Strided4 {
  const void* data;  // [samples, heads, s, d]
  int64_t sample, head, position;
};

struct AttentionHopper {
  static constexpr int kMostHeads = 1024;  // of queries

  Strided4 q, k, v;
  const int64_t* kv_head;  // of each query head; on the host
  void* out;  // [samples, s, heads, d]
  float* lse;  // [samples, heads, s]
  int* counter;  // memory for one
  int64_t samples, heads, kv_heads, s;
  int d;  // 64 or 128
  double scale;  // positive
  bool causal;
};
void launch_attention_hopper(Type type, const AttentionHopper& a, void* stream);

}  // namespace hybridpar
