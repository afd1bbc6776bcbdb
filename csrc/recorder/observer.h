// Sees the operators of the thread that enters it, and of the backwards that this one starts.
#pragma once

#include "trace.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

namespace hybridpar {

// What prediction/operators.py says of an operator (`described`).
struct Operator {
  struct Role {
    size_t position;
    bool reads, writes;
  };

  std::string name;  // JSON
  bool is_view, is_fresh, is_sum, casts;
  size_t num_positional;
  std::vector<Role> roles;
};

class Observer {
 public:
  // `describe`: gives the fields of an Operator for a name and an overload.
  Observer(pybind11::object describe, int64_t begun);
  ~Observer();

  bool is_paused = false;
  const std::shared_ptr<Trace> trace;

  void enter();
  void exit();

  // The fallback of the key that `enter` includes: runs an operator, and notes what it does.
  static void see(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  const Operator& find(const c10::OperatorHandle& handle);
  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  pybind11::object describe_;
  std::unordered_map<const void*, Operator> operators_;  // by the address of their schema
  Observer* outer_ = nullptr;                            // that was entered before
};

}  // namespace hybridpar
