"""Claim: on a GPU hybridpar's memory-bound operators, forward and backward, run at the speed of its memory, and
attention at that of its tensor cores; neither is slower than PyTorch's, torch.compile included.

    python -m benchmarks.gpu_ops                       # --device cpu: a rehearsal, at the tiny size

Each backend of an operator that runs here against PyTorch's operation, eager and under torch.compile. Forward and
backward are captured as a CUDA graph together, so that Python's time does not count; sides run by turns, each for a
few milliseconds. `share of the roof`: the time that the operation's traffic takes at the bandwidth of a copy of 1 GiB,
or attention's operations at the speed of a large matrix product (both measured in the same run), over the time it took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.common import arguments, parse, write_results
from benchmarks.ops import DTYPES, SIZES, TOLERANCE, Operation, Size, compute, gradients_for, operations
from hybridpar.ops import registry

GPU_SIZES = {"345M": Size(8, 1024, 1024, 16, 50304), "1.3B": Size(4, 2048, 2048, 16, 50304),
             "6.7B": Size(2, 2048, 4096, 32, 50304), "tiny": SIZES["tiny"]}
NAMES = {"bias + add + rms_norm": "add_norm", "bias + gelu": "gelu", "bias + swiglu": "swiglu",
         "causal softmax": "softmax", "causal attention": "attention", "cross-entropy": "cross_entropy"}
"""What the registry calls them, where it is not their name here."""
ROUND_S = 5e-3
MEANING = "microseconds of forward and backward: median of the rounds, and their quartiles"


@dataclass(frozen=True)
class Clock:
    """How a device's work is timed."""

    device: str

    def prepared(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """The same work without Python's part, where that can be."""
        if self.device == "cpu":
            return work
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, work: Callable[[], Any], repeat: int) -> float:
        """Of one call, of `repeat` in a row."""
        if self.device == "cpu":
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            return (time.perf_counter() - start) / repeat
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeat

    def race(self, sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        """Seconds of each side in each round, by turns."""
        repeats = {name: max(1, round(ROUND_S / self.seconds(work, 2))) for name, work in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds):
            for name in sides if i % 2 == 0 else reversed(sides):
                times[name].append(self.seconds(sides[name], repeats[name]))
        return times


@dataclass(frozen=True)
class Roof:
    """What the device reaches: bytes read and written by a copy, and operations of a matrix product, a second."""

    bytes_per_s: float
    flops_per_s: dict[str, float]

    @staticmethod
    def measure(clock: Clock, dtypes: list[str], rounds: int) -> Roof:
        size, side = (2**30, 8192) if clock.device == "cuda" else (2**26, 1024)
        a, b = (torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
        copy = statistics.median(clock.race({"copy": lambda: b.copy_(a)}, rounds)["copy"])
        flops = {}
        for name in dtypes:
            x, y = (torch.randn(side, side, dtype=DTYPES[name], device=clock.device) for _ in range(2))
            product = clock.race({"product": lambda x=x, y=y: x @ y}, rounds)["product"]  # type: ignore[misc]
            flops[name] = 2 * side**3 / statistics.median(product)
        return Roof(2 * size / copy, flops)

    def seconds(self, operation: Operation, dtype: str) -> float:
        """The least that the operation may take."""
        itemsize = operation.tensors[0].element_size()
        return max(operation.traffic * itemsize / self.bytes_per_s, operation.flops / self.flops_per_s[dtype])


def measure(clock: Clock, roof: Roof, size_name: str, dtype_name: str, rounds: int) -> list[dict[str, Any]]:
    dtype, cases = DTYPES[dtype_name], []
    for name in operations(SIZES["tiny"], dtype, clock.device):  # one at a time, for memory's sake
        torch._dynamo.reset()
        operation = operations(GPU_SIZES[size_name], dtype, clock.device)[name]
        rows = registry.backends(NAMES.get(name, name))
        functions = {row.name: operation.ours(row.name) for row in rows
                     if row.name != "torch" and row.unsupported(clock.device, dtype) is None}
        functions |= {"eager": operation.eager, "compile": torch.compile(operation.eager)}
        gradients = gradients_for(operation.eager, operation.tensors)
        sides, values = {}, {}
        for side, function in functions.items():
            work = partial(compute, function, operation.tensors, gradients)
            values[side] = sum(t.detach().double().abs().sum().item() for t in work())
            assert abs(values[side] - values[next(iter(values))]) <= TOLERANCE[dtype_name] * values[side], values
            sides[side] = clock.prepared(work)
        times, least = clock.race(sides, rounds), roof.seconds(operation, dtype_name)
        cases.append({
            "case": f"{size_name} {dtype_name} {name}",
            "settings": {"shape": size_name, "dtype": dtype_name, "op": name, "device": clock.device},
            "us": {side: [round(1e6 * q, 2) for q in statistics.quantiles(t, n=4)] for side, t in times.items()},
            "share of the roof": {side: round(least / statistics.median(t), 3) for side, t in times.items()},
        })
        of_roof = cases[-1]["share of the roof"]
        texts = (f"{side} {1e6 * statistics.median(t):.1f} us ({of_roof[side]:.2f})" for side, t in times.items())
        print(f"{cases[-1]['case']:<36}{'  '.join(texts)}", flush=True)
    return cases


def main() -> None:
    parser = arguments(__doc__, rounds=15, shapes=[])
    parser.add_argument("--sizes", nargs="+", choices=GPU_SIZES)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parse(parser)
    args.sizes = args.sizes or (["345M", "1.3B", "6.7B"] if args.device == "cuda" else ["tiny"])
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu rehearses")
    torch.set_num_threads(1)
    clock = Clock(args.device)
    roof = Roof.measure(clock, args.dtypes, args.rounds)
    print(f"copy {roof.bytes_per_s / 1e9:.0f} GB/s; products " + ", ".join(
        f"{name} {flops / 1e12:.2f} Tflop/s" for name, flops in roof.flops_per_s.items()))
    cases = [entry for size in args.sizes for dtype in args.dtypes
             for entry in measure(clock, roof, size, dtype, args.rounds)]
    cases = [{"case": "roof", "settings": {"shape": args.sizes[0]}, "copy_bytes_per_s": roof.bytes_per_s,
              "product_flops_per_s": roof.flops_per_s}, *cases]
    print(write_results("gpu_ops", cases, args, meaning=MEANING, shapes=GPU_SIZES))


if __name__ == "__main__":
    main()
