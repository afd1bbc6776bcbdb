"""Read files of torch.save safely: nothing that they name is imported or called.

All names in a file are checked first; names of plain tensors and values are allowed. A caller may
allow further names that carry nothing we need (settings, enumerations, states of random
generators); inert stand-ins replace them, which only keep the attributes that they get. Then
torch's weights-only unpickler, which refuses any name that it does not know, reads the file. So a
file may contain anything and cannot run anything.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, serialization

from hybridpar.errors import CheckpointError, shown
from hybridpar.reading import BoundedReader, open_regular

_ZIP = b"PK\x03\x04"
_PROGRAM = "/data.pkl"
_NUM_OLD = 5
"""Number of pickles in a file from before torch 1.6: a magic number, the format, the system's
types, the saved object, its storages."""
_MOST_OPERATIONS = 2_000_000
_MOST_WAITING = 100_000
_DEEPEST = 100
"""Limits: operations in all pickles of a file (about 35 per tensor), objects on the stack
(Python appends up to 1000 to a list or dictionary at a time), and nesting depth."""
_INTO = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Operations that put objects into the one below them on the stack, which stays there."""
_PLAIN = re.compile(
    r"collections\.OrderedDict|builtins\.(set|complex)|_codecs\.encode"
    r"|torch\.(Tensor|Size|device|layout|b?float\d\w*|u?int\d+|bool|complex\d+)|torch\.(storage\.)?(?!Typed)\w*Storage"
    r"|torch\._utils\._rebuild_(tensor(_v[23])?|parameter(_with_state)?)|torch\._tensor\._rebuild_from_type_v2"
)


class Inert:
    """Stand-in for an object whose class is not loaded; it only keeps the attributes that the
    file gives it."""

    def __init__(self, *_: object):
        pass

    def __new__(cls, *_: object) -> Inert:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(
                {key: value for key, value in state.items() if isinstance(key, str)}
            )

    def __reduce__(self) -> str:
        raise TypeError("a stand-in is not written")


def load_pickled(path: Path, inert: str = r"(?!)") -> Any:
    """Return the value that torch.save wrote. Tensors are memory-mapped if the format allows it.

    Args:
        path: The file.
        inert: Pattern of names that stand-ins replace.

    Raises:
        CheckpointError: The file is missing, damaged, or names anything else.
    """
    try:
        with BoundedReader(open_regular(path)) as file, _only_ours():
            is_zip = file.peek(len(_ZIP)).startswith(_ZIP)
            named = [name for name in _names(file, is_zip) if not _PLAIN.fullmatch(name)]
            if foreign := [name for name in named if not re.fullmatch(inert, name)]:
                raise CheckpointError(
                    f"{path}: contains {', '.join(foreign[:8])}; only plain tensors and values "
                    f"are loaded, because other objects can run any code. If you trust the "
                    f"file, load it with the program that wrote it and save its tensors alone"
                )
            serialization.add_safe_globals([(Inert, name) for name in named])
            file.seek(0)
            return torch.load(
                path if is_zip else file, map_location="cpu", weights_only=True, mmap=is_zip
            )
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a damaged pickle can raise any
        # torch's message begins with the advice to load the file unsafely
        inner = (
            error.__context__
            if isinstance(error, pickle.UnpicklingError) and error.__context__
            else error
        )
        reason = str(inner).strip().partition("\n")[0] or type(inner).__name__
        raise CheckpointError(
            f"{path}: is damaged, or not written by torch.save ({reason})"
        ) from None


def _names(file: IO[bytes], is_zip: bool) -> list[str]:
    """Return the names in the pickles of a file. Raises any error if the file is damaged."""
    programs: list[tuple[IO[bytes], int]] = [(file, _NUM_OLD)]
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if packed := [
                entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED
            ]:
                raise ValueError(f"{packed[0]} is compressed")
            for entry in entries:  # torch.save may omit checksums (set_crc32_options)
                entry.CRC = None  # type: ignore[assignment]
            described = [
                entry for entry in entries if entry.filename.lower().endswith(_PROGRAM)
            ]  # the way torch finds it
            if len(described) != 1:
                raise ValueError(f"it has {len(described)} files data.pkl; must be one")
            programs = [(BytesIO(archive.read(described[0])), 1)]
    found = set()
    depths = Depths()
    for program, number in programs:
        for _ in range(number):
            for operation, value, _ in pickletools.genops(program):
                depths.follow(operation, value)
                if operation.name == "GLOBAL":
                    found.add(str(value).replace(" ", "."))
    return sorted(found)


class Depths:
    """Nesting depth of the objects of a pickle, followed operation by operation without creating
    the objects.

    Python hashes and prints nested tuples by recursion in C, so a million of them would crash the
    process. Each entry of the stack is the depth of its object. A dictionary that is filled after
    another object has taken it counts with the depth that it had then; `_walk` bounds such ones.
    """

    def __init__(self) -> None:
        self._stack: list[int | None] = []  # None: a mark
        self._memo: dict[int, int] = {}
        self._count = 0

    def follow(self, operation: pickletools.OpcodeInfo, value: Any) -> None:
        """Process the next operation.

        Raises:
            ValueError: Too many or too deep objects, or a damaged pickle.
        """
        self._count += 1
        if self._count > _MOST_OPERATIONS:
            raise ValueError(f"it has more than {_MOST_OPERATIONS} operations")
        stack = self._stack
        name = operation.name
        if len(stack) > _MOST_WAITING:
            raise ValueError(f"it keeps more than {_MOST_WAITING} objects on its stack")
        if name in ("PROTO", "FRAME"):
            return
        if name == "STOP":
            stack.clear()
            self._memo.clear()
        elif name == "MARK":
            stack.append(None)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(value)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else int(value)] = _depth(stack[-1])
        elif name == "DUP":
            stack.append(_depth(stack[-1]))
        elif name == "POP":
            stack.pop()
        elif operation.stack_after:
            stack.append(self._made(operation))
        else:
            self._taken(operation)

    def _made(self, operation: pickletools.OpcodeInfo) -> int:
        """Pop an operation's arguments, and return the depth of the object that it creates."""
        taken = self._taken(operation)
        if operation.name in _INTO:
            outer, *inner = taken
        else:
            outer = 0
            inner = taken
        depth = max([outer, *(one + 1 for one in inner)])
        if depth > _DEEPEST:
            raise ValueError(f"its objects are nested deeper than {_DEEPEST} levels")
        return depth

    def _taken(self, operation: pickletools.OpcodeInfo) -> list[int]:
        """Pop an operation's arguments from the stack, and return their depths."""
        before = list(operation.stack_before)
        stack = self._stack
        taken: list[int] = []
        if pickletools.markobject in before:
            while (entry := stack.pop()) is not None:
                taken.append(entry)
            before = before[: before.index(pickletools.markobject)]
        taken += [_depth(stack.pop()) for _ in before]
        return taken[::-1]


def _depth(entry: int | None) -> int:
    """Return the depth of a stack entry that is an object. Raises: ValueError for a mark."""
    if entry is None:
        raise ValueError("it uses a stack mark as an object")
    return entry


@contextmanager
def _only_ours() -> Iterator[None]:
    """Hide the names that other code of this process has declared safe."""
    theirs = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(theirs)


def tensors_in(value: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors of nested mappings, by dotted name.

    Raises:
        CheckpointError: One of them is not a plain tensor.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in _walk(value, path):
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: {name} is not a plain tensor ({tensor.layout}, {tensor.device})"
            )
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, which is larger than its data "
                f"in the file"
            )
        if name in found:
            raise CheckpointError(f"{path}: has {name} twice")
        found[name] = tensor.detach()
    return found


def _walk(value: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors and their names, depth first, without recursion.

    Raises:
        CheckpointError: The mappings are nested too deeply.
    """
    waiting: list[tuple[str, int, Any]] = [("", 0, value)]
    seen = set()
    while waiting:
        name, depth, value = waiting.pop()
        if depth > _DEEPEST:
            raise CheckpointError(f"{path}: its mappings are nested deeper than {_DEEPEST} levels")
        kind = type(value)  # not the object's own idea of it
        if issubclass(kind, Tensor):
            yield name, value
        elif issubclass(kind, Mapping) and id(value) not in seen:
            seen.add(id(value))
            for key, part in reversed(list(value.items())):
                word = key if isinstance(key, str) else shown(key)
                waiting.append((f"{name}.{word}" if name else word, depth + 1, part))
