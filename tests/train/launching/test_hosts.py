"""Jobs of two hosts: two torchrun agents that know only each other's address, here both on this
machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch.multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from train.runs import LONG_S, metrics, reserved_port, run_job, steps, write_config

from hybridpar.checkpoint import saved_steps
from hybridpar.cli import main
from hybridpar.train.engine import StepResult
from hybridpar.train.launching import hosts
from hybridpar.train.run import Run

pytestmark = pytest.mark.ranks
Launcher: TypeAlias = multiprocessing.process.BaseProcess
LONG = ("--train.num_steps", "12", "--train.save_interval", "5", "--train.eval_interval", "0")


def two_hosts(
    folder: Path,
    ranks_each: int,
    *args: str | Path,
    restarts: int = 0,
    again: int | None = None,
) -> list[tuple[int, str]]:
    """Exit code and output of each agent of `hybridpar *args`. Agents and ranks are forks, which
    import nothing.

    Each host works in a folder `home` of its own; HOST in an argument is its number. again: the
    host that is lost, and whose command is given again.
    """
    with reserved_port() as port:

        def start(host: int) -> Launcher:
            (folder / f"home{host}").mkdir(exist_ok=True)
            process = multiprocessing.get_context("fork").Process(
                target=_agent,
                args=(
                    folder / f"host{host}",
                    [
                        "--nnodes",
                        "2",
                        "--node-rank",
                        str(host),
                        "--nproc-per-node",
                        str(ranks_each),
                        "--master-addr",
                        "127.0.0.1",
                        "--master-port",
                        str(port),
                        "--max-restarts",
                        str(restarts),
                        "--monitor-interval",
                        "0.1",
                        "hybridpar",
                        *(str(arg).replace("HOST", str(host)) for arg in args),
                    ],
                ),
            )
            process.start()
            return process

        agents = [start(host) for host in range(2)]
        if again is not None:
            agents[again].join(LONG_S)
            agents[again] = start(again)
        for process in agents:
            process.join(LONG_S)
            process.kill()
            process.join()
    return [
        (process.exitcode or 0, (folder / f"host{host}").read_text())
        for host, process in enumerate(agents)
    ]


def _agent(output: Path, args: list[str]) -> None:
    """Like torchrun, but for ranks that are forks."""
    torch.multiprocessing._set_thread_name("pt_elastic")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(output.with_name(output.name.replace("host", "home")))
    _write_to(output)
    config, _, _ = config_from_args(parse_args(args))
    try:
        elastic_launch(replace(config, start_method="fork"), _rank)(
            *args[args.index("hybridpar") + 1 :]
        )
    except ChildFailedError as error:
        sys.exit(str(error))


def _write_to(output: Path) -> None:
    with output.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )


def _rank(*args: str) -> None:
    if code := main(list(args)):
        sys.exit(code)


@pytest.mark.timeout(300)
def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    """To the bit. The pipeline's stages are on different hosts, which have the run folder at
    different places."""
    config = write_config(tmp_path)
    grid = ("--parallel.tp", "2", "--parallel.pp", "2")
    run_job(4, "train", config, *grid, "--run.name", "one")
    for host in range(2):
        (tmp_path / f"home{host}").mkdir()
        (tmp_path / f"home{host}" / f"disk{host}").symlink_to(tmp_path / "runs")
    for code, out in two_hosts(
        tmp_path, 2, "train", config, *grid, "--run.name", "two", "--run.dir", "diskHOST"
    ):
        assert code == 0, out
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert steps(two) == steps(one)
    assert len(steps(two)) == 6
    assert [row.get("val_loss") for row in two] == [row.get("val_loss") for row in one]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_on_the_other_host_is_named_on_both(tmp_path: Path) -> None:
    """Both start again, once; then both end. Here tensor parallelism spans the hosts."""
    config = write_config(tmp_path)
    grid = (
        "--parallel.tp",
        "2",
        "--checkpoint.asynchronous",
        "false",
    )  # so that step 5 is saved when step 6 begins
    kills = ("--inject", "kill rank 1 at step 7 micro-batch 0", "kill rank 1 at step 11")
    (first, here), (second, there) = two_hosts(
        tmp_path, 1, "train", config, *grid, *LONG, *kills, restarts=1
    )
    assert first != 0
    assert second != 0
    assert re.search(
        r"rank 0 \(stage 0, replica 0, tensor part 0\) lost contact with rank 1 during F12@0", here
    ), here
    assert here.count("lost contact with rank 1 during") == 2
    assert re.findall(r"resuming after step (\d+)", here) == ["5"]
    assert "rank      : 1 (local_rank: 0)" in there
    assert "Signal 9 (SIGKILL)" in there
    assert [step for step, _, _ in steps(metrics(tmp_path / "runs" / "run"))][:9] == list(
        range(1, 10)
    )


def disturb(monkeypatch: pytest.MonkeyPatch, marks: Path, **faults: Callable[[], None]) -> None:
    """Has rank 1, which is on the other host, meet each fault once, right after the step that its
    name ends with."""
    healthy = Run._on_step

    def on_step(self: Run, result: StepResult) -> None:
        healthy(self, result)
        for name, fault in faults.items():
            if (
                self.grid.rank == 1
                and name.endswith(f"_{result.step}")
                and not (mark := marks / name).exists()
            ):
                mark.write_text(str(time.time()))
                fault()

    monkeypatch.setattr(Run, "_on_step", on_step)


def lose_host() -> None:
    """Kills the agent of this rank, and the rank: all that a host of one rank has."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_signal_to_one_host_ends_all_and_saves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None starts again, although restarts are left, and the same command goes on to the same
    end."""
    disturb(monkeypatch, tmp_path, signal_7=lambda: os.kill(os.getppid(), signal.SIGTERM))
    config = write_config(tmp_path)
    command = ("train", config, "--parallel.tp", "2", *LONG[:-2], "--train.eval_interval", "20")
    ended = two_hosts(tmp_path, 1, *command, restarts=3)
    for code, out in ended:
        assert code == 1, out
        assert "SignalException" in out
        assert "resuming after step" not in out
    run = tmp_path / "runs" / "run"
    assert sorted(saved_steps(run / "checkpoints")) == [5, 10]
    assert "resuming after step 10" in run_job(2, *command)
    assert [step for step, _, _ in steps(metrics(run))] == list(range(1, 13))


@pytest.mark.thorough(keep=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        pytest.param("num_heads = 3", "model.num_heads", id="found before ranks meet"),
        pytest.param('corpus = ["nothere"]', "nothere: does not exist", id="found together"),
    ],
)
def test_recurring_errors_are_said_once_a_host_and_end_all(
    setting: str, says: str, tmp_path: Path
) -> None:
    """Only the other host's configuration is wrong, and restarts are left."""
    good = write_config(tmp_path).read_text()
    key = setting.partition(" ")[0]
    for host, text in enumerate(
        [good, re.sub(rf"^{key} = .*$", setting, good, flags=re.MULTILINE)]
    ):
        (tmp_path / f"tiny{host}.toml").write_text(text)
    for code, out in two_hosts(
        tmp_path, 2, "train", tmp_path / "tinyHOST.toml", "--parallel.dp", "4", restarts=3
    ):
        assert code == 1, out
        assert out.count("\nhybridpar: ") + out.startswith("hybridpar: ") == 1, out
        assert says in out
        assert "SignalException" in out


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_host_that_stumbles_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank is killed, stopped and hangs, then all of it is lost and its command given again."""
    config = write_config(tmp_path)
    grid = (
        "--parallel.tp",
        "2",
        "--checkpoint.asynchronous",
        "false",
        *LONG[:2],
        "--train.save_interval",
        "2",
    )
    run_job(2, "train", config, *grid, "--run.name", "one")
    disturb(
        monkeypatch,
        tmp_path,
        kill_3=lambda: os.kill(os.getpid(), signal.SIGKILL),
        stop_5=lambda: os.kill(os.getpid(), signal.SIGSTOP),
        hang_7=lambda: time.sleep(2 * LONG_S),
        lose_9=lose_host,
    )
    ended = two_hosts(
        tmp_path,
        1,
        "train",
        config,
        *grid,
        "--run.name",
        "two",
        "--faults.timeout_s",
        "3",
        restarts=9,
        again=1,
    )
    for code, out in ended:
        assert code == 0, out
    assert "rank 1 (stage 0, replica 0, tensor part 1) is stopped, and hangs" in ended[1][1]
    assert "rank 1 (stage 0, replica 0, tensor part 1) hangs" in ended[1][1]
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert steps(two) == steps(one)
    assert [row.get("val_loss") for row in two] == [row.get("val_loss") for row in one]
    assert weights(tmp_path / "runs" / "two") == weights(tmp_path / "runs" / "one") != {}


def weights(run: Path) -> dict[str, bytes]:
    """The files of the last checkpoint that hold tensors."""
    return {
        path.name: path.read_bytes()
        for path in sorted(run.glob("checkpoints/step_00000012/*.safetensors"))
    }


@contextlib.contextmanager
def our_launchers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Launcher]]:
    """Starts scripts/launch.sh's launchers, one a host, as forks; their ranks are real."""
    started: list[Launcher] = []
    monkeypatch.setattr(hosts, "_SAY_EVERY_S", 0.1)
    with reserved_port() as port:

        def start(host: int, *args: str) -> Launcher:
            output = folder / f"host{host}"
            given = [
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--nproc-per-node",
                "1",
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(port),
                "--max-restarts",
                "3",
                str(write_config(folder)),
                *args,
            ]
            launcher = multiprocessing.get_context("fork").Process(
                target=_launch, args=(output, given)
            )
            launcher.start()
            started.append(launcher)
            return launcher

        try:
            yield start
        finally:
            for launcher in started:
                launcher.kill()
                launcher.join()


def _launch(output: Path, args: list[str]) -> None:
    _write_to(output)
    sys.exit(hosts.main(args))


def await_words(path: Path, words: str, times: int = 1) -> None:
    """Waits until a file has these words so often."""
    end = time.monotonic() + LONG_S
    while not path.exists() or path.read_text().count(words) < times:
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_our_launcher_breaks_the_silence_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with our_launchers(tmp_path, monkeypatch) as start:
        second = start(1, "--optim.lr", "fast")
        await_words(tmp_path / "host1", "host 1 of 0 to 1 has waited 0 s for host 0 at 127.0.0.1:")
        await_words(tmp_path / "host1", "it cannot be reached (Connection refused)", 2)
        first = start(0)
        for launcher in (first, second):
            launcher.join(LONG_S)
            assert launcher.exitcode == 1
    here, there = ((tmp_path / f"host{host}").read_text() for host in range(2))
    assert there.count("hybridpar train: --optim.lr fast: must be a number") == 1
    assert re.findall(
        r"hybridpar: this job is over: rank 1 on .* has refused its command line", here
    )


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_our_launcher_ends_all_by_a_signal_before_ranks_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with our_launchers(tmp_path, monkeypatch) as start:
        launchers = [start(host) for host in range(2)]
        children = Path(f"/proc/{launchers[1].pid}/task/{launchers[1].pid}/children")
        while not children.read_text():
            time.sleep(0.05)
        launchers[1].terminate()
        for launcher in launchers:
            launcher.join(LONG_S)
    assert [launcher.exitcode for launcher in launchers] == [1, 143]
    assert re.search(
        "this job is over: host 1, .*, was stopped by SIGTERM", (tmp_path / "host0").read_text()
    )
