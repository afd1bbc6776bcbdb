"""If Triton, or one of its kernel modules, cannot be used on a GPU, there is a warning, and the
other operators run on it.

The GPU is pretended: nothing is launched.
"""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from hybridpar.cli import doctor
from hybridpar.ops.backends import libraries, measured, registry
from hybridpar.ops.backends.libraries import TritonLibrary, load_triton

pytest.importorskip("triton")

NUMBERS = count()
"""A namespace of operators can be defined only once in a process."""


def namespace() -> str:
    return f"hybridpar_stand_in_{next(NUMBERS)}"


def launches() -> None:
    """A probe that works."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU without measured times, and that this process has not looked at
    Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(measured, "find", lambda *_: measured.Times({}, "not measured"))
    monkeypatch.setattr(libraries, "triton_is_interpreted", lambda: False)


def use(monkeypatch: pytest.MonkeyPatch, found: TritonLibrary) -> TritonLibrary:
    monkeypatch.setattr(libraries, "triton_library", lambda: found)
    return found


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (
            "import torch\nx = torch.new_in_another_version",
            "AttributeError: module 'torch' has no attribute",
        ),
        ("def broken(:", "SyntaxError: "),
        (
            "def made_up(x):\n    return x",
            "ValueError: ",
        ),  # no types, so no operator can be made of it
    ],
    ids=["import", "attribute", "syntax", "operator"],
)
def test_a_broken_module_takes_no_other_module_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cause: str
) -> None:
    package = namespace()
    library = namespace()
    folder = tmp_path / package
    folder.mkdir()
    good = (
        "import torch\nOPERATORS = {{'{0}': ()}}\n\n\n"
        "def {0}(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
    )
    (folder / "__init__.py").touch()
    (folder / "alpha.py").write_text(good.format("first"))
    (folder / "middle.py").write_text(
        f'OPERATORS = {{\n    "made_up": (),\n    "made_up_back_": ("x",)}}\n{text}\n'
    )
    (folder / "omega.py").write_text(good.format("last"))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_triton(package, library, launches)
    assert list(found.broken) == ["middle"]
    assert found.broken["middle"].startswith(cause), found.broken
    assert found.missing == {"made_up": "middle", "made_up_back_": "middle"}
    for name in ("first", "last"):
        assert found.reason([name]) is None
        assert getattr(getattr(torch.ops, library), name)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "kernels/middle.py cannot be imported" in str(found.reason(["first", "made_up_back_"]))


@pytest.mark.parametrize(
    ("module", "lost"),
    [
        ("rotary", {"rotary", "split_qkv"}),
        ("norm", {"layer_norm", "rms_norm", "add_norm"}),
        (
            "residual",
            {"layer_norm", "rms_norm", "add_norm", "bias_dropout_add"},
        ),  # which norm imports
        ("attention", {"attention"}),
    ],
)
def test_only_its_own_operations_run_without_triton(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    lost: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in [name for name in sys.modules if name.startswith("hybridpar.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(
            sys.modules["hybridpar.kernels"], name.rpartition(".")[2], raising=False
        )
    monkeypatch.setitem(sys.modules, f"hybridpar.kernels.{module}", None)  # type: ignore[arg-type]
    found = use(monkeypatch, load_triton("hybridpar.kernels", namespace(), launches))
    with caplog.at_level(logging.WARNING):
        taken = {
            op: registry.select(op, "auto", "cuda", torch.float32).name
            for op in registry.ops()
            if any(row.name == "triton" for row in registry.backends(op))
        }
    without = {op for op, name in taken.items() if name != "triton"}
    assert without == lost
    (record,) = caplog.records
    said = record.getMessage()
    assert f"kernels/{module}.py cannot be imported (ModuleNotFoundError" in said
    named = re.search(r"run without Triton, which is slower: (.*?)\. ", said)
    assert named is not None, said
    assert {one.partition(" ")[0] for one in named[1].split(", ")} == lost
    assert "Triton 3." in said
    assert "tested with 3.6 to" in said
    assert module in found.broken


@pytest.mark.parametrize(
    ("error", "problem", "help_with_it"),
    [
        (
            ModuleNotFoundError("No module named 'triton'"),
            "Triton cannot be imported",
            'pip install "triton>=3.6"',
        ),
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
            "Triton cannot launch a kernel (RuntimeError: Failed to find C compiler",
            "Install a C compiler",
        ),
        (
            subprocess.CalledProcessError(1, ["gcc", "main.c"]),
            "returned non-zero exit status 1",
            "python3-dev",
        ),
        (
            AttributeError("module 'triton' has no attribute 'knobs'"),
            "has no attribute 'knobs'",
            "tested with 3.6 to",
        ),
    ],
    ids=["triton", "compiler", "headers", "version"],
)
def test_a_gpu_on_which_nothing_can_be_launched(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    problem: str,
    help_with_it: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def probe() -> None:
        raise error

    use(monkeypatch, load_triton("hybridpar.kernels", namespace(), probe))
    with caplog.at_level(logging.WARNING):
        libraries.examine_triton(warn=True)
        for op in registry.ops():
            row = registry.select(op, "auto", "cuda", torch.float32)
            assert row.name in ("cuda", "torch"), op
    (record,) = caplog.records  # one warning, whatever the number of operations
    said = record.getMessage()
    for expected in (problem, "gelu (torch)", "layer_norm (torch)", help_with_it):
        assert expected in said


def test_the_probe_is_of_this_package_and_needs_a_driver() -> None:
    """Without a GPU it fails, which is what shows that it launches something."""
    if torch.cuda.is_available():
        libraries._launch_probe()
        return
    with pytest.raises(RuntimeError, match=r"(?i)driver|active|interpreter"):
        libraries._launch_probe()


def test_a_launcher_that_cannot_be_compiled_is_found_at_setup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton looks for the compiler at the first launch; its own message is what the user reads."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    build = importlib.import_module("triton.runtime.build")
    find = getattr(build, "_find_compiler", None)
    if find is None:
        pytest.skip("this Triton finds its compiler elsewhere")
    find.cache_clear()
    with pytest.raises(RuntimeError) as caught:
        find("c")
    find.cache_clear()
    assert "Install a C compiler" in libraries.remedy(libraries._in_one_line(caught.value))


def test_doctor_says_it(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = use(
        monkeypatch,
        TritonLibrary(failure="Triton cannot launch a kernel (RuntimeError: no C compiler)"),
    )
    report = {"built": {"hybridpar._C": "yes"}, "triton": doctor._triton()}
    assert found.is_told
    assert "there is a GPU, but Triton's kernels cannot all run: Triton cannot launch" in str(
        doctor.problem(report)
    )
    assert "Install a C compiler" in str(doctor.problem(report))
    use(monkeypatch, TritonLibrary())
    assert doctor.problem({**report, "triton": doctor._triton()}) is None


def test_the_passes_of_an_operation_are_its_own() -> None:
    assert libraries.passes_of("layer_norm") == ("norm", "norm_backward")
    assert libraries.passes_of("bias_dropout_add") == (
        "bias_dropout_add",
        "bias_dropout_add_backward",
    )
    assert libraries.passes_of("sparse") == (
        "sparse_threshold",
        "sparse_count",
        "sparse_pack_",
        "sparse_add_",
    )
