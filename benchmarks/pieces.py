"""Question: what would be gained if messages between stages were sent in pieces, so that encoding,
sending and decoding overlap?

    python -m benchmarks.pieces

At most what encoding and decoding take, where somebody waits for it. Both are measured, of a
message of 256 KiB of float32, on one thread; schedules.simulate.simulator says what a step takes with
that time on every link, and without it, as if pieces hid all of it. F and B are those of `thin`
(README, slow links), with 2 p micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.common import SHAPES, arguments, engine_config, parse, report
from hybridpar.config import from_mapping
from hybridpar.job import JobPlan
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.simulate.simulator import Costs, simulate
from hybridpar.state.compression.codec import BlockQuantized, Codec
from hybridpar.state.compression.methods.dct import TopK

CODECS: dict[str, Codec] = {
    "int8": BlockQuantized(8),
    "int4": BlockQuantized(4, rotate=True),
    "dct 0.1": TopK(0.1, torch.float32),
}
SECONDS = {"thin": (0.006, 0.012)}
LINKS = {"50 Mbit/s, 5 ms": (50e6, 5e-3), "1 Gbit/s, 0.3 ms": (1e9, 3e-4)}
SCHEDULES = {"2bw": "latency", "1f1b": "depth"}


def coding(codec: Codec, rounds: int) -> tuple[int, float]:
    """Bytes of the message, and seconds of both ways: the fastest of the rounds."""
    x = torch.randn(256, 256)
    out = torch.empty_like(x)
    message = codec.encode(x)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        codec.decode_(out, codec.encode(x))
        times.append(time.perf_counter() - start)
    return message.numel(), min(times)


def gain(shape: str, schedule: str, p: int, link: str, num_bytes: int, seconds: float) -> float:
    """Time of a step over that of one in which encoding and decoding delay nothing, less 1."""
    m, (rate, latency), (forward, backward) = 2 * p, LINKS[link], SECONDS[shape]
    config = from_mapping(
        {"pipeline": {"warmup": SCHEDULES[schedule]}},
        engine_config(SHAPES[shape], pp=p, num_microbatches=m, schedule=schedule),
    )
    job = JobPlan(config)
    plan = make_plan(job.schedule, job.shape, num_batches=12)
    with_it, without = (
        simulate(
            plan,
            Costs(
                forward=forward,
                backward=backward,
                transfer=8 * num_bytes / rate,
                latency=latency + more,
            ),
        ).step_time(m)
        for more in (seconds, 0.0)
    )
    return with_it / without - 1


def cases(shapes: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    for name, codec in CODECS.items():
        num_bytes, seconds = coding(codec, rounds)
        for shape, schedule, p, link in product(shapes, SCHEDULES, (2, 4), LINKS):
            found = gain(shape, schedule, p, link, num_bytes, seconds)
            yield {
                "case": f"{shape} {schedule} p={p} {name}, {link}",
                "gain": round(found, 5),
                "settings": {
                    "shape": shape,
                    "schedule": schedule,
                    "pp": p,
                    "codec": name,
                    "link": link,
                    "bytes": num_bytes,
                    "coding_us": round(1e6 * seconds, 1),
                    "send_us": round(8e6 * num_bytes / LINKS[link][0], 1),
                },
            }


def main() -> None:
    args = parse(arguments(__doc__, rounds=50, shapes=list(SECONDS)))
    torch.set_num_threads(1)
    report(
        "pieces",
        cases(args.shapes, args.rounds),
        args,
        meaning="gain: of a step's time, at most, simulated",
        show=lambda case: print(f"{case['case']:<45}{case['gain']:8.2%}"),
    )


if __name__ == "__main__":
    main()
