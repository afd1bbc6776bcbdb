from kernel_specs import Spec

SPECS = {"nothing_kernel": [Spec({"number": "i32"}, most_registers=32)]}
