"""One place derives everything that follows from a configuration."""

import ast
from pathlib import Path

import hybridpar

DERIVATIONS = (
    "stage_split",
    "recomputed_blocks",
    "schedule_of",
    "send_window",
    "PipelineShape.of",
    "StatePolicy",
    "Segments.of",
)


def test_each_derivation_has_one_place() -> None:
    root = Path(hybridpar.__file__).parent
    found: dict[str, list[str]] = {name: [] for name in DERIVATIONS}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in found:
                found[name].append(path.relative_to(root).as_posix())
    assert found == {name: ["job/job_plan.py"] for name in DERIVATIONS}
