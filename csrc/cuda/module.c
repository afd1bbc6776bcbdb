/* The Python module hybridpar._C_cuda. It is empty: loading it gives torch.ops.hybridpar.* their CUDA versions. */
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", NULL, -1, NULL, NULL, NULL, NULL, NULL};
  return PyModule_Create(&module);
}
