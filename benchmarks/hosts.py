"""Benchmarks that run on two hosts and a slow link: network namespaces that scripts/testbed makes,
where it can."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.link_sides import Link

ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "scripts" / "testbed" / "testbed.py"
# as in testbed.py
STATE_VARIABLE = "TESTBED_STATE"
CANNOT_RUN = 77
FREE = "free"
"""A link without limit."""
Jobs = Sequence[tuple[str, int, Sequence[str]]]
"""The link that a job's ranks meet on, how many there are on each host, and flags for them."""


def name_of(link: str) -> str:
    """Name of the link, as in NAME=UP[/DOWN]:DELAY_MS."""
    return link.partition("=")[0]


def on_two_hosts(
    module: str,
    on_host: Callable[..., Any],
    args: argparse.Namespace,
    links: Sequence[str],
    jobs: Jobs = ((FREE, 1, ()),),
    options: Sequence[str] = (),
) -> int:
    """Exit code of a benchmark that starts itself on two hosts: `on_host(args, links)` on all ranks
    of each job.

    links: those of the test bed, besides FREE without a limit. options: for `testbed.py up`. Where
    hosts cannot be made, it says so and does nothing.
    """
    if STATE_VARIABLE in os.environ:
        return _be_a_rank(on_host, args)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    testbed = [sys.executable, str(TESTBED), "--name", f"{module.replace('_', '')}{os.getpid()}"]
    words = [word for link in links for word in ("--link", link)]
    made = subprocess.run([*testbed, "up", *words, *options], stdout=subprocess.DEVNULL).returncode
    if made:
        if made == CANNOT_RUN:
            print(
                f"benchmarks.{module}: skipped, as this machine cannot make the hosts (see above)"
            )
        return 0 if made == CANNOT_RUN else made
    try:
        for link, num_procs, flags in jobs:
            command = [
                "run",
                "--link",
                link,
                str(num_procs),
                "-m",
                f"benchmarks.{module}",
                *sys.argv[1:],
                *flags,
            ]
            if status := subprocess.run([*testbed, *command], cwd=ROOT).returncode:
                return status
        return 0
    finally:
        subprocess.run([*testbed, "down"])


def _be_a_rank(on_host: Callable[..., Any], args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    state = json.loads(Path(os.environ[STATE_VARIABLE]).read_text())
    links = [
        Link(one["name"], min(one["mbit"], one["back_mbit"]), one["delay_ms"], one["pid"])
        for one in state["links"]
    ]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    on_host(args, links)
    dist.barrier()
    dist.destroy_process_group()
    return 0
