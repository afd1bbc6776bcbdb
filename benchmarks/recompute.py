"""Claim: to make outputs of norms and activations again costs little time for the memory that it saves.

    python -m benchmarks.recompute        three minutes; on a quiet machine

The same step with pipeline.recompute = "none", "selective" and "all", by turns. `saved`: share of the bytes that a
micro-batch keeps between forward and backward (predicted, which the allocator agrees with), beside what a step takes
longer. Losses must be equal, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import OURS, SHAPES, OurStep, arguments, case, engine_config, parse, race, write_results
from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.memory import predict

MICROBATCHES = 2
WAYS = ("selective", "all")


def kept(config: Config) -> int:
    """Bytes of activations in flight."""
    return predict(config, device=torch.device("cpu"))[0].activations


def cases(shapes: list[str], dtypes: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    for name in shapes:
        for dtype in dtypes:
            shape = SHAPES[name]
            plain = engine_config(shape, num_microbatches=MICROBATCHES, dtype=dtype)
            configs = {OURS: plain} | {
                way: replace(plain, pipeline=replace(plain.pipeline, recompute=way)) for way in WAYS}
            result = race({side: OurStep(config, shape, ProcessGrid()) for side, config in configs.items()}, rounds,
                          tolerance=0.0)
            entry = case(f"{name} {dtype}", result, MICROBATCHES * shape.microbatch_tokens, shape=name, dtype=dtype)
            saved = {way: round(1 - kept(configs[way]) / kept(plain), 4) for way in WAYS}
            for way in WAYS:
                print(f"{entry['case']:<16} {way:<10} saves {saved[way]:.0%} of activations for "
                      f"{entry['ratio'][way]['median'] - 1:+.1%} of the time", flush=True)
            yield entry | {"saved": saved}


def main() -> None:
    args = parse(arguments(__doc__, rounds=7, shapes=["small", "ref"]))
    torch.set_num_threads(1)
    print(write_results("recompute", list(cases(args.shapes, args.dtypes, args.rounds)), args, meaning=(
        "ratio: time of a step that recomputes / that of one that keeps all, median of the ratios of each round, and "
        "their quartiles")))


if __name__ == "__main__":
    main()
