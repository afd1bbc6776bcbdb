"""Jobs of two hosts: two torchrun agents that know only each other's address, here both on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train.runs import finish, metrics, run_job, steps, write_config

pytestmark = pytest.mark.ranks
LONG = ("--train.num_steps", "12", "--train.save_interval", "5", "--train.eval_interval", "0")


def two_hosts(ranks_each: int, *args: str | Path, restarts: int = 0) -> list[tuple[int, str]]:
    """Exit code and output of each agent of `hybridpar *args`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hosts = []
    for host in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host),
            "--nproc-per-node", str(ranks_each), "--master-addr", "127.0.0.1", "--master-port", str(port),
            "--max-restarts", str(restarts), "-m", "hybridpar", *map(str, args)]
        hosts.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}))
    try:
        return [finish(host, 120.0) for host in hosts]
    finally:
        for host in hosts:
            host.kill()


@pytest.mark.timeout(300)
def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    """To the bit. The pipeline's stages are on different hosts."""
    config, grid = write_config(tmp_path), ("--parallel.tp", "2", "--parallel.pp", "2")
    run_job(4, "train", config, *grid, "--run.name", "one")
    for code, out in two_hosts(2, "train", config, *grid, "--run.name", "two"):
        assert code == 0, out
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert steps(two) == steps(one)
    assert len(steps(two)) == 6
    assert [row.get("val_loss") for row in two] == [row.get("val_loss") for row in one]


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_on_the_other_host_is_named_on_both(tmp_path: Path) -> None:
    """Both end; with --max-restarts both start again. Here tensor parallelism spans the hosts."""
    config = write_config(tmp_path)
    grid = ("--parallel.tp", "2", "--checkpoint.asynchronous", "false")  # so that step 5 is saved when step 6 begins
    kill = ("--inject", "kill rank 1 at step 7 micro-batch 0")
    (first, here), (second, there) = two_hosts(1, "train", config, *grid, *LONG, *kill)
    assert first != 0
    assert second != 0
    assert re.search(r"rank 0 \(stage 0, replica 0, tensor part 0\) lost contact with rank 1 during F12@0", here), here
    assert "rank      : 1 (local_rank: 0)" in there
    assert "Signal 9 (SIGKILL)" in there
    again = "--inject", "kill rank 1 at step 8"
    (first, here), (second, there) = two_hosts(1, "train", config, *grid, *LONG, *again, restarts=1)
    assert (first, second) == (0, 0), here + there
    assert re.findall(r"going on after step (\d+)", here) == ["5", "5"]
    assert "lost contact with rank 1 during" in here
    assert [step for step, _, _ in steps(metrics(tmp_path / "runs" / "run"))] == list(range(1, 13))
