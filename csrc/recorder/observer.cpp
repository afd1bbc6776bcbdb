#include "observer.h"

#include <ATen/core/stack.h>
#include <ATen/ops/_nnz.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace hybridpar {
namespace {

// Lies below autograd and above all that computes, where a dispatch mode in Python stands. Nothing else uses it.
constexpr auto kKey = c10::DispatchKey::Fake;

thread_local Observer* observer = nullptr;

// Tensors in nested lists. Numbers that an operator takes in place of tensors are none.
void append_tensors(Tensors& tensors, const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) tensors.push_back(tensor);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) append_tensors(tensors, tensor);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) append_tensors(tensors, one);
  } else if (value.isTuple()) {
    for (const auto& one : value.toTupleRef().elements()) append_tensors(tensors, one);
  }
}

// As prediction.ghost.cast_bytes says.
int64_t cast_bytes(c10::ArrayRef<c10::IValue> arguments) {
  if (arguments.empty() || !arguments[0].isTensor() || !arguments[0].toTensor().is_cpu()) return 0;
  Tensors tensors;
  for (const auto& argument : arguments) append_tensors(tensors, argument);
  int64_t common = 0, sum = 0;
  for (const auto& tensor : tensors) {
    if (tensor.is_floating_point()) common = std::max<int64_t>(common, tensor.element_size());
  }
  for (const auto& tensor : tensors) {
    if (tensor.is_floating_point() && tensor.dim() != 0 && tensor.element_size() < common) {
      sum += tensor.numel() * common;
    }
  }
  return sum;
}

// As memory.operators.adds_nothing says.
bool adds_nothing(const c10::IValue& to, const c10::IValue& other) {
  return other.isTensor() && other.toTensor().layout() == c10::kSparse && to.toTensor().layout() == c10::kStrided &&
         other.toTensor()._nnz() == 0;
}

}  // namespace

Observer::Observer(pybind11::object describe, int64_t begun)
    : trace(std::make_shared<Trace>(begun)), describe_(std::move(describe)) {}

Observer::~Observer() {
  if (observer == this) exit();
  trace->close();
}

void Observer::enter() {
  outer_ = observer;
  observer = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void Observer::exit() {
  observer = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, outer_ != nullptr);
}

void Observer::see(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  // where torch hides its own steps from modes, they are hidden here
  if (observer == nullptr || observer->is_paused || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  observer->run(handle, below, stack);
}

void Observer::run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& op = find(handle);
  const c10::impl::ExcludeDispatchKeyGuard inside(kKey);
  if (op.is_view) {
    handle.redispatchBoxed(keys, stack);
    return;
  }
  const auto& schema = handle.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  Access access{&op.name, {}, {}, {}, op.casts ? cast_bytes(arguments.slice(0, op.num_positional)) : 0, op.is_fresh};
  for (const auto& role : op.roles) {
    if (role.reads) append_tensors(access.reads, arguments[role.position]);
    if (role.writes) append_tensors(access.writes, arguments[role.position]);
  }
  if (op.is_sum && adds_nothing(arguments[0], arguments[1])) {
    const auto old = arguments[0].toTensor();
    handle.redispatchBoxed(keys, stack);
    trace->move(old, stack->back().toTensor());
    return;
  }
  handle.redispatchBoxed(keys, stack);
  for (const auto& result : torch::jit::last(*stack, schema.returns().size())) append_tensors(access.made, result);
  trace->access(access);
}

const Operator& Observer::find(const c10::OperatorHandle& handle) {
  const auto found = operators_.find(&handle.schema());
  if (found != operators_.end()) return found->second;
  const pybind11::gil_scoped_acquire gil;
  const auto& name = handle.operator_name();
  const auto fields = pybind11::tuple(describe_(name.name, name.overload_name));
  Operator op{fields[0].cast<std::string>(), fields[1].cast<bool>(), fields[2].cast<bool>(), fields[3].cast<bool>(),
              fields[4].cast<bool>(),        fields[5].cast<size_t>(), {}};
  for (const auto& role : fields[6].cast<std::vector<std::tuple<size_t, bool, bool>>>()) {
    op.roles.push_back({std::get<0>(role), std::get<1>(role), std::get<2>(role)});
  }
  return operators_.emplace(&handle.schema(), std::move(op)).first->second;
}

}  // namespace hybridpar
