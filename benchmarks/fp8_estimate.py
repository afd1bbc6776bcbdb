"""Estimates what train.fp8 saves and costs at 1.3B on an H200. An estimate from arithmetic, not a
measurement.

    python -m benchmarks.fp8_estimate

The time of a bf16 step and of its matrix products is measured (results/gpu_single_1.3B.json). The
rest is arithmetic: the bytes that quantization moves, over the bandwidth that comparable kernels of
the same step reach, and the work of the products that become fp8 (forward and input gradient of
hidden matrices), over published rates of fp8 products.

Published rates of products with a scale for each row, against bf16 in the same measurement:

    cuBLAS 12.9 on Hopper (NVIDIA's blog post on cuBLAS 12.9)    1.75 for large matrices, at least 1.25 for most others
    FBGEMM, H100 at 500 W (pytorch/FBGEMM pull request 2546)     1.88 to 2.09; 1083 to 1141 TFLOP/s, K = 8192
    PyTorch's row-wise against tensor-wise (issue 147971)        0.90 to 1.00 for most shapes, down to 0.50
    TileLang, H800, without scales (its benchmark's README)      1343 TFLOP/s at K = 2048, 1507 at K = 8192

`cautious` takes 1.5 for all products but the attention output's, the smallest, for which it takes
1.25. `low` takes 1.25 for all, `likely` 1.6 and 1.4. A measured training run with row-wise scales
gained less: torchao reports 1.10 for Llama-3 8B on H100, and there the gradient of the weights was
in fp8, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "gpu_single_1.3B.json"
MATRICES = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
"""Rows and columns of a layer's hidden matrices. Units: hidden sizes."""
BANDWIDTH = 3.6e12
"""Bytes a second of a quantization kernel: 0.84 of the measured 4.3e12 of a copy. In the same step
gelu moves 4.1e12, its backward 3.9e12."""
ACTIVATION_BYTES = 2 + 1
WEIGHT_BYTES = 2 + 2 + 1 + 1
"""Bytes of each element that quantization reads and writes."""
LAUNCH_GAP = 1e-6
"""Seconds between two kernels of a CUDA graph: an assumption."""
UPDATE_KERNELS = ("adam_kernel", "squares_kernel", "add_squares_kernel")
RATES = {"low": (1.25, 1.25), "cautious": (1.5, 1.25), "likely": (1.6, 1.4)}
"""Rate of fp8 products over bf16 ones: of most, and of the attention output's."""
MICRO_BATCHES = (1, 2, 16)
LEAST = 1.08
"""Speed over bf16's for which fp8 is worth its code."""


@dataclass(frozen=True)
class Estimate:
    """Milliseconds of one micro-batch and its share of the update."""

    name: str
    micro_batches: int
    bf16: float
    saved: float
    activations: float
    weights: float
    launches: float

    @property
    def speed(self) -> float:
        """Tokens per second, as a multiple of bf16's."""
        return self.bf16 / (
            self.bf16 - self.saved + self.activations + self.weights + self.launches
        )


def main() -> None:
    """Print the table of estimates."""
    result = json.loads(RESULT.read_text())
    print(
        "ESTIMATE of train.fp8 at 1.3B on an H200, in milliseconds a micro-batch. Nothing here was "
        "measured in fp8."
    )
    print(
        f"{'fp8 rate':10} {'micro-batches':>13} {'bf16':>7} {'saved':>6} {'quantize x, dy':>14} "
        f"{'W':>5} "
        f"{'launches':>8} {'speed':>6}"
    )
    for name in RATES:
        for micro_batches in MICRO_BATCHES:
            e = estimate(result, name, micro_batches)
            print(
                f"{name:10} {micro_batches:13} {e.bf16:7.1f} {e.saved:6.1f} {e.activations:14.1f} "
                f"{e.weights:5.1f} "
                f"{e.launches:8.1f} {e.speed:6.3f}"
            )


def estimate(result: dict[str, Any], name: str, micro_batches: int) -> Estimate:
    """Estimate a step with fp8.

    Args:
        result: The measured step in bf16.
        name: Of RATES.
        micro_batches: Micro-batches of an update.
    """
    shape = result["shapes"]["1.3B"]
    profile = result["profile_of_another_process_in_the_same_call"]
    kernels = {kernel["kernel"]: kernel["ms"] for kernel in profile["kernels"]}
    hidden = shape["hidden"]
    layers = shape["num_layers"]
    tokens = shape["micro_batch"] * shape["seq_length"]
    update = sum(kernels[kernel] for kernel in UPDATE_KERNELS)
    parameters = layers * hidden**2 * sum(rows * cols for rows, cols in MATRICES.values())
    head = hidden * shape["vocab"]
    products = sum(ms for kernel, ms in kernels.items() if kernel.startswith("nvjet"))
    rate = 6 * tokens * (parameters + head) / products  # of bf16, over all products of the step
    saved = 0.0
    for matrix, (rows, cols) in MATRICES.items():
        most, smallest = RATES[name]
        bf16 = 4 * tokens * layers * rows * cols * hidden**2 / rate  # forward and input gradient
        saved += bf16 * (1 - 1 / (smallest if matrix == "out" else most))
    elements = tokens * layers * hidden * sum(rows + cols for rows, cols in MATRICES.values())
    launches = layers * len(MATRICES) * (2 + 2 / micro_batches)
    return Estimate(
        name,
        micro_batches,
        profile["kernels_ms"] - update + update / micro_batches,
        saved,
        1e3 * elements * ACTIVATION_BYTES / BANDWIDTH,
        1e3 * parameters * WEIGHT_BYTES / BANDWIDTH / micro_batches,
        1e3 * launches * LAUNCH_GAP,
    )


if __name__ == "__main__":
    main()
