"""Imports point down the list of layers in ARCHITECTURE.md, and nothing is imported in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from hybridpar.config.compression_methods import GRADIENTS
from hybridpar.config.compression_methods import METHODS as REGISTRY
from hybridpar.state.compression.registry import gradient_method

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hybridpar"

PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def layers(page: str) -> tuple[tuple[str, ...], ...]:
    """The layers of ARCHITECTURE.md, lowest first.

    A line with a number begins a layer, and one without adds to it. Modules of one layer may import
    each other and everything below.
    """
    text = page.split("\n## Layers\n")[1].split("\n## ")[0]
    found: list[list[str]] = []
    for number, names in re.findall(r"^    ( ?\d+|  ) (\w[\w., ]*?)(?:  +|$)", text, re.MULTILINE):
        if number.strip():
            found.append([])
        found[-1] += names.split(", ")
    return tuple(tuple(names) for names in reversed(found))


LAYERS = layers(PAGE)
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}

ROOMS = ("hybridpar.placement", "hybridpar.memory_behaviour")
"""Source systems: nothing of training imports them."""
ON_DEMAND = {("hybridpar.train.run", "hybridpar.memory_behaviour")}
"""Modules that import a room in a function, in a run that asks for it."""
METHODS = "hybridpar.state.compression.methods"
"""Compression methods, which the registry alone loads."""


def layer_of(module: str) -> str | None:
    """The layer of 'hybridpar.x.y'; None for the package itself."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        if ".".join(parts[:length]) in RANK:
            return ".".join(parts[:length])
    assert not parts, f"{module} is in no layer of ARCHITECTURE.md"
    return None


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def edges(*, at_start: bool = False, for_types: bool = True) -> list[tuple[str, str]]:
    """Pairs of importer and imported module.

    Args:
        at_start: Only imports that run with the importer's own, so not the ones in functions.
        for_types: Also imports that only the type checker reads, unless at_start.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in _nodes(tree_of(path), at_start, for_types):
            if isinstance(node, ast.Import):
                found += [(module, a.name) for a in node.names if a.name.startswith("hybridpar")]
            elif (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("hybridpar")
            ):
                found += [(module, _module(node.module, a.name)) for a in node.names]
    return found


def _nodes(node: ast.AST, at_start: bool, for_types: bool) -> Iterator[ast.AST]:
    """The nodes below `node`."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if is_for_types and (at_start or not for_types):
            continue
        if at_start and isinstance(child, ast.FunctionDef):
            continue
        yield child
        yield from _nodes(child, at_start, for_types)


def _module(package: str, name: str) -> str:
    """The object that `from package import name` imports: a module, or something that the package
    itself holds."""
    path = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else package


def test_files_and_tests_that_the_page_names_exist() -> None:
    paths = [
        f"/{path.relative_to(ROOT)}" + "/" * path.is_dir()
        for folder in (PACKAGE, ROOT / "kernels", ROOT / "csrc")
        for path in (folder, *folder.rglob("*"))
    ]
    named = re.findall(r"`([\w/]+\.(?:py|json)|[\w/]+/)`", PAGE)
    assert len(named) > 40
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    tests = [name for group in re.findall(r"\[([\w/, ]+)\]", PAGE) for name in group.split(", ")]
    assert len(tests) > 40
    for test in {*tests}:
        folder, _, name = test.rpartition("/")
        if not (ROOT / "tests" / folder / f"test_{name}.py").exists():
            missing.append(test)
    assert not missing


def test_imports_point_down() -> None:
    upward = [
        f"{importer} imports {imported}"
        for importer, imported in edges()
        if (a := layer_of(importer)) and (b := layer_of(imported)) and RANK[b] > RANK[a]
        if not any(importer == who and _is_in(imported, what) for who, what in ON_DEMAND)
    ]
    assert not upward, "\n".join(upward)


def test_nothing_is_imported_in_a_circle() -> None:
    """Also not within functions."""
    graph: dict[str, set[str]] = {}
    for importer, imported in edges(for_types=False):
        if imported != "hybridpar":  # which imports what it offers when that is first used
            graph.setdefault(importer, set()).add(imported)
    graph.pop("hybridpar", None)
    TopologicalSorter(graph).prepare()


def test_nothing_imports_a_source_system_at_its_start() -> None:
    wrong = [
        f"{importer} imports {imported}"
        for importer, imported in edges(at_start=True)
        for room in ROOMS
        if _is_in(imported, room) and not _is_in(importer, room)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_registry_alone_imports_compression_methods() -> None:
    files = {module.stem for module in (PACKAGE / "state/compression/methods").glob("[!_]*.py")}
    assert files == {row.module.removeprefix(f"{METHODS}.") for row in REGISTRY.values()}
    assert all(gradient_method(name).name == name for name in GRADIENTS)
    wrong = [
        f"{importer} imports {imported}"
        for importer, imported in edges()
        if _is_in(imported, METHODS)
    ]
    assert not wrong, "\n".join(wrong)


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_the_plan_needs_no_torch() -> None:
    for path in (PACKAGE / "schedules").rglob("*.py"):
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


COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("batch_isend_irecv", "broadcast", "gather", "gather_object", "irecv", "isend", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
}
"""Functions of torch.distributed that communicate."""


@cache
def calls() -> list[tuple[str, str]]:
    """Each module of hybridpar, and the functions that it calls as `name` or `module.name`."""
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and _is_plain(node.func)
    ]


def _is_plain(called: ast.expr) -> bool:
    owner = called.value if isinstance(called, ast.Attribute) else called
    return isinstance(owner, ast.Name)


def test_the_comm_package_alone_communicates_and_is_given_an_axis() -> None:
    wrong = [
        f"{module} calls {call}"
        for module, call in calls()
        for owner, _, function in [call.rpartition(".")]
        if owner in ("dist", "distributed") and function in COLLECTIVES
        if module.split("/")[0] != "comm"
    ]
    assert not wrong, "\n".join(wrong)
    for path in (PACKAGE / "comm").glob("*.py"):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            own = {ast.unparse(node.func) for node in ast.walk(function) if _is_call(node)}
            if any(name.startswith("dist.") and name[5:] in COLLECTIVES for name in own):
                given = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
                assert given & {"axis", "ctx"}, f"{path.name}: {function.name} is given no axis"


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


def test_no_module_holds_a_grid() -> None:
    """A function takes the axes that it needs; there is no current grid."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                made = {
                    ast.unparse(n.func) for n in ast.walk(node.value) if isinstance(n, ast.Call)
                }
                assert not made & {"ProcessGrid", "Axis"}, f"{path}:{node.lineno}"


def test_the_executor_alone_waits_for_other_stages() -> None:
    """The others that transfer between two ranks are no part of a training step."""
    users = {module for module, call in calls() if call in ("isend", "irecv")}
    assert users == {
        "comm/p2p.py",
        "planner/measuring/links.py",
        "runtime/executor.py",
        "train/faults/clocks.py",
        "train/inference/decoder.py",
    }


def test_patterns_of_names_are_matched_in_one_place() -> None:
    """A parameter's placement says its use: nothing else reads meaning from its name."""
    importers = [
        path.relative_to(PACKAGE).as_posix()
        for folder in ("nn", "models", "optim", "state", "runtime", "train", "checkpoint")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if re.search(r"^(import|from) fnmatch", path.read_text(), re.MULTILINE)
    ]
    assert importers == ["models/groups.py"]
    reads_a_name = re.compile(r"\bname\.(startswith|endswith|split|rsplit)\(")
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for folder in ("nn", "optim", "state", "runtime")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if reads_a_name.search(path.read_text())
    }
    assert readers == {
        "state/kind.py",  # keys of a checkpoint, whose form it defines
        "state/residency/chunks.py",  # the number of a block, which global names begin with
    }


def test_models_are_asked_for_capabilities_and_not_for_their_class() -> None:
    """The builder of blocks must tell GPT and BERT from other models; nothing else does."""
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass", "getattr")
        and re.search(r"\bModelConfig\b|\.model, '", ast.unparse(node))
    }
    assert places == {"models/build.py"}
