"""Claim: on a GPU hybridpar's memory-bound operators, forward and backward, run at the speed of its
memory, and attention at that of its tensor cores; neither is slower than PyTorch's, torch.compile
included.

    python -m benchmarks.gpu_ops                       # --device cpu: a rehearsal, at the tiny size

Each backend of an operator that runs here against PyTorch's operation, eager and under
torch.compile (attention: also the kernels of cuDNN and of flash attention). Forward and backward
are captured as a CUDA graph together, so that Python's time does not count; sides run by turns,
each for a few milliseconds. Passes outside of autograd (gpu_passes.py) are not captured: Python's
time counts where it is more than theirs. `share of the roof`: the time that the traffic takes at
the bandwidth of a copy of 1 GiB, or the operations at the speed of a large matrix product (both
measured in the same run), over the time it took. `copy` is a copy of as many bytes as the operation
has to move: what is left of the roof at this size. `large` is a micro-batch of 16 samples of the
1.3B, far beyond the cache.

--table writes the backends' medians where `auto` looks them up (hybridpar/ops/backends/measured.json), the
reference among them:

    python -m benchmarks.gpu_ops --table                                # for this kind of GPU
    python -m benchmarks.gpu_ops --table --device cpu --sizes one       # for CPUs
    python -m benchmarks.gpu_ops --table new.json                       # a copy of that table with what was measured
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, parse, write_results
from benchmarks.gpu_passes import Pass, able, passes
from benchmarks.ops import (
    DTYPES,
    SIZES,
    TOLERANCE,
    Operation,
    Size,
    compute,
    gradients_for,
    operations,
)
from hybridpar.ops.attention import attention_class
from hybridpar.ops.backends import measured, registry

ROUGH = 0.01
"""Tolerance of torch's passes over lists: its float32 sum of 57 million squares on a CPU is 0.4%
too low."""

GPU_SIZES = (
    {
        "345M": Size(8, 1024, 1024, 16, 50304),
        "1.3B": Size(4, 2048, 2048, 16, 50304),
        "6.7B": Size(2, 2048, 4096, 32, 50304),
        "large": Size(16, 2048, 2048, 16, 50304),
        "one": SIZES["345M"],
        "tiny": SIZES["tiny"],
    }
    | {f"d{d}": Size(4, 2048, 16 * d, 16, 50304) for d in (64, 72, 80, 96, 256)}
    | {f"d{d}-grouped": Size(4, 2048, 16 * d, 16, 50304, num_kv_heads=4) for d in (64, 128)}
)
NAMES = {
    "bias + add + rms_norm": "add_norm",
    "bias + gelu": "gelu",
    "bias + swiglu": "swiglu",
    "causal attention": "attention",
    "cross-entropy": "cross_entropy",
    "qkv split": "split_qkv",
    "AdamW": "optimizer",
    "embedding backward": "embedding",
}
"""The registry's names of operations, where they differ from those here."""
FORWARD = "causal attention forward"
UNCAPTURED = ("cross-entropy",)
"""Operations whose reference waits for the GPU, and so cannot be part of a CUDA graph."""
ROUND_S = 5e-3
ATTENTION = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
"""PyTorch's kernels of attention, and SDPBackend's names of them."""
MEANING = (
    "microseconds of forward and backward, or of a pass: median of the rounds, and their quartiles"
)


@dataclass(frozen=True)
class Clock:
    """How a device's work is timed."""

    device: str

    def prepared(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work` as a CUDA graph on a GPU, so that Python's part takes no time; on a CPU `work`
        itself."""
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
        """Seconds that one call takes, of `repeat` in a row."""
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
        repeats = {
            name: max(1, round(ROUND_S / self.seconds(work, 2))) for name, work in sides.items()
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds):
            for name in sides if i % 2 == 0 else reversed(sides):
                times[name].append(self.seconds(sides[name], repeats[name]))
        return times


@dataclass(frozen=True)
class Roof:
    """Highest speeds of a device: bytes that a copy reads and writes, and operations of a matrix
    product, a second."""

    bytes_per_s: float
    flops_per_s: dict[str, float]

    @staticmethod
    def measure(clock: Clock, dtypes: list[str], rounds: int) -> Roof:
        size, side = (2**30, 8192) if clock.device == "cuda" else (2**26, 1024)
        a, b = (torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
        copy = statistics.median(clock.race({"copy": lambda: b.copy_(a)}, rounds)["copy"])
        flops = {}
        for name in dtypes:
            x, y = (
                torch.randn(side, side, dtype=DTYPES[name], device=clock.device) for _ in range(2)
            )
            product = clock.race({"product": lambda x=x, y=y: x @ y}, rounds)["product"]  # type: ignore[misc]
            flops[name] = 2 * side**3 / statistics.median(product)
        return Roof(2 * size / copy, flops)

    def seconds(self, num_bytes: float, flops: float, dtype: str) -> float:
        """Least seconds that an operation of so many bytes and operations takes."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s[dtype])


@dataclass(frozen=True)
class Where:
    """A size and type that operations are measured with, on a device with this clock and roof."""

    clock: Clock
    roof: Roof
    size: str
    dtype: str
    rounds: int
    reference: bool

    def case(
        self, name: str, sides: dict[str, Callable[[], Any]], num_bytes: float, flops: float
    ) -> dict[str, Any]:
        """Races the sides, prints and returns what came out."""
        times, least = (
            self.clock.race(sides, self.rounds),
            self.roof.seconds(num_bytes, flops, self.dtype),
        )
        of_roof = {side: round(least / statistics.median(t), 3) for side, t in times.items()}
        entry = {
            "case": f"{self.size} {self.dtype} {name}",
            "settings": {
                "shape": self.size,
                "dtype": self.dtype,
                "op": name,
                "device": self.clock.device,
            },
            "us": {
                side: [round(1e6 * q, 2) for q in statistics.quantiles(t, n=4)]
                for side, t in times.items()
            },
            "share of the roof": of_roof,
        }
        texts = (
            f"{side} {1e6 * statistics.median(t):.1f} us ({of_roof[side]:.2f})"
            for side, t in times.items()
        )
        print(f"{entry['case']:<36}{'  '.join(texts)}", flush=True)
        return entry


def measure(where: Where, name: str) -> dict[str, Any]:
    """An operation's forward and backward."""
    torch._dynamo.reset()
    clock = where.clock
    dtype = DTYPES[where.dtype]
    operation = operations(GPU_SIZES[where.size], dtype, clock.device)[name]
    rows = registry.backends(NAMES.get(name, name))
    functions = {
        row.name: operation.ours(row.name)
        for row in rows
        if (
            row.name != "torch"
            or (where.reference and not (clock.device == "cuda" and name in UNCAPTURED))
        )
        and row.unsupported(clock.device, dtype) is None
    }
    functions |= {"eager": operation.eager, "compile": torch.compile(operation.eager)}
    if name == "causal attention" and clock.device == "cuda":
        functions |= attention_kernels(operation)
    gradients = gradients_for(operation.eager, operation.tensors)
    sides = {}
    values = {}
    for side, function in functions.items():
        work = partial(compute, function, operation.tensors, gradients)
        values[side] = total(work())
        check(values, where.dtype)
        sides[side] = clock.prepared(work)
    num_bytes = operation.traffic * dtype.itemsize
    if clock.device == "cuda" and not operation.flops:
        source, target = (
            torch.zeros(int(num_bytes / 2), dtype=torch.uint8, device=clock.device)
            for _ in range(2)
        )
        sides["copy"] = lambda: target.copy_(
            source
        )  # in a CUDA graph, those of 400 MB take half as long again
    return where.case(name, sides, num_bytes, operation.flops)


def measure_attention_forward(where: Where) -> dict[str, Any]:
    """Attention's forward pass alone: two of the seven products."""
    dtype = DTYPES[where.dtype]
    device = where.clock.device
    operation = operations(GPU_SIZES[where.size], dtype, device)["causal attention"]
    own = [name for name in able("attention", device, dtype) if name not in ("torch", "sdpa")]
    functions = {name: operation.ours(name) for name in own}
    functions |= attention_kernels(operation) if device == "cuda" else {"eager": operation.eager}

    def forward(function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return function(*operation.tensors)

    sides = {}
    values = {}
    for side, function in functions.items():
        values[side] = total([forward(function)])
        check(values, where.dtype)
        sides[side] = where.clock.prepared(partial(forward, function))
    return where.case(
        FORWARD, sides, 4 / 11 * operation.traffic * dtype.itemsize, 2 / 7 * operation.flops
    )


def attention_kernels(operation: Operation) -> dict[str, Callable[..., Any]]:
    """PyTorch's kernels of attention that take such tensors, by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def through(backend: Any, *tensors: Any) -> Any:
        with sdpa_kernel(backend):
            return operation.eager(*tensors)

    found: dict[str, Callable[..., Any]] = {}
    for name, constant in ATTENTION.items():
        function = partial(through, getattr(SDPBackend, constant))
        try:
            compute(function, operation.tensors, gradients_for(function, operation.tensors))
            found[name] = function
        except RuntimeError as error:
            print(
                f"no {name} attention for {operation.tensors[0].dtype} "
                f"({str(error).splitlines()[0]})"
            )
    return found


def measure_pass(where: Where, one: Pass) -> dict[str, Any]:
    values: dict[str, float] = {}
    for side, work in one.sides.items():
        values[side] = total(work())
        check(values, where.dtype)
    return where.case(one.name, dict(one.sides), one.num_bytes, one.flops)


def total(tensors: list[torch.Tensor]) -> float:
    return sum(t.detach().double().abs().sum().item() for t in tensors)


def check(values: dict[str, float], dtype: str) -> None:
    """Raises: AssertionError if the last side has computed something else than the first."""
    first, (side, last) = next(iter(values.values())), next(reversed(values.items()))
    tolerance = ROUGH if side == "foreach" else TOLERANCE[dtype]
    assert abs(last - first) <= tolerance * first, values


def write_table(cases: list[dict[str, Any]], device: str, path: Path | None = None) -> None:
    """Write the time of each operation's backends, summed over all sizes, to the table; other times
    in it stay.

    `path`: the table; by default the one that `auto` reads. A new file begins as a copy of that.
    """
    times: dict[str, dict[str, dict[str, float]]] = {}
    for case in cases:
        settings = case["settings"]
        us = {side: quartiles[1] for side, quartiles in case["us"].items()}
        op = NAMES.get(settings["op"], settings["op"])
        names = {row.name for row in registry.backends(op)}
        if op == "attention":
            size = GPU_SIZES[settings["shape"]]
            op = (
                f"{op} "
                f"{attention_class(size.hidden // size.num_heads, grouped=size.num_kv_heads > 0)}"
            )
        dtype = (
            "float32"
            if op == "optimizer"
            else str(DTYPES[settings["dtype"]]).removeprefix("torch.")
        )
        known = times.setdefault(op, {}).setdefault(dtype, {}) if names else {}
        for side in names & us.keys():
            known[side] = round(known.get(side, 0.0) + us[side], 2)
    known_table = Path(str(measured.TABLE))
    path = path or known_table
    table = json.loads((path if path.exists() else known_table).read_text())
    of_device = table.setdefault(measured.device_name(device), {})
    if device == "cuda":
        of_device["capability"] = list(torch.cuda.get_device_capability())
    for op, types in times.items():
        of_device.setdefault(op, {}).update(types)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = arguments(__doc__, rounds=15, shapes=[])
    parser.add_argument("--sizes", nargs="+", choices=GPU_SIZES)
    parser.add_argument("--ops", nargs="+", help="these alone, by their names in the output")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--table",
        nargs="?",
        const=str(measured.TABLE),
        metavar="FILE",
        help="write the times to the table that `auto` goes by, or to a copy of it",
    )
    args = parse(parser)
    args.sizes = args.sizes or (["345M", "1.3B", "6.7B"] if args.device == "cuda" else ["tiny"])
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --device cpu rehearses")
    torch.set_num_threads(1)
    clock = Clock(args.device)
    roof = Roof.measure(clock, args.dtypes, args.rounds)
    print(
        f"copy {roof.bytes_per_s / 1e9:.0f} GB/s; products "
        + ", ".join(
            f"{name} {flops / 1e12:.2f} Tflop/s" for name, flops in roof.flops_per_s.items()
        )
    )
    cases: list[dict[str, Any]] = []

    failed: list[str] = []

    def note(name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Write the table with a case that was just measured: the run may be cut off."""
        try:
            cases.append(work())
        except Exception:
            traceback.print_exc()
            failed.append(name)
            return
        write_results("gpu_ops", [roof_entry, *cases], args, meaning=MEANING, shapes=GPU_SIZES)
        if args.table is not None:
            write_table(cases, args.device, Path(args.table))

    roof_entry = {
        "case": "roof",
        "settings": {"shape": args.sizes[0]},
        "copy_bytes_per_s": roof.bytes_per_s,
        "product_flops_per_s": roof.flops_per_s,
    }
    for size in args.sizes:
        for dtype in args.dtypes:
            where = Where(clock, roof, size, dtype, args.rounds, args.table is not None)
            for one in passes(GPU_SIZES[size], DTYPES[dtype], args.device):
                if args.ops is None or one.name in args.ops:
                    note(one.name, partial(measure_pass, where, one))
            for name in operations(
                SIZES["tiny"], DTYPES[dtype], args.device
            ):  # one at a time, for memory's sake
                if args.ops is None or name in args.ops:
                    note(name, partial(measure, where, name))
            if args.ops is None or FORWARD in args.ops:
                note(FORWARD, partial(measure_attention_forward, where))
    if args.table is not None:
        print(args.table)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
