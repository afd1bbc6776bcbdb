"""Figures 8 and 12 of PipeDream-2BW's paper (arXiv 2006.09503v3), simulated: points that were read
off them, by eye and good for a tenth, and what the text says of them, which is faster and what has
room. `benchmarks.paper` writes both beside the ratios.

Figure 8: 2bw, GPT 1.3B, 64 V100s, by depth d, micro-batch b and batch (sections 5.2 and 5.4).
Figure 12: one pipeline of eight V100s, 1.3B and 2.2B, by micro-batch, with and without
recomputation (appendix B.2); the batch is not said there: it is that of figure 6.

Small micro-batches are slow there because the CPUs take longer to launch a layer's kernels than the
V100s to run them. The seconds of a launch (`Device.launch`) are chosen so that b = 1 and 2 are as
read; no other number is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

from benchmarks.paper_systems import Machine, Setting, fits, memory_bytes, throughput

BATCHES = (64, 128, 256, 512, 1024, 2048)
SIZES = (1, 2, 4, 8, 16, 32)
READ = {
    Setting("gpt", "1.3b", 1, 8, 256, 1): 31,
    Setting("gpt", "1.3b", 1, 8, 256, 2): 47,
    Setting("gpt", "1.3b", 1, 8, 256, 4): 58,
    Setting("gpt", "1.3b", 1, 8, 256, 8): 63,
    Setting("gpt", "1.3b", 1, 8, 256, 16): 66,
    Setting("gpt", "1.3b", 1, 8, 256, 1, recompute=False): 40,
    Setting("gpt", "1.3b", 1, 8, 256, 2, recompute=False): 57,
    Setting("gpt", "1.3b", 1, 8, 256, 4, recompute=False): 67,
    Setting("gpt", "1.3b", 8, 8, 2048, 1): 160,
    Setting("gpt", "1.3b", 8, 4, 2048, 1): 235,
    Setting("gpt", "1.3b", 8, 8, 2048, 32): 285,
}
"""Sequences a second of 2bw, by setting. Of each curve the slowest point is first."""
MISSED = "12b: the fastest has recomputation"
"""Does not hold: the simulated speed depends less on the micro-batch than it must have there."""


def figure_8(depth: int, micro_batch: int) -> Iterator[Setting]:
    """A curve, as far as a pipeline has as many micro-batches as 2bw needs."""
    for batch in BATCHES:
        setting = Setting("gpt", "1.3b", 8, depth, batch, micro_batch)
        if setting.num_microbatches >= depth:
            yield setting


def figure_12(size: str, *, recompute: bool) -> Iterator[Setting]:
    """A curve, as far as memory reaches."""
    for b in SIZES:
        setting = Setting("gpt", size, 1, 8, 256, b, recompute)
        if has_room(setting):
            yield setting


def has_room(setting: Setting) -> bool:
    return fits(setting, "2bw", setting.num_microbatches)


@cache
def speed(setting: Setting) -> float:
    """Sequences a second."""
    return throughput(setting, "2bw", Machine())


def _speeds_8(depth: int, micro_batch: int) -> list[float]:
    return [speed(setting) for setting in figure_8(depth, micro_batch)]


def _recomputation_wins(size: str) -> bool:
    again, once = (
        max(map(speed, figure_12(size, recompute=recompute))) for recompute in (True, False)
    )
    return again > once


def _most_overhead() -> float:
    """Largest time with recomputation over that without, at equal micro-batches."""
    return max(
        speed(once) / speed(Setting("gpt", size, 1, 8, 256, once.micro_batch))
        for size in ("1.3b", "2.2b")
        for once in figure_12(size, recompute=False)
    )


def _gain(depth: int) -> float:
    least, *_, most = _speeds_8(depth, 1)
    return most / least


STATEMENTS: dict[str, Callable[[], bool]] = {
    "8: every curve rises with the batch": lambda: all(
        a < b for depth in (4, 8) for a, b in pairwise(_speeds_8(depth, 1))
    ),
    "8: most where replicas are on several servers": lambda: _gain(4) > _gain(8),
    "8: at depth 8 micro-batches of 32 are faster": lambda: (
        _speeds_8(8, 32)[-1] > _speeds_8(8, 1)[-1]
    ),
    "8: at equal micro-batches the deeper is slower": lambda: (
        _speeds_8(8, 1)[-1] < _speeds_8(4, 1)[-1]
    ),
    "8: depth 4 has no room for micro-batches of 32": lambda: (
        not has_room(Setting("gpt", "1.3b", 8, 4, 2048, 32))
    ),
    "12: recomputation takes at most a third": lambda: _most_overhead() < 4 / 3,
    "12a: the fastest has no recomputation": lambda: not _recomputation_wins("1.3b"),
    MISSED: lambda: _recomputation_wins("2.2b"),
}


def as_read() -> Iterator[dict[str, object]]:
    """Every point of READ: what the figure and the simulator say."""
    for setting, read in READ.items():
        yield {
            "setting": setting.name,
            "depth": setting.depth,
            "micro_batch": setting.micro_batch,
            "recompute": setting.recompute,
            "figure": read,
            "simulated": round(speed(setting), 1),
            "error": round(speed(setting) / read - 1, 4),
        }


def rows() -> Iterator[dict[str, object]]:
    """All points, simulated."""
    curves = {f"8, d={d} b={b}": figure_8(d, b) for d, b in ((4, 1), (8, 1), (8, 8), (8, 32))} | {
        f"12, {size}, {'with' if again else 'without'} recomputation": figure_12(
            size, recompute=again
        )
        for size in ("1.3b", "2.2b")
        for again in (True, False)
    }
    for name, curve in curves.items():
        yield {
            "curve": name,
            "points": [
                {
                    "batch": s.batch,
                    "micro_batch": s.micro_batch,
                    "sequences_per_s": round(speed(s), 1),
                    "memory_gb": round(1e-9 * memory_bytes(s, "2bw", s.num_microbatches), 1),
                }
                for s in curve
            ],
        }
