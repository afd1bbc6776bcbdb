import contextlib
import gc
import hashlib
import io
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridpar.train import job as loop
from hybridpar.train.reporting import peak, run_report

_BEGAN = time.monotonic()
_SLOW_FILES = {
    "test_cuda_build.py",
    "test_cuda_emulated.py",
    "test_folders.py",
    "test_instructions.py",
    "test_interpreter.py",
    "test_readme.py",
    "test_reshard.py",
    "test_supervisor.py",
    "test_examples.py",
}
"""Files whose tests run first, so that no worker ends alone with a test of half a minute."""


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
        help="run everything, also what is marked `thorough` or left out of `sampled` matrices; "
        "hypothesis draws other examples in every run",
    )
    parser.addoption(
        "--slice",
        type=_slice,
        metavar="K/N",
        help="run instead the K-th of N shares of what only --thorough runs",
    )
    parser.addoption(
        "--seconds",
        type=float,
        default=float("inf"),
        help="skip the tests that have not begun after this time",
    )


def _slice(text: str) -> tuple[int, int]:
    share, _, shares = text.partition("/")
    if not 1 <= int(share) <= int(shares):
        raise ValueError(text)
    return int(share), int(shares)


def pytest_configure(config: pytest.Config) -> None:
    """Settings of hypothesis: how busy the machine is says nothing of the code, and a change's
    tests end alike everywhere."""
    with contextlib.suppress(ImportError):  # what tests a GPU does without it
        from hypothesis import HealthCheck, settings

        thorough = config.getoption("--thorough")
        settings.register_profile(
            "ours",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            max_examples=60 if thorough else 8,
            derandomize=not thorough,
        )
        settings.load_profile("ours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run leaves out, and on a machine without GPUs what needs one."""
    left_out = set[Any]()
    if not torch.cuda.is_available() and not config.getoption("markexpr"):
        left_out.update(item for item in items if item.get_closest_marker("gpu"))
    if share := config.getoption("--slice"):
        mine = {item for item in _thorough(items) if _share(item, share[1]) == share[0]}
        left_out.update(item for item in items if item not in mine)
    elif not config.getoption("--thorough"):
        left_out.update(_thorough(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.name not in _SLOW_FILES)


def _thorough(items: list[pytest.Item]) -> set[Any]:
    """Return the tests that only --thorough runs."""
    sampled = defaultdict[str, list[Any]](list)
    thorough = defaultdict[str, list[Any]](list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("sampled") is not None:
            sampled[function].append(item)
        if item.get_closest_marker("thorough") is not None and not item.get_closest_marker("gpu"):
            thorough[function].append(item)
    found = set[Any]()
    for rows in sampled.values():
        kept = rows[:: rows[0].get_closest_marker("sampled").args[0]]
        taken = {value for row in kept for value in _values(row)}
        for row in rows:
            if row not in kept and _values(row) <= taken:
                found.add(row)
            taken |= _values(row)
    for rows in thorough.values():
        num_kept = rows[0].get_closest_marker("thorough").kwargs.get("keep", 0)
        kept = [rows[i * len(rows) // num_kept] for i in range(min(num_kept, len(rows)))]
        found.update(row for row in rows if row not in kept)
    return found


def _share(item: pytest.Item, num_shares: int) -> int:
    """Return the share that a test belongs to, from 1."""
    return int(hashlib.sha256(item.nodeid.encode()).hexdigest(), 16) % num_shares + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _BEGAN > item.config.getoption("--seconds"):
        pytest.skip("--seconds have passed")


def pytest_collection_finish() -> None:
    """Keep present objects: no collection looks through them again, nor copies them into a fork."""
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
def _little_beside_training(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave out of all training, on forked ranks too, what takes longer than most runs here: 200
    tokens of text at the end, a plot from a process of its own, and a peak that is measured for
    0.4 s. Tests marked `full_report` keep the plot and the peak."""
    monkeypatch.setattr(loop, "Sampling", partial(loop.Sampling, max_tokens=8))
    if request.node.get_closest_marker("full_report") is None:
        monkeypatch.setattr(run_report, "draw_loss", _draw_nothing)
        monkeypatch.setattr(peak, "_PROBE_SECONDS", 0.0)
        monkeypatch.setattr(peak, "_PROBE_PRODUCTS", 1)
        monkeypatch.setattr(peak, "_PROBE_SIZES", {"cpu": (384,), "cuda": (4096,)})


def _draw_nothing(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n")


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
