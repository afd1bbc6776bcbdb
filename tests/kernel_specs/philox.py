from kernel_specs import Spec

COUNTERS = {"counter_ptr": "*i64", "key0": "i32", "key1": "i32"}
PLACE = {"rows": "i32", "cols": "i32", "stride": "i64", "start": "i64", "blocks": "i32"}
FULL = 64  # registers of a thread that keep half of an SM's threads busy

SPECS = {
    "dropout_kernel": [
        Spec(
            {
                "x_ptr": f"*{t}",
                "out_ptr": f"*{t}",
                **COUNTERS,
                "threshold": "i32",
                "scale": "fp32",
                **PLACE,
            },
            {"QUADS": quads},
            most_registers=FULL,
        )
        for t in ("fp32", "fp16", "bf16")
        for quads in (1, 256)
    ],
}
