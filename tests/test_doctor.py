"""`hybridpar doctor`: what is here, what was built, what each operator runs, and why not other
code."""

from __future__ import annotations

import json

import pytest
import torch

from hybridpar import __version__, native
from hybridpar.cli import main
from hybridpar.cli.doctor import lines
from hybridpar.ops.backends import registry

NOT_COMPILED = {
    ("sparse", "bfloat16"),  # a type that gradients never have
}


def test_says_what_every_operator_runs_and_why_not_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    built = native.missing() is None
    assert (status, found["ok"]) == (int(not built), built)
    assert found["versions"]["hybridpar"] == __version__
    assert (found["built"]["hybridpar._C_recorder"] == "yes") == (native.missing_recorder() is None)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] >= 1
    assert list(found["operators"]["cpu"]) == list(registry.ops())
    for op, choice in found["operators"]["cpu"].items():
        for dtype in {"float32", "bfloat16"} - set(choice["measured"]):
            compiled = built and any(row.name == "cpp" for row in registry.backends(op))
            compiled = compiled and (op, dtype) not in NOT_COMPILED
            assert choice[dtype] == ("cpp" if compiled else "torch")
        others = {row.name for row in registry.backends(op)} - {"torch"}
        assert set(choice["cannot"]) == (others - {"cpp"} if built else others)
    text = "\n".join(lines(found))
    assert f"hybridpar {__version__}" in text
    assert "not triton for any: " in text
    assert "not apex for any: runs on a GPU, not on cpu" in text


def test_a_missing_extension_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "missing", lambda: "the extension is not built (no compiler)")
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "hybridpar._C: the extension is not built (no compiler)" in out
    assert "not cpp for any: the extension is not built (no compiler)" in out
    assert "HYBRIDPAR_BUILD=cpu" in err
    assert "triton on the GPU" not in out
