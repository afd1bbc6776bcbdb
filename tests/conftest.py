import contextlib
import gc
import io
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch

from hybridpar.train import loop, peak


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        type=int,
        default=10,
        help="how often each test of kill -9 kills; 100: a thorough run",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run all cases of the tests that are marked `sampled`; "
        "hypothesis draws other examples in every run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Of hypothesis: how busy the machine is says nothing of the code, and a change's tests end
    alike everywhere."""
    with contextlib.suppress(ImportError):  # what tests a GPU does without it
        from hypothesis import settings

        same = not config.getoption("--thorough")
        settings.register_profile("ours", deadline=None, max_examples=60, derandomize=same)
        settings.load_profile("ours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n)`, keeps every n-th case, and others as far as values would not
    take part else."""
    if config.getoption("--thorough"):
        return
    cases = defaultdict[str, list[Any]](list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[Any]()
    for rows in cases.values():
        sampled = rows[:: rows[0].get_closest_marker("sampled").args[0]]
        taken = {value for row in sampled for value in _values(row)}
        for row in rows:
            if row not in sampled and _values(row) <= taken:
                left_out.add(row)
            taken |= _values(row)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is there by now stays: no collection looks through it again, nor copies it into a
    fork."""
    gc.freeze()


def _values(item: Any) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in item.callspec.params.items()}


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> int:
    """--kills"""
    return int(request.config.getoption("--kills"))


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest):
    """Ranks are processes here; threads inside them would only fight for the cores."""
    torch.set_num_threads(1)
    if request.node.get_closest_marker("ranks") is not None:
        request.getfixturevalue("_warm")


@pytest.fixture(autouse=True)
def _little_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than most of the runs here, on their forked ranks, too: 200 tokens of text
    at the end, and a peak that is measured for 0.15 s."""
    monkeypatch.setattr(loop, "Sampling", partial(loop.Sampling, max_tokens=8))
    monkeypatch.setattr(peak, "_PROBE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def _warm(tmp_path_factory: pytest.TempPathFactory):
    """Loads and sets up here, once, what each rank, a fork, would for itself: half of a short job's
    time."""
    from train.runs import write_config

    from hybridpar.cli import main

    if torch.cuda.is_available():
        return  # autograd with GPUs in it does not survive a fork
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["train", str(write_config(tmp_path_factory.mktemp("warm")))])
    assert code == 0, f"{code}: {said.getvalue()}"


def pytest_unconfigure() -> None:
    gc.unfreeze()
