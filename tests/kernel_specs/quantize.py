from kernel_specs import Spec

SIZES = dict.fromkeys(("count", "tiles", "cols", "row_bytes"), "i32")
SPECS = {
    kernel: [Spec({"x_ptr": f"*{dtype}", "message_ptr": "*u8", **SIZES},
                  {"BITS": bits, "ROTATE": bits == 4, "TILES": 16},
                  divisible=("cols",), most_registers=64) for dtype, bits in (("fp32", 8), ("bf16", 4))]
    for kernel in ("encode_kernel", "decode_kernel")}
