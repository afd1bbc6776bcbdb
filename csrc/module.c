/* The Python module hybridpar._C. It is empty: loading it registers the operators torch.ops.hybridpar.*. */
#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL, NULL, NULL, NULL, NULL};
  return PyModule_Create(&module);
}
