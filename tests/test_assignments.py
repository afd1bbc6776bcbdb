"""Attributes are assigned by the class that declares them, or, of a record, by the file that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HYBRIDPAR = Path(__file__).parent.parent / "hybridpar"

BY_OTHERS = {
    # torch: leaves, modules of users, options of process groups, what it is to leave uncompiled
    *("grad", "data", "forward", "weight", "placements", "_devices", "_timeout"),
    *("current_device", "_dynamo_marked_constant", "local_world_size", "args"),
    # tokenizers
    *("normalizer", "pre_tokenizer", "decoder", "post_processor", "encode_special_tokens"),
    # the standard library, ctypes, HiGHS, TensorBoard
    *("stdout", "stderr", "filename", "CRC", "value", "argtypes", "restype"),
    *("maxstring", "maxother", "maxlong", "maxlist", "maxtuple", "maxdict"),
    *("objective", "wall_time"),
    # the observer in C++
    *("layer", "paused"),
}
"""Attributes of objects whose own interface is assignment: none is of a class of ours."""
SETATTR = {"errors.py", "grid.py", "models/build.py", "verify/boundaries.py"}
"""Files that call setattr: exceptions, axes by their names, tied parameters, doubles of layers."""
SIMULATED = {
    "hosts.py",
    "send_window.py",
    "simulator.py",
    "collectives.py",
    "transfers.py",
}
"""Files of the simulation, whose ranks and channels are records that several of them fill."""
BORN_LATE = {
    # declared by a base class of torch, or of the standard library
    *("ForkingSupervisor._pcontext", "_ForkContext.subprocess_handlers", "Loopback._store"),
    *("Supervisor._remaining_restarts", "_Handler.close_connection"),
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _first_argument(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else None


def _stored(node: ast.AST) -> Iterator[ast.Attribute]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store | ast.Del):
            yield child


def _is_static(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its first argument is no object of its class, as in autograd's functions."""
    return any(ast.unparse(one) == "staticmethod" for one in method.decorator_list)


def _is_of(attribute: ast.Attribute, name: str | None) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == name


def _declared(owner: ast.ClassDef) -> set[str]:
    """Attributes of a class: declared in its body, or assigned in its `__init__`."""
    found: set[str] = set()
    for statement in owner.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(statement, ast.Assign) and "__slots__" in ast.unparse(statement.targets[0]):
            found |= set(ast.literal_eval(statement.value))
        if isinstance(statement, FUNCTIONS):
            if statement.name in ("__init__", "__post_init__"):
                own = _first_argument(statement)
                found |= {
                    attribute.attr for attribute in _stored(statement) if _is_of(attribute, own)
                }
            elif statement.decorator_list:
                found.add(statement.name)  # a property
    return found


def _by_others(node: ast.AST, owner: ast.ClassDef | None, own: frozenset[str]) -> Iterator[ast.AST]:
    """Assignments to attributes of anything but `own` names, and calls of setattr."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _by_others(child, child, own)
            continue
        names = own
        if isinstance(child, FUNCTIONS) and node is owner:
            names = own | {_first_argument(child) or ""}
        is_stored = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store | ast.Del)
        if is_stored and not (isinstance(child.value, ast.Name) and child.value.id in own):
            yield child
        called = child.func if isinstance(child, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("setattr", "delattr"):
            yield child
        yield from _by_others(child, owner, names)


def assigned_from_outside(source: str) -> list[str]:
    """Attributes assigned to an object outside of the file that declares them, and setattr calls.

    A record may be filled by the file that defines it.
    """
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    declared = set[str]().union(*map(_declared, classes))
    return [
        ast.unparse(node)
        for node in _by_others(tree, None, frozenset())
        if not (isinstance(node, ast.Attribute) and node.attr in declared)
    ]


def born_late(source: str) -> list[str]:
    """Attributes that a class assigns to itself and neither declares nor sets in `__init__`."""
    found = []
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef):
            continue
        known = _declared(owner)
        for method in owner.body:
            if not isinstance(method, FUNCTIONS) or _is_static(method):
                continue
            own = _first_argument(method)
            for attribute in _stored(method):
                if _is_of(attribute, own) and attribute.attr not in known:
                    found.append(f"{owner.name}.{attribute.attr}")
    return sorted(set(found))


def python_files(folder: Path) -> Iterator[tuple[str, str]]:
    """The name under `folder` and the text of each module."""
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), path.read_text()


def test_attributes_are_assigned_by_their_own_class() -> None:
    found = [
        f"{name}: {text}"
        for name, source in python_files(HYBRIDPAR)
        for text in assigned_from_outside(source)
        if not (text.startswith("setattr") and name in SETATTR)
        and text.rpartition(".")[2] not in BY_OTHERS
        and Path(name).name not in SIMULATED
    ]
    assert not found


def test_attributes_are_born_in_the_constructor() -> None:
    found = [
        f"{name}: {text}"
        for name, source in python_files(HYBRIDPAR)
        for text in born_late(source)
        if text not in BORN_LATE and Path(name).name not in SIMULATED
    ]
    assert not found


def test_an_attribute_from_outside_is_found() -> None:
    source = """
class Machine:
    def __init__(self, part):
        self.part = part
    def start(self):
        self.speed = 1
        self.part.speed = 2
def stop(machine):
    machine.part = None
    setattr(machine, "speed", 0)
"""
    assert assigned_from_outside(source) == ["self.part.speed", "setattr(machine, 'speed', 0)"]
    assert born_late(source) == ["Machine.speed"]
