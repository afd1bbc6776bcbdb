"""Parts that benchmarks share: shapes, hybridpar's side of a race, interleaved timing, ranks, and
the result file.

A race: several sides run the same training step by turns, in the same processes, and in another
order in every round:

    round 0   ours  peer        round 1   peer  ours        round 2   ours  peer   ...

The machine's other work and its clock then weigh on all sides alike. A ratio is taken within each
round, and the median over the rounds is reported, with its quartiles. Losses are compared before: a
step that does not compute the same thing has no speed.

Units: seconds inside, milliseconds in the result files. A ratio is peer's time over ours: above 1,
    hybridpar is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.files import as_text
from hybridpar.comm.ranks import run_on_ranks
from hybridpar.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.cpu import cpu_name
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.costs_file import RunCosts, run_costs

RESULTS = Path(__file__).parent / "results"
LR = 3e-4
CLIP = 1.0
SEED = 7
OURS = "hybridpar"
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_MAX_": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Shape:
    """The model and the micro-batch that all sides train; tokens are random, embeddings are not
    tied, no dropout."""

    num_layers: int
    hidden: int
    num_heads: int
    seq_length: int
    vocab: int
    micro_batch: int
    kind: Literal["gpt", "bert"] = "gpt"

    @property
    def section(self) -> dict[str, Any]:
        """The section [model] of a configuration that trains on text, with rotary positions."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_heads": self.num_heads,
            "seq_length": self.seq_length,
            "vocab_size": self.vocab,
            "position": "rotary",
        }

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            kind=self.kind,
            num_layers=self.num_layers,
            hidden_size=self.hidden,
            num_heads=self.num_heads,
            seq_length=self.seq_length,
            vocab_size=self.vocab,
            tie_embeddings=False,
        )

    @property
    def microbatch_tokens(self) -> int:
        return self.micro_batch * self.seq_length


SHAPES = {
    "ref": Shape(8, 512, 8, 256, 8192, 4),
    "small": Shape(8, 256, 4, 128, 4096, 2),
    # the same, with work enough to hide 20 ms
    "small_4": Shape(8, 256, 4, 128, 4096, 4),
    # a micro-batch of scripts/configs/gpt_tiny.toml
    "gpt_tiny": Shape(4, 256, 8, 128, 4096, 1),
    # two equal stages: the head costs as much as a layer
    "balanced": Shape(7, 512, 8, 256, 6656, 4),
    # the same at the size of small
    "balanced_small": Shape(7, 256, 4, 128, 3072, 2),
    # little work for each byte that a stage sends, and for each parameter
    "thin": Shape(2, 256, 4, 128, 1024, 2),
    # a forward of one stage takes some milliseconds
    "mini": Shape(6, 128, 4, 64, 1024, 2),
    # hardly any work, for stages that only wait; an activation is as large as that of small and
    # thin
    "light": Shape(2, 64, 2, 128, 64, 8),
    # 1 GB of weights and Adam's state in fp32
    "85M": Shape(12, 768, 12, 128, 4096, 1),
    # the published ones: on a GPU
    "345M": Shape(24, 1024, 16, 1024, 50304, 8),
    "1.3B": Shape(24, 2048, 16, 2048, 50304, 4),
    "bert_large": Shape(24, 1024, 16, 512, 30592, 8, "bert"),
    # the first on a CPU: a sample at a time
    "345M_1": Shape(24, 1024, 16, 1024, 50304, 1),
    # for trying out a benchmark, not for measuring
    "tiny": Shape(2, 64, 4, 32, 256, 2),
    "tiny_bert": Shape(2, 64, 4, 32, 256, 2, "bert"),
}


class FixedLoader:
    """A few batches, made once and used in turn: both sides read the same ones, and making them is
    in no one's time."""

    num_distinct = 2

    def __init__(
        self,
        shape: Shape,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        device: str = "cpu",
    ):
        synthetic = BatchLoader(
            SyntheticSamples(shape.model, SEED, padding=False),
            micro_batch_size=shape.micro_batch,
            num_microbatches=num_microbatches,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        self.first_sample = synthetic.first_sample
        self._batches = [
            [
                {name: x.to(device) for name, x in synthetic.microbatch(t, j).items()}
                for j in range(num_microbatches)
            ]
            for t in range(self.num_distinct)
        ]
        self._num_targets = dp_size * num_microbatches * shape.microbatch_tokens

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return self._batches[batch % self.num_distinct][index]

    def num_targets(self, batch: int) -> int:
        return self._num_targets

    def pairs(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        """(tokens, labels) of each micro-batch, as a peer takes them."""
        return [(x["tokens"], x["labels"]) for x in self._batches[batch % self.num_distinct]]


def engine_config(
    shape: Shape,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    dtype: str = "fp32",
    split: tuple[int, ...] = (),
    warmup: str = "depth",
    zero_bubble: bool = False,
    device: str = "cpu",
    stage_layout: Literal["loop", "v"] = "loop",
) -> Config:
    """hybridpar's settings: AdamW as torch's defaults, constant rate, global gradient norm clipped
    to 1 as usual."""
    return Config(
        model=shape.model,
        parallel=ParallelConfig(tp, pp, dp),
        pipeline=PipelineConfig(
            schedule=schedule,
            num_microbatches=num_microbatches,
            split=split,
            warmup=warmup,
            split_backward=zero_bubble or stage_layout == "v",
            zero_bubble=zero_bubble,
            stage_layout=stage_layout,
        ),
        optim=OptimConfig(lr=LR, decay="constant", weight_decay=0.01, clip_grad=CLIP),
        train=TrainConfig(
            micro_batch_size=shape.micro_batch, dtype=dtype, seed=SEED, device=device
        ),
    )


class OurStep:
    """One optimizer step of hybridpar's engine a call, the sum of the losses over the grid
    included."""

    def __init__(self, config: Config, shape: Shape, grid: ProcessGrid):
        device = config.train.device
        self.engine = Engine(JobPlan(config), grid, torch.device(device))
        self.loader = FixedLoader(
            shape, config.pipeline.num_microbatches, grid.dp.rank, grid.dp.size, device
        )
        self._last = 0.0

    def __call__(self) -> float:
        self.engine.train(self.loader, 1, self._note)
        return self._last

    def _note(self, result: Any) -> None:
        self._last = result.loss


def record_costs(config: Config, grid: ProcessGrid, loader: FixedLoader, batches: int) -> RunCosts:
    """Trains some batches, the first ones uncounted: what their actions cost. Collectives: called
    on all ranks."""
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    recorder = trace.Recorder(engine.executor, 0, batches + trace.WARMUP)
    engine.train(loader, batches + trace.WARMUP, lambda result: recorder.after_step(result.step))
    recorder.close()
    costs = run_costs(JobPlan(config), trace.gather(recorder, grid))
    assert costs is not None, f"{batches} batches are too few"
    engine.state.memory.close()
    return costs


# -- timing

Step = Callable[[], float]


@dataclass
class Race:
    """Seconds of every round by side: wall time of the slowest rank, and CPU time of all ranks
    together."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)


def race(
    sides: Mapping[str, Step],
    rounds: int,
    *,
    warmup: int = 2,
    tolerance: float,
    repeat: int = 1,
    seconds: float = math.inf,
    compared: int = 0,
) -> Race:
    """Runs `warmup` steps of each side, whose losses must agree, then `rounds` rounds of `repeat`
    timed steps of each.

    `tolerance`: largest relative difference of any side's loss from the first side's, in each
    warm-up step, and in those of rounds that are among the first `compared`. `seconds`: no round
    begins later, but the first.
    Collectives: called on all ranks of the job, if there is one. Raises: AssertionError if losses
        differ.
    """
    result = Race({n: [] for n in sides}, {n: [] for n in sides}, {n: [] for n in sides})
    for _ in range(warmup):
        for name, step in sides.items():
            result.losses[name].append(step())
    check_losses(result.losses, tolerance)
    names = list(sides)
    start = time.perf_counter()
    for i in range(rounds):
        if i and over_ranks([time.perf_counter() - start], "max")[0] > seconds:
            break
        for name in names if i % 2 == 0 else names[::-1]:
            _barrier()
            wall = time.perf_counter()
            cpu = time.process_time()
            for _ in range(repeat):
                loss = sides[name]()
            result.wall[name].append((time.perf_counter() - wall) / repeat)
            result.cpu[name].append((time.process_time() - cpu) / repeat)
            assert loss == loss, f"{name}: the loss is NaN"
            if len(result.losses[name]) < compared:
                result.losses[name].append(loss)
    check_losses(result.losses, tolerance)
    for name in names:
        result.wall[name] = over_ranks(result.wall[name], "max")
        result.cpu[name] = over_ranks(result.cpu[name], "sum")
    return result


def check_losses(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Raises: AssertionError if a side's losses are not those of the first side."""
    (first, expected), *others = losses.items()
    for name, values in others:
        for i, (a, b) in enumerate(zip(expected, values, strict=True)):
            assert abs(a - b) <= tolerance * abs(a), (
                f"step {i}: loss {a} with {first} but {b} with {name}"
            )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def over_ranks(values: Sequence[float], op: str) -> list[float]:
    """The 'max' or 'sum' over all ranks of each value. Collectives: one all-reduce, if there is a
    job."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op])
    return tensor.tolist()


# -- results


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = (
        statistics.quantiles(ratios, n=4, method="inclusive")
        if len(ratios) > 1
        else [ratios[0]] * 3
    )
    return {"median": round(median, 4), "q1": round(q1, 4), "q3": round(q3, 4)}


def ratios(race: Race, over: str, under: str = OURS, times: str = "wall") -> dict[str, float]:
    """Time of side `over` divided by that of side `under`, round by round. Above 1, `under` is
    faster."""
    columns = getattr(race, times)
    return summary([a / b for a, b in zip(columns[over], columns[under], strict=True)])


def case(name: str, race: Race, tokens: int, **settings: Any) -> dict[str, Any]:
    """One entry of a result file: settings, losses, times, and hybridpar's ratio to every other
    side."""
    peers = [side for side in race.wall if side != OURS]
    return {
        "case": name,
        "settings": settings,
        "rounds": len(race.wall[OURS]),
        "ratio": {peer: ratios(race, peer) for peer in peers},
        "ratio_cpu_time": {peer: ratios(race, peer, times="cpu") for peer in peers},
        "tokens_per_s": {
            side: round(tokens / statistics.median(times), 1) for side, times in race.wall.items()
        },
        "warmup_losses": race.losses,
        "wall_ms": {side: [round(1e3 * t, 3) for t in times] for side, times in race.wall.items()},
        "cpu_ms": {side: [round(1e3 * t, 3) for t in times] for side, times in race.cpu.items()},
    }


def print_case(entry: Mapping[str, Any]) -> None:
    """One line a peer: how many times as fast hybridpar is."""
    for peer, r in entry["ratio"].items():
        cpu = entry["ratio_cpu_time"][peer]["median"]
        speeds = entry["tokens_per_s"]
        print(
            f"{entry['case']:<34} vs {peer:<28} {r['median']:5.2f}x  [{r['q1']:.2f}, "
            f"{r['q3']:.2f}]  "
            f"cpu time {cpu:4.2f}x  {speeds[OURS]:6.0f} against {speeds[peer]:6.0f} tokens/s",
            flush=True,
        )


RATIO = "ratio: peer's time / hybridpar's, median of the ratios of each round, and their quartiles"


def write_results(
    claim: str,
    cases: Sequence[Mapping[str, Any]],
    args: argparse.Namespace,
    *,
    meaning: str = RATIO,
    shapes: Mapping[str, Any] = SHAPES,
) -> Path:
    """Writes benchmarks/results/<claim>.json and returns its path.

    `meaning`: what the numbers in it are. `shapes`: dataclasses, by the names in the cases'
    settings, if they have any.
    """
    (folder := Path(args.out)).mkdir(parents=True, exist_ok=True)
    path = folder / f"{getattr(args, 'name', '') or claim}.json"
    if getattr(args, "add", False) and path.exists():
        measured = {c["case"] for c in cases}
        before = json.loads(path.read_text())
        there = {key: before["machine"][key] for key in ("cpu", "cores", "capability", "commit")}
        cases = [
            {"machine": there} | c for c in before["cases"] if c["case"] not in measured
        ] + list(cases)
    document = {
        "claim": claim,
        "meaning": meaning,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": machine(),
        "arguments": vars(args) | {"out": ""},
        "shapes": {
            name: asdict(shapes[name])
            for name in dict.fromkeys(c["settings"]["shape"] for c in cases if "settings" in c)
        },
        "cases": list(cases),
    }
    path.write_text(as_text(document) + "\n")
    return path


def report(
    claim: str,
    cases: Iterable[dict[str, Any]],
    args: argparse.Namespace,
    *,
    show: Callable[[dict[str, Any]], object] = print_case,
    meaning: str = RATIO,
    shapes: Mapping[str, Any] = SHAPES,
) -> list[dict[str, Any]]:
    """Measures the cases of a result file one by one: `show` prints each, and the file is written
    anew.

    Called by all ranks of a job, where they measure together: the first one shows and writes.
    Returns the file's cases.
    """
    found: list[dict[str, Any]] = []
    path = Path()
    first = not dist.is_initialized() or dist.get_rank() == 0
    for each in cases:
        found.append(each)
        if first:
            show(each)
            path = write_results(claim, found, args, meaning=meaning, shapes=shapes)
    assert found, "nothing was measured"
    if first:
        print(path)
        found = json.loads(path.read_text())["cases"]
    return found


def machine() -> dict[str, Any]:
    """Hardware, versions, and what else was running. What git says is None in a copy without its
    history."""

    def git(*args: str) -> str | None:
        try:
            found = subprocess.run(
                ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True
            )
        except FileNotFoundError:
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    changes = git("status", "--porcelain", "--", "../hybridpar", "../benchmarks/*.py")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "commit": os.environ.get("COMMIT") or git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
    }


# -- processes


def arguments(
    description: str | None, *, rounds: int, shapes: Sequence[str], choices: Iterable[str] = SHAPES
) -> argparse.ArgumentParser:
    """The flags that all benchmarks share."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds of each case")
    parser.add_argument("--shapes", nargs="+", choices=list(choices), default=list(shapes))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--name", default="", help="name of the result file; by default that of the benchmark"
    )
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="have glibc keep freed memory, for both sides: "
        "else pages that are given back and taken again cost either side up to 5%%, by luck",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the result file's cases that are not measured again",
    )
    parser.add_argument("--out", default=str(RESULTS), help="folder of the result file")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags. With --keep-memory the process starts over, as glibc reads its settings at the
    start."""
    args = parser.parse_args()
    if args.keep_memory and any(
        os.environ.get(name) != value for name, value in KEEP_MEMORY.items()
    ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEP_MEMORY)
    return args


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Calls `fn(*args)` in `num_ranks` fresh Gloo processes of one thread each, and returns what
    rank 0 returned.

    Raises: HybridparError with the traceback of a rank that failed.
    """
    return run_on_ranks(fn, num_ranks, *args, start="spawn")[0]
