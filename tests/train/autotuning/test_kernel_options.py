"""Launch options of kernels: timed once, the same on all ranks with such GPUs, kept in kernels.json
for who resumes."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train.runs import on_ranks, tiny

from hybridpar.config import Launch
from hybridpar.errors import HybridparError
from hybridpar.train import job as loop
from hybridpar.train.autotuning import kernel_options
from hybridpar.train.autotuning.kernel_options import (
    FILE,
    Entries,
    Entry,
    KernelOptions,
    choose,
    fastest,
    prepare,
    time_candidates,
)
from hybridpar.train.launching.launch import Job

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.errors import OutOfResources

from hybridpar.kernels.options import OPTIONS, LaunchOptions

A100 = "NVIDIA A100, torch 2.11.0, triton 3.6.0"
L40S = "NVIDIA L40S, torch 2.11.0, triton 3.6.0"
CANDIDATES = ((64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2))
DEFAULT, SECOND, THIRD = CANDIDATES
KEY = "dq_kernel bfloat16 d128 s2048 causal dropout"
ALONE = Job(Launch(0, 0, 1, 1))


class Gpu:
    """A pretended GPU on which launches of KEY take `us`, by option; an option that is missing does
    not fit."""

    def __init__(self, *us: float | None):
        self.us = dict(zip(CANDIDATES, us, strict=True))
        self.launched: list[Sequence[int]] = []

    def start(self, option: Sequence[int]) -> None:
        if self.us[tuple(option)] is None:
            raise OutOfResources(200_000, 100_000, "shared memory")
        self.launched.append(tuple(option))

    def time(self, launch: Callable[[], None]) -> float:
        launch()
        return self.us[self.launched[-1]]  # type: ignore[return-value]

    def run(self) -> None:
        """A layer's launches: launches of a class with one candidate, and twice of a class with
        several."""
        OPTIONS.launch("one", [DEFAULT], lambda option: None)
        for _ in range(2):
            OPTIONS.launch(KEY, CANDIDATES, self.start)

    def measure(self, known: Entries) -> Entries:
        return time_candidates(self.run, self.time, known)


def never(known: Entries) -> Entries:
    raise HybridparError("only the first rank of a kind measures")  # which others do not wait for


@pytest.fixture(autouse=True)
def _no_choices() -> Any:
    yield
    OPTIONS.use({})


def times(*us: float) -> dict[str, float]:
    return {str(list(one)): time for one, time in zip(CANDIDATES, us, strict=True)}


def test_the_fastest_counts_if_it_is_clearly_faster_than_the_default() -> None:
    assert fastest({"default": 100.0, "other": 97.5, "slow": 120.0}) == "default", (
        "times vary by a percent or two"
    )
    assert fastest({"default": 100.0, "other": 96.0, "third": 95.0}) == "third"
    assert fastest({"default": 100.0}) == "default"
    assert fastest({"default": 49.0, "other": 20.0}) == "default", (
        "short launches vary by more than they differ"
    )


def test_candidates_are_timed_once_and_those_that_do_not_fit_are_left_out() -> None:
    gpu = Gpu(100.0, 80.0, 90.0)
    assert gpu.measure({}) == {KEY: Entry(SECOND, times(100, 80, 90))}
    assert gpu.launched[-2:] == [SECOND, SECOND], "the chosen one computes the result"
    assert len(gpu.launched) == 3 * (1 + kernel_options._WARM + kernel_options._ROUNDS) + 2
    assert Gpu(100.0, None, 90.0).measure({})[KEY].chosen == THIRD
    found = Gpu(None, 80.0, 90.0).measure({})
    assert found[KEY] == Entry(SECOND, {str(list(SECOND)): 80.0, str(list(THIRD)): 90.0})
    assert Gpu(None, None, 90.0).measure({}) == {}, "what alone fits is not kept, and needs no time"
    with pytest.raises(OutOfResources):
        Gpu(None, None, None).measure({})


def test_a_candidate_that_does_not_compile_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Candidates were compiled with one version of Triton; another may refuse them, which must not
    end a run."""

    class Refusing(Gpu):
        refused: tuple[Sequence[int], ...] = (SECOND,)

        def start(self, option: Sequence[int]) -> None:
            if tuple(option) in self.refused:
                raise RuntimeError("PassManager::run failed")
            super().start(option)

    gpu = Refusing(100.0, 80.0, 90.0)
    assert gpu.measure({}) == {
        KEY: Entry(THIRD, {str(list(DEFAULT)): 100.0, str(list(THIRD)): 90.0})
    }
    assert "(64, 32, 4, 2) are passed over: RuntimeError: PassManager::run failed" in caplog.text
    gpu.refused = CANDIDATES
    with pytest.raises(RuntimeError, match="PassManager"):
        gpu.measure({})


def test_the_median_counts_and_candidates_take_turns() -> None:
    """One launch that another program held up does not make a candidate slow."""
    gpu = Gpu(100.0, 80.0, 90.0)
    order = []

    def time(launch: Callable[[], None]) -> float:
        us = gpu.time(launch)
        order.append(gpu.launched[-1])
        return 10 * us if len(order) in (2, 5) else us

    assert time_candidates(gpu.run, time, {})[KEY] == Entry(SECOND, times(100, 80, 90))
    assert order == list(CANDIDATES) * kernel_options._ROUNDS


def test_a_known_entry_is_taken_as_long_as_it_is_a_candidate() -> None:
    known = {KEY: Entry(THIRD, times(1, 1, 1)), "another": Entry(DEFAULT, {})}
    gpu = Gpu(100.0, 80.0, 90.0)
    assert gpu.measure(known) == {KEY: known[KEY]}
    assert set(gpu.launched) == {THIRD}
    assert gpu.measure({KEY: Entry((7, 7, 7, 7), {})})[KEY].chosen == SECOND, (
        "of an earlier version"
    )


def test_a_launch_without_a_choice_takes_the_first_that_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = LaunchOptions()
    gpu = Gpu(None, None, 90.0)
    for _ in range(2):
        options.launch(KEY, CANDIDATES, gpu.start)
    assert gpu.launched == [THIRD, THIRD]
    assert [record.getMessage() for record in caplog.records] == [
        f"{KEY}: out of resource: shared memory, Required: 200000, Hardware limit: 100000. "
        "Reducing block sizes or "
        f"`num_stages` may help.; launched with {THIRD} instead"
    ]
    options.use({KEY: SECOND})
    options.launch(KEY, CANDIDATES, Gpu(100.0, 2.0, 3.0).start)
    options.launch(KEY, CANDIDATES, gpu.start)
    assert gpu.launched == [THIRD, THIRD, THIRD], "a chosen option that does not fit is passed over"
    with pytest.raises(OutOfResources):
        LaunchOptions().launch(KEY, CANDIDATES, Gpu(None, None, None).start)


def test_choices_of_one_run_are_not_those_of_the_next() -> None:
    options = LaunchOptions()
    gpu = Gpu(100.0, 100.0, 100.0)
    for chosen in ({KEY: THIRD}, {}, {KEY: SECOND}):
        options.use(chosen)
        options.launch(KEY, CANDIDATES, gpu.start)
    assert gpu.launched == [THIRD, DEFAULT, SECOND]


def chosen_by(
    job: Job,
    folder: Path,
    kind: str,
    measure: Callable[[Entries], Entries],
    said: list[str] | None = None,
) -> KernelOptions:
    found = choose(job, folder, (lambda line: None) if said is None else said.append, kind, measure)
    if job.launch.rank == 0:
        found.write(folder, print if said is None else said.append)
    return found


def test_all_ranks_take_what_the_first_one_of_their_kind_chose(tmp_path: Path) -> None:
    """Three kinds of rank: with an A100, with an L40S, and without Triton."""
    lock = threading.Lock()  # OPTIONS is of a process, and these ranks are threads of one

    def of(job: Job) -> KernelOptions:
        kind = (L40S, A100, "", A100, L40S)[job.launch.rank]
        us = {0: (900.0, 900.0, 500.0), 1: (900.0, 500.0, 900.0)}.get(job.launch.rank)

        def measure(known: Entries) -> Entries:
            if us is None:
                return never(known)
            with lock:
                return Gpu(*us).measure(known)

        return chosen_by(job, tmp_path, kind, measure)

    assert [found.used for found in on_ranks(5, of)] == [
        {KEY: THIRD},
        {KEY: SECOND},
        {},
        {KEY: SECOND},
        {KEY: THIRD},
    ]
    kept = json.loads((tmp_path / FILE).read_text())
    assert kept == {
        L40S: {KEY: {"chosen": list(THIRD), "us": times(900, 900, 500)}},
        A100: {KEY: {"chosen": list(SECOND), "us": times(900, 500, 900)}},
    }
    later = [
        found.used
        for found in on_ranks(
            2,
            lambda job: chosen_by(
                job,
                tmp_path,
                A100,
                lambda known: (
                    Gpu(500.0, 900.0, 900.0).measure(known)
                    if job.launch.rank == 0
                    else never(known)
                ),
            ),
        )
    ]
    assert later == [{KEY: SECOND}] * 2, "a run that resumes has the options that it began with"
    assert json.loads((tmp_path / FILE).read_text()) == kept


def _in_a_process(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    job = Job(
        Launch(rank, rank, 2, 2),
        dist.PrefixStore("options", dist.distributed_c10d._get_default_store()),
    )
    gpu = Gpu(900.0, 500.0, 900.0) if rank == 0 else Gpu(900.0, 900.0, 500.0)
    return dict(chosen_by(job, Path(folder), A100, gpu.measure).used)


@pytest.mark.ranks
def test_ranks_that_would_choose_differently_end_with_the_same(tmp_path: Path) -> None:
    assert run_ranks(_in_a_process, 2, str(tmp_path)) == [{KEY: SECOND}] * 2


def test_a_failure_on_the_rank_that_measures_is_raised_on_all(tmp_path: Path) -> None:
    def of(job: Job) -> KernelOptions:
        def measure(known: Entries) -> Entries:
            raise HybridparError("no room")

        return chosen_by(job, tmp_path, A100, measure)

    assert set(map(str, on_ranks(3, of))) == {"no room"}


def test_one_line_says_what_is_not_the_default(tmp_path: Path) -> None:
    said: list[str] = []
    chosen_by(ALONE, tmp_path, A100, Gpu(100.0, 80.0, 90.0).measure, said)
    chosen_by(ALONE, tmp_path, A100, never_timed, said)
    how = f"(rows, keys, warps, stages): {KEY}: [64, 32, 4, 2], 1.25 x as fast as [64, 64, 4, 3]"
    assert said == [
        f"kernels on NVIDIA A100, {where} {how}" for where in ("timed here", f"as {FILE} has them")
    ]
    said.clear()
    chosen_by(ALONE, tmp_path / "another", A100, Gpu(100.0, 99.0, 98.0).measure)
    assert said == []


def never_timed(known: Entries) -> Entries:
    def time(launch: Callable[[], None]) -> float:
        raise AssertionError("timed")

    return time_candidates(Gpu(100.0, 2.0, 3.0).run, time, known)


def test_nothing_is_kept_where_nothing_has_several_candidates(tmp_path: Path) -> None:
    for kind, measure in (("", never), (A100, lambda known: {})):
        assert chosen_by(ALONE, tmp_path, kind, measure).used == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        '{"a": 1}',
        json.dumps({A100: {KEY: {"chosen": "x", "us": {}}}}),
        json.dumps({A100: {KEY: {"chosen": [64, 32, 4, 2]}}}),
        json.dumps({A100: {KEY: {"chosen": [1], "us": {"a": "b"}}}}),
        "[" * 100_000,
        " " * (1 << 21),
    ],
    ids=range(9),
)
def test_a_damaged_file_is_named_and_measured_anew(damaged: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(damaged)
    said: list[str] = []
    assert chosen_by(ALONE, tmp_path, A100, Gpu(900.0, 500.0, 900.0).measure, said).used == {
        KEY: SECOND
    }
    assert said[0].startswith(f"{tmp_path / FILE} cannot be read (")
    assert "restore the earlier file and start again" in said[0]
    assert json.loads((tmp_path / FILE).read_text())[A100][KEY]["chosen"] == list(SECOND)


@pytest.mark.parametrize(
    "entry",
    [
        {"chosen": [], "us": {}},
        {"chosen": [64, 32], "us": {}},
        {"chosen": [64, 32, 4, 2], "us": {}},
        {"chosen": [64, 32, 4, 2], "us": {str(list(DEFAULT)): 0.0, str(list(SECOND)): 0.0}},
        {"chosen": [64, 32, 4, 2], "us": {str(list(DEFAULT)): float("nan"), "another": -100.0}},
    ],
)
def test_entries_with_other_options_or_times_do_no_harm(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(json.dumps({A100: {KEY: entry}}))
    assert chosen_by(ALONE, tmp_path, A100, Gpu(900.0, 500.0, 900.0).measure, []).used == {
        KEY: SECOND
    }


def test_a_file_of_another_gpu_or_version_is_kept_and_does_not_count(tmp_path: Path) -> None:
    said: list[str] = []
    chosen_by(ALONE, tmp_path, L40S, Gpu(900.0, 900.0, 500.0).measure, said)
    newer = L40S.replace("3.6.0", "3.7.0")
    for kind, us, used in (
        (A100, (900.0, 500.0, 900.0), SECOND),
        (newer, (100.0, 900.0, 900.0), DEFAULT),
        (L40S, (100.0, 900.0, 900.0), THIRD),
    ):
        assert chosen_by(ALONE, tmp_path, kind, Gpu(*us).measure, said).used == {KEY: used}
    assert set(json.loads((tmp_path / FILE).read_text())) == {L40S, A100, newer}
    assert (
        f"{tmp_path / FILE} has no times of {A100}, but of {L40S}: its kernels are timed here"
        in said
    )


def test_a_folder_that_cannot_be_written_to_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(kernel_options, "write_text", refuse)
    said: list[str] = []
    assert chosen_by(ALONE, tmp_path, A100, Gpu(900.0, 500.0, 900.0).measure, said).used == {
        KEY: SECOND
    }
    assert said[-1].startswith(
        f"{tmp_path / FILE} cannot be written (Read-only file system): when this run resumes,"
    )


def test_a_process_uses_what_its_run_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(900.0, 500.0, 900.0)
    monkeypatch.setattr(kernel_options, "_kind", lambda device: A100)
    monkeypatch.setattr(kernel_options, "_attend", lambda config, device: gpu.run())
    monkeypatch.setattr(kernel_options, "_time", gpu.time)
    monkeypatch.setattr(kernel_options, "triton_missing", lambda *args: None)
    config = tiny(tmp_path)
    device: Any = SimpleNamespace(type="cuda")
    assert prepare(config, ALONE, device, print).used == {KEY: SECOND}
    OPTIONS.launch(KEY, CANDIDATES, gpu.start)
    assert gpu.launched[-1] == SECOND
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert prepare(config, ALONE, device, print).used == {}, (
        "what is timed may differ from run to run"
    )
    OPTIONS.launch(KEY, CANDIDATES, gpu.start)
    assert gpu.launched[-1] == DEFAULT
    assert prepare(config, ALONE, torch.device("cpu"), print) == KernelOptions({})


def test_a_run_chooses_before_anything_is_measured_and_writes_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    autotune = loop.autotune
    begin = loop.run_folder.begin

    def note(name: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append(name + " with a file" * (tmp_path / "runs" / "tiny" / FILE).exists())
            return then(*args, **kwargs)

        return noted

    config = tiny(tmp_path, train={"num_steps": 1, "eval_interval": 0})
    path = config.run.folder / FILE
    options = KernelOptions({A100: {KEY: Entry(SECOND, {})}}, is_new=True)
    monkeypatch.setattr(loop.kernel_options, "prepare", note("choose", lambda *args: options))
    monkeypatch.setattr(loop, "autotune", note("autotune", autotune))
    monkeypatch.setattr(loop.run_folder, "begin", note("begin", begin))
    loop.train(config, Launch(0, 0, 1, 1))
    assert order == ["choose", "autotune", "begin"]
    assert json.loads(path.read_text()) == {A100: {KEY: {"chosen": list(SECOND), "us": {}}}}
