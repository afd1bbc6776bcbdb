"""Runs every benchmark, one after the other: `python -m benchmarks [--rounds N]`, an hour on 2
cores."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

# What each benchmark measures here, at moderate size; more with its own flags
# (`python -m benchmarks.pipeline --help`).
RUNS = (
    ("ops",),
    ("single",),
    ("generate",),
    ("tensor_parallel",),
    ("data_parallel", "--microbatches", "2"),
    ("packed_attention",),
    ("context_parallel",),
    ("compression",),
    ("pipeline", "--shapes", "small", "--name", "pipeline_small"),
    (
        "pipeline",
        "--shapes",
        "balanced",
        "--schedules",
        "2bw",
        "--others",
        "--name",
        "pipeline_balanced",
    ),
    (
        "pipeline",
        "--shapes",
        "balanced_small",
        "--dtypes",
        "fp32",
        "--schedules",
        "interleaved",
        "--microbatches",
        "4",
        "8",
        "--name",
        "interleaved",
    ),
    ("simulator",),
    ("placement",),
    ("planner",),
    ("checkpoint", "--load-rounds", "2"),
    ("recovery", "--jobs", "1"),  # a quarter of an hour
    ("kills",),  # ten minutes
    ("host_overlap",),
    ("slow_link",),  # needs root, else it is skipped
    ("sites",),  # as well
    ("link_peers",),  # as well
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs every benchmark, one after the other.")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each case")
    args, others = parser.parse_known_args()
    failed = []
    for name, *flags in RUNS:
        start = time.monotonic()
        print(f"== {name}", flush=True)
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{name}",
            "--rounds",
            str(args.rounds),
            *flags,
            *others,
        ]
        if subprocess.run(command).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
