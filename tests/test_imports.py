"""Imports point down the list of layers in ARCHITECTURE.md, and nothing is imported in a circle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hybridpar"

# lowest first; modules of one layer may import each other and everything below
LAYERS = (
    ("errors", "reading", "scratch", "toml_advice"),
    ("config",),
    ("autograd", "cores", "cpu", "flight", "native", "sockets", "turns"),
    ("grid", "random"),
    ("comm",),
    ("ops",),
    ("nn",),
    ("models", "pipeline.plan"),
    ("optim",),
    ("state",),
    ("pipeline.run",),
    ("data",),
    ("checkpoint",),
    ("validate",),
    ("memory",),
    ("train",),
    ("verify", "planner", "conformance"),
    ("trainer", "watch"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str | None:
    """The layer of 'hybridpar.x.y'; None for the package itself."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        if ".".join(parts[:length]) in RANK:
            return ".".join(parts[:length])
    assert not parts or parts == ["pipeline"], (
        f"{module} is in no layer: add it to ARCHITECTURE.md and here"
    )
    return None


def edges() -> list[tuple[str, str]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(module, a.name) for a in node.names if a.name.startswith("hybridpar")]
            elif (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("hybridpar")
            ):
                found += [(module, _module(node.module, a.name)) for a in node.names]
    return found


def _module(package: str, name: str) -> str:
    """What `from package import name` imports: a module, or something that the package itself
    holds."""
    path = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else package


def test_imports_point_down() -> None:
    upward = [
        f"{importer} imports {imported}"
        for importer, imported in edges()
        if (a := layer_of(importer)) and (b := layer_of(imported)) and RANK[b] > RANK[a]
    ]
    assert not upward, "\n".join(upward)


def test_the_plan_needs_no_torch() -> None:
    for path in (PACKAGE / "pipeline" / "plan").glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), path


def test_kernels_import_nothing_of_hybridpar() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert "hybridpar" not in "".join(
            line
            for line in path.read_text().splitlines()
            if line.strip().startswith(("import ", "from "))
        ), path


def test_only_config_reads_the_environment() -> None:
    readers = [
        p
        for p in PACKAGE.rglob("*.py")
        if "os.environ" in p.read_text() or "os.getenv" in p.read_text()
    ]
    assert readers == [PACKAGE / "config" / "environment.py"]
