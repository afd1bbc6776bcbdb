// The Python module hybridpar._C_recorder. It uses what torch promises to nobody: built for one version of it.
#include "observer.h"

#include <torch/library.h>
#include <torch/version.h>

namespace py = pybind11;
using hybridpar::Observer;

namespace {

// Registers what sees operators. Raises where this torch uses the key itself.
void start() {
  static auto library = torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::Fake, __FILE__, __LINE__);
  static const bool is_registered = [] {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&Observer::see>());
    return true;
  }();
  (void)is_registered;
}

}  // namespace

PYBIND11_MODULE(_C_recorder, module) {
  module.attr("torch_version") = TORCH_VERSION;
  module.def("start", &start);
  py::class_<Observer>(module, "Observer")
      .def(py::init<py::object, int64_t>())
      .def_readwrite("paused", &Observer::is_paused)
      .def_property("layer", [](const Observer& o) { return o.trace->layer; },
                    [](Observer& o, int layer) { o.trace->layer = layer; })
      .def("enter", &Observer::enter)
      .def("exit", &Observer::exit)
      .def("adopt", [](Observer& o, const std::string& name, const hybridpar::Tensors& t) { o.trace->adopt(name, t); })
      .def("resized", [](Observer& o, const std::string& n, const at::Tensor& t) { o.trace->resized(n, t); })
      .def("name_tensors", [](Observer& o, const std::vector<std::string>& names,
                              const hybridpar::Tensors& t) { o.trace->name_tensors(names, t); })
      .def("take", [](Observer& o) { return o.trace->take(); })
      .def("close", [](Observer& o) { o.trace->close(); });
}
