// The current device and stream. Nothing of libtorch_cuda is linked, so that the extension builds and loads with any
// torch; where torch has CUDA, its library is in the process already.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "operators.h"

namespace hybridpar {
namespace {

void* current_stream(int device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(function && function(device, &stream) == 0,
                  "hybridpar: cannot get torch's current CUDA stream: this torch has no CUDA, or is too new");
  return stream;
}

}  // namespace

OnDevice::OnDevice(const Tensor& x) {
  const int device = x.get_device_index();
  guard_ = std::make_unique<torch::stable::accelerator::DeviceGuard>(device);
  // Our CUDA runtime is a copy of its own; both share the thread's context, unless the driver says otherwise.
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != device) {
    const cudaError_t error = cudaSetDevice(device);
    STD_TORCH_CHECK(error == cudaSuccess, "hybridpar: cannot use CUDA device ", device, ": ",
                    cudaGetErrorString(error));
  }
  stream = current_stream(device);
}

}  // namespace hybridpar
