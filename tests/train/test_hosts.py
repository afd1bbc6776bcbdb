"""Jobs of two hosts: two torchrun agents that know only each other's address, here both on this machine."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from train.runs import LONG_S, metrics, reserved_port, run_job, steps, write_config

from hybridpar.cli import main

pytestmark = pytest.mark.ranks
LONG = ("--train.num_steps", "12", "--train.save_interval", "5", "--train.eval_interval", "0")


def two_hosts(folder: Path, ranks_each: int, *args: str | Path, restarts: int = 0) -> list[tuple[int, str]]:
    """Exit code and output of each agent of `hybridpar *args`. Agents and ranks are forks, which import nothing.

    Each host works in a folder `home` of its own; HOST in an argument is its number.
    """
    with reserved_port() as port:
        hosts = [multiprocessing.get_context("fork").Process(target=_agent, args=(folder / f"host{host}", [
            "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks_each), "--master-addr",
            "127.0.0.1", "--master-port", str(port), "--max-restarts", str(restarts), "--monitor-interval", "0.1",
            "hybridpar", *(str(arg).replace("HOST", str(host)) for arg in args)])) for host in range(2)]
        for host, process in enumerate(hosts):
            (folder / f"home{host}").mkdir(exist_ok=True)
            process.start()
        for process in hosts:
            process.join(LONG_S)
            process.kill()
            process.join()
    return [(process.exitcode or 0, (folder / f"host{host}").read_text()) for host, process in enumerate(hosts)]


def _agent(output: Path, args: list[str]) -> None:
    """As torchrun, but for ranks that are forks."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(output.with_name(output.name.replace("host", "home")))
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    config, _, _ = config_from_args(parse_args(args))
    try:
        elastic_launch(replace(config, start_method="fork"), _rank)(*args[args.index("hybridpar") + 1 :])
    except ChildFailedError as error:
        sys.exit(str(error))


def _rank(*args: str) -> None:
    if code := main(list(args)):
        sys.exit(code)


@pytest.mark.timeout(300)
def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    """To the bit. The pipeline's stages are on different hosts, which have the run folder at different places."""
    config, grid = write_config(tmp_path), ("--parallel.tp", "2", "--parallel.pp", "2")
    run_job(4, "train", config, *grid, "--run.name", "one")
    for host in range(2):
        (tmp_path / f"home{host}").mkdir()
        (tmp_path / f"home{host}" / f"disk{host}").symlink_to(tmp_path / "runs")
    for code, out in two_hosts(tmp_path, 2, "train", config, *grid, "--run.name", "two", "--run.dir", "diskHOST"):
        assert code == 0, out
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert steps(two) == steps(one)
    assert len(steps(two)) == 6
    assert [row.get("val_loss") for row in two] == [row.get("val_loss") for row in one]


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_on_the_other_host_is_named_on_both(tmp_path: Path) -> None:
    """Both start again, once; then both end. Here tensor parallelism spans the hosts."""
    config = write_config(tmp_path)
    grid = ("--parallel.tp", "2", "--checkpoint.asynchronous", "false")  # so that step 5 is saved when step 6 begins
    kills = ("--inject", "kill rank 1 at step 7 micro-batch 0", "kill rank 1 at step 11")
    (first, here), (second, there) = two_hosts(tmp_path, 1, "train", config, *grid, *LONG, *kills, restarts=1)
    assert first != 0
    assert second != 0
    assert re.search(r"rank 0 \(stage 0, replica 0, tensor part 0\) lost contact with rank 1 during F12@0", here), here
    assert here.count("lost contact with rank 1 during") == 2
    assert re.findall(r"going on after step (\d+)", here) == ["5"]
    assert "rank      : 1 (local_rank: 0)" in there
    assert "Signal 9 (SIGKILL)" in there
    assert [step for step, _, _ in steps(metrics(tmp_path / "runs" / "run"))][:9] == list(range(1, 10))
