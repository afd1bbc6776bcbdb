// Read before csrc/cuda/*.cpp: what they register for CUDA, they register for tensors on the CPU.
#include "operators.h"

#define CUDA CPU
