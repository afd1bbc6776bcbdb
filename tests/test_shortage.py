"""A command that has no memory or no thread left ends with one line."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from hybridpar import cli
from hybridpar.cli import entry, shortage

CONFIG = Path(__file__).parent.parent / "scripts" / "configs" / "gpt_tiny.toml"


def run(limit_mb: int, *args: str, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that may have so many MB of address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (10**6 * limit_mb, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-m", "hybridpar", *args],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env={**os.environ, **env},
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such limits")
def test_a_small_address_space_is_one_line() -> None:
    """Under the larger limit torch would end the process itself: terminate called after ..
    std::bad_alloc."""
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    cases: tuple[tuple[int, dict[str, str], str], ...] = ((420, {}, "train"), (200, rank, "rank 1"))
    for limit, env, who in cases:
        code, _, err = run(limit, "train", str(CONFIG), **env)
        assert code == 1
        assert err.startswith(f"hybridpar: {who} is out of memory: torch's libraries take ")
        assert err.endswith(
            f"allows a process {limit} MB (ulimit -v); allow more, such as with ulimit -v "
            "unlimited\n"
        )
        assert err.count("\n") == 1
    code, out, _ = run(420, "check", str(CONFIG), "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert run(420, "--version")[0] == 0, "what needs no torch works"


def numpys() -> ImportError:
    """An error like numpy's, which hides that of the loader behind a page of advice."""
    error = ImportError(
        "\n\nIMPORTANT: PLEASE READ THIS FOR ADVICE ON HOW TO SOLVE THIS ISSUE!\n\n"
    )
    error.__cause__ = ImportError("libopenblas.so: failed to map segment from shared object")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "check is out of memory: MemoryError; "),
        (numpys(), "check is out of memory: IMPORTANT: "),
        (
            OSError("libgomp.so.1: failed to map segment from shared object"),
            "check is out of memory: libgomp.so.1",
        ),
        (
            RuntimeError("can't start new thread"),
            "check may start no more threads: can't start new thread; free memory",
        ),
    ],
)
def test_errors_of_an_import_are_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(entry, "require_room", fail)
    assert cli.main(["check", str(CONFIG)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"hybridpar: {said}")
    assert err.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(entry, "require_room", fail)
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main(["check", str(CONFIG)])
    assert not shortage.is_shortage(RuntimeError("thread 3 failed"))


def test_no_memory_for_a_process_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system reports it as an OSError without a file."""

    def parse(args: Sequence[str], speaks: bool) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(entry, "parse", parse)
    assert cli.main(["doctor"]) == 1
    assert "doctor is out of memory" in capsys.readouterr().err
