// Stands in for the parts of CUDA's runtime that csrc/planned/cuda.cpp calls: memory of the host, and a log of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

using cudaError_t = int;
using cudaStream_t = void*;
using cudaEvent_t = long;
using cudaMemPool_t = int;
constexpr int cudaSuccess = 0, cudaErrorMemoryAllocation = 2;
constexpr unsigned cudaEventDisableTiming = 2;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };

inline std::ostringstream& log() {
  static std::ostringstream one;
  return one;
}

inline long number(void* stream) { return reinterpret_cast<long>(stream); }

inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaSetDevice(int device) { return log() << "device " << device << "\n", cudaSuccess; }
inline int cudaGetLastError() { return cudaSuccess; }
inline int cudaMalloc(void** block, size_t bytes) {
  log() << "malloc " << bytes << "\n";
  return (*block = std::malloc(bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline int cudaFree(void* block) { return log() << "free\n", std::free(block), cudaSuccess; }
inline int cudaMallocAsync(void** block, size_t bytes, cudaStream_t stream) {
  log() << "malloc " << bytes << " on " << number(stream) << "\n";
  if (bytes > (size_t{1} << 40)) return cudaErrorMemoryAllocation;
  return (*block = std::malloc(bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline int cudaFreeAsync(void* block, cudaStream_t stream) {
  return log() << "free on " << number(stream) << "\n", std::free(block), cudaSuccess;
}
inline int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = 7, cudaSuccess; }
inline int cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  return log() << "record on " << number(stream) << "\n", cudaSuccess;
}
inline int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  return log() << "wait on " << number(stream) << "\n", cudaSuccess;
}
inline int cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline int cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) { return *pool = device, cudaSuccess; }
inline int cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return log() << "keep\n", cudaSuccess; }

// What was called since the last time, a line each.
extern "C" __attribute__((visibility("default"))) const char* stand_in_log() {
  static std::string text;
  text = log().str();
  log().str("");
  return text.c_str();
}
