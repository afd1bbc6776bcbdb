// The kernels (*_kernels.cu, which do not know torch) as the operators (*.cpp, which do) see them: so nvcc reads no
// header of torch, which would take most of the compile time.
//
// Pointers are to memory of the device, to elements of Type, or of the type of the arithmetic (`wide`: float, double
// for Double). `stream` is a cudaStream_t. Nothing waits. Sizes may be 0. Raises: std::runtime_error if the launch
// fails.
#pragma once

#include <cstdint>

namespace hybridpar {

enum class Type { Float, Double, BFloat16, Half };

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
