"""`fit` starts the processes of its grid as forks, stops when it is asked to, and leaves nobody
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train.runs import LONG_S, fork_ranks

from hybridpar import STOP, CallbackError, ConfigError, HybridparError, Trainer
from hybridpar.checkpoint import saved_steps

DRAW = np.random.default_rng(0)
SAMPLES = [{"x": x, "y": x[0] * x[1]} for x in DRAW.normal(size=(64, 3)).astype(np.float32)]


def modules() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(out[:, 0], batch["y"])


def trainer_of(folder: Path, **sections: Any) -> Trainer:
    """A trainer of a row on two stages, for 6 steps."""
    train = {
        "num_steps": 6,
        "micro_batch_size": 2,
        "device": "cpu",
        "threads": 1,
        "eval_interval": 3,
        "eval_batches": 2,
    }
    settings: dict[str, Any] = {
        "parallel": {"pp": 2},
        "pipeline": {"schedule": "2bw", "num_microbatches": 4},
        "optim": {"lr": 1e-2, "decay": "constant"},
        "run": {"dir": str(folder)},
    }
    settings |= {"loss": loss, "train": train | sections.pop("train", {})}
    return Trainer(
        modules(), datasets={"train": SAMPLES, "valid": SAMPLES[:16]}, **(settings | sections)
    )


def steps_in(folder: Path) -> list[int]:
    return saved_steps(folder / "run" / "checkpoints")


@pytest.mark.ranks
def test_fit_starts_the_ranks_of_its_grid(tmp_path: Path) -> None:
    """Callbacks run there; what comes back is as if one process had trained."""
    handler = signal.getsignal(signal.SIGTERM)
    trainer = trainer_of(tmp_path / "two")
    row = modules()
    before = trainer.evaluate()
    assert not (tmp_path / "two" / "run" / "config.toml").exists()
    seen: list[int] = []
    outcome = trainer.fit(
        on_step=lambda result: (tmp_path / f"{os.getpid()}").touch() or seen.append(result.step)
    )
    assert len([path for path in tmp_path.iterdir() if path.name.isdecimal()]) == 2
    assert (seen, outcome.step, outcome.exit_code) == ([], 6, 0)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ
    alone = trainer_of(
        tmp_path / "one", parallel={"pp": 1}, pipeline={"schedule": "2bw", "num_microbatches": 4}
    )
    expected = alone.fit()
    assert list(outcome.history.losses) == [1, 2, 3, 4, 5, 6]
    assert np.allclose(
        [*outcome.history.losses.values()], [*expected.history.losses.values()], rtol=1e-5
    )
    assert list(outcome.history.validation) == [0, 3, 6]
    assert sum(before.values()) == pytest.approx(outcome.history.validation[0]["val_loss"])
    assert sum(trainer.evaluate().values()) == pytest.approx(
        outcome.history.validation[6]["val_loss"]
    )
    assert sum(trainer.evaluate().values()) == pytest.approx(
        sum(alone.evaluate().values()), rel=1e-5
    )
    on_grids = [
        trainer_of(tmp_path / "two", parallel={"pp": 1, "dp": dp}, train={"eval_batches": 1})
        for dp in (1, 2)
    ]
    one, two = (sum(on_grid.evaluate().values()) for on_grid in on_grids)
    assert one == pytest.approx(two, rel=1e-5), "other samples"
    trained = trainer.state_dict()
    row.load_state_dict(trained)  # strictly
    out = row(torch.tensor(np.stack([sample["x"] for sample in SAMPLES[:16]])))
    labels = {"y": torch.tensor([sample["y"] for sample in SAMPLES[:16]])}
    assert loss(out, labels).item() == pytest.approx(sum(trainer.evaluate().values()), rel=1e-4)


@pytest.mark.thorough
@pytest.mark.ranks
def test_ranks_compute_in_parallel_after_the_program_has(tmp_path: Path) -> None:
    """A plain fork would wait for threads of OpenMP that it has not."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import torch
from torch import nn
import hybridpar
torch.set_num_threads(2)
wide = torch.randn(600, 600)
(wide @ wide).sum()
torch.manual_seed(0)
samples = [{{"x": x, "y": x.sum()}} for x in torch.randn(16, 600)]
trainer = hybridpar.Trainer(
    [nn.Linear(600, 600), nn.Linear(600, 1)], loss=lambda out, batch: ((out[:, 0] - batch["y"]) ** 2).mean(),
    datasets={{"train": samples}}, parallel={{"dp": 2}}, pipeline={{"num_microbatches": 1}},
    run={{"dir": {str(tmp_path)!r}}},
    train={{"num_steps": 2, "micro_batch_size": 8, "threads": 2, "device": "cpu"}})
print("threads", torch.get_num_threads(), "step", trainer.fit().step)
""")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with script.open() as stdin:  # a program without a file, as in a notebook
        done = subprocess.run(
            [sys.executable, "-"],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            env=environment,
            check=False,
        )
    assert done.stdout == "threads 2 step 2\n", done.stderr


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_rank_that_returns_stop_stops_all(tmp_path: Path) -> None:
    """2bw has batches under way; the run goes on later, as if nothing had been."""
    trainer = trainer_of(tmp_path / "run", train={"num_steps": 12, "eval_interval": 0})
    stopped = trainer.fit(
        on_step=lambda result: STOP if os.environ["RANK"] == "1" and result.step == 2 else None
    )
    assert 2 <= stopped.step < 12
    assert (stopped.asked_to_stop, stopped.exit_code, stopped.as_json()["stopped_by"]) == (
        True,
        0,
        "program",
    )
    assert steps_in(tmp_path / "run") == [stopped.step]
    asked = trainer.fit(on_save=lambda folder: None, on_step=lambda result: trainer.request_stop())
    assert stopped.step < asked.step < 12
    assert asked.resumed_from == stopped.step
    finished = trainer.fit()
    assert (finished.step, finished.asked_to_stop) == (12, False)
    whole = trainer_of(tmp_path / "whole", train={"num_steps": 12, "eval_interval": 0}).fit()
    assert whole.history.losses == finished.history.losses


@pytest.mark.thorough
def test_a_stop_from_an_evaluation_comes_at_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, parallel={"pp": 1}, train={"num_steps": 12})
    assert trainer.fit(on_evaluation=lambda step, losses: STOP if step == 0 else None).step == 0
    assert steps_in(tmp_path) == [0]
    outcome = trainer.fit(on_evaluation=lambda step, losses: STOP if step == 3 else None)
    assert (outcome.step, outcome.asked_to_stop) == (3, True)
    assert steps_in(tmp_path)[0] == 3


@pytest.mark.thorough
@pytest.mark.ranks
def test_an_error_of_a_callback_is_its_own_and_comes_after_a_save(
    tmp_path: Path, capfd: Any
) -> None:
    def fail(result: Any) -> None:
        if os.environ["RANK"] == "1" and result.step == 2:
            raise ValueError("of the caller")

    trainer = trainer_of(tmp_path, train={"num_steps": 12, "eval_interval": 0})
    with pytest.raises(
        CallbackError,
        match=r"^rank 1: the callback on_step raised ValueError: of the caller \(step 2\)",
    ) as caught:
        trainer.fit(on_step=fail)
    assert 'raise ValueError("of the caller")' in str(caught.value)
    assert len(steps_in(tmp_path)) == 1
    said = capfd.readouterr().err
    assert "lost contact" not in said
    assert "starting again" not in said
    assert trainer.fit().step == 12


def test_errors_in_one_process_have_their_cause(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("missing")

    trainer = trainer_of(tmp_path, parallel={"pp": 1})
    text = r"^the callback on_save raised KeyError: 'missing' \(step_00000006\)"
    with pytest.raises(CallbackError, match=text) as caught:
        trainer.fit(on_save=fail)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.thorough
@pytest.mark.ranks
def test_evaluate_raises_what_the_rank_to_blame_has_raised(tmp_path: Path) -> None:
    def fail(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if os.environ.get("RANK") == "1" and not out.is_meta:
            raise ZeroDivisionError("on purpose")
        return loss(out, batch)

    trainer = trainer_of(tmp_path, loss=fail)
    with pytest.raises(HybridparError, match=r"^rank 1 (?s:.*)ZeroDivisionError: on purpose"):
        trainer.evaluate()


@pytest.mark.thorough
@pytest.mark.ranks
def test_an_error_of_all_ranks_is_raised_here(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.datasets["valid"] = None
    with pytest.raises(ConfigError, match=r"train\.eval_interval = 3: .*try 0"):
        trainer.fit()
    with pytest.raises(ConfigError, match="datasets = 'valid': missing"):
        trainer.evaluate()

    def fail(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if "RANK" in os.environ and type(out) is Tensor and out.requires_grad:
            raise ZeroDivisionError
        return loss(out, batch)

    trainer = Trainer(
        modules(),
        loss=fail,
        datasets={"train": SAMPLES},
        parallel={"pp": 2},
        faults={"restarts": 0},
        run={"dir": str(tmp_path)},
        train={"micro_batch_size": 2, "device": "cpu", "threads": 1},
    )
    with pytest.raises(HybridparError, match=r"(?s)^rank 1 .*ZeroDivisionError"):
        trainer.fit()


@pytest.mark.ranks
def test_ranks_that_torchrun_started_must_have_equal_modules(tmp_path: Path) -> None:
    def fit() -> None:
        row = modules()
        if os.environ["RANK"] == "1":
            nn.init.zeros_(row[2].bias)
        trainer = Trainer(
            row,
            loss=loss,
            datasets={"train": SAMPLES},
            run={"dir": str(tmp_path)},
            train={"device": "cpu", "micro_batch_size": 2},
            parallel={"pp": 2},
        )
        with pytest.raises(
            HybridparError,
            match=r"rank 1: modules = .*the weights or buffers differ .*try torch\.manual_seed",
        ):
            trainer.fit()

    fork_ranks(2, fit)


def started(folder: Path) -> Any:
    """A fork of this process that trains for long, with the numbers of its ranks as they begin the
    second step."""

    def note(result: Any) -> None:
        time.sleep(0.02)
        if result.step == 2:
            (folder / f"rank{os.getpid()}").touch()

    def fit() -> None:
        outcome = trainer_of(folder, train={"num_steps": 10**6, "eval_interval": 0}).fit(
            on_step=note
        )
        (folder / "outcome").write_text(f"{outcome.stopped_by} {outcome.step}")

    process = get_context("fork").Process(target=fit)
    process.start()
    end = time.monotonic() + LONG_S
    while len([*folder.glob("rank*")]) < 2:
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


def require_gone(folder: Path) -> None:
    end = time.monotonic() + LONG_S
    for path in folder.glob("rank*"):
        while Path("/proc", path.name.removeprefix("rank")).exists():
            assert time.monotonic() < end, f"{path.name} is still there"
            time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_ctrl_c_has_all_ranks_save(tmp_path: Path) -> None:
    process = started(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    process.join(LONG_S)
    assert process.exitcode == 0
    number, step = map(int, (tmp_path / "outcome").read_text().split())
    assert (number, steps_in(tmp_path)) == (signal.SIGINT, [step])
    require_gone(tmp_path)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_ranks_of_a_killed_program_save_and_end(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.kill()
    process.join()
    require_gone(tmp_path)
    assert len(steps_in(tmp_path)) == 1


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """From the last checkpoint, by the supervisor; the program learns of it from stderr alone."""

    def die(result: Any) -> None:
        mark = tmp_path / "killed"
        if os.environ["RANK"] == "1" and result.step == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = trainer_of(tmp_path, train={"save_interval": 2, "eval_interval": 0}).fit(on_step=die)
    assert outcome.step == 6
    assert outcome.resumed_from in (0, 2)
    assert list(outcome.history.losses) == [1, 2, 3, 4, 5, 6]
