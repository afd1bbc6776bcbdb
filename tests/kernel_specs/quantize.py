from kernel_specs import Spec

SIZES = dict.fromkeys(("count", "tiles", "cols", "row_bytes"), "i32")
SPECS = {
    kernel: [
        Spec(
            {"x_ptr": f"*{dtype}", "message_ptr": "*u8", **SIZES},
            {"BITS": bits, "ROTATE": bits == 4, "TILES": 16},
            divisible=("cols",),
            most_registers=most,
        )
        for dtype, bits in (("fp32", 8), ("bf16", 4))
    ]
    for kernel, most in (("encode_kernel", 96), ("decode_kernel", 64))
}  # 95 with Triton 3.6: 20 warps of an SM
