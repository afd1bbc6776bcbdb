"""Files of torch.save, read with suspicion: nothing that they name is imported or called.

All names in a file are looked at first: those of plain tensors and values may be there. A caller
may list others that are known and carry nothing we need (settings, enumerations, states of random
generators): an inert stand-in takes their place, which only keeps the attributes it is given. Then
torch's own weights-only unpickler reads it, which would refuse every name that it does not know. So
a file can hold anything, and run nothing.
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
"""Pickles in a file from before torch 1.6: a number, the format, the system's types, what was
saved, its storages."""
_MOST_OPERATIONS = 2_000_000
_MOST_WAITING = 100_000
_DEEPEST = 100
"""Operations of all pickles of a file, some 35 a tensor; objects on the stack, of which Python puts
1000 into a list or a dictionary at a time; and the depth of objects."""
_INTO = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Operations that put objects into the one below them, which stays."""
_PLAIN = re.compile(
    r"collections\.OrderedDict|builtins\.(set|complex)|_codecs\.encode"
    r"|torch\.(Tensor|Size|device|layout|b?float\d\w*|u?int\d+|bool|complex\d+)|torch\.(storage\.)?(?!Typed)\w*Storage"
    r"|torch\._utils\._rebuild_(tensor(_v[23])?|parameter(_with_state)?)|torch\._tensor\._rebuild_from_type_v2"
)


class Inert:
    """Stands for an object of a class that is not loaded; its attributes are those that the file
    gives it."""

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
    """The value that torch.save has put into a file; its tensors are mapped, not read, where the
    format allows that.

    inert: pattern of the names that a stand-in takes the place of.
    Raises: CheckpointError if the file is missing, damaged, or names anything else.
    """
    try:
        with BoundedReader(open_regular(path)) as file, _only_ours():
            is_zip = file.peek(len(_ZIP)).startswith(_ZIP)
            named = [name for name in _names(file, is_zip) if not _PLAIN.fullmatch(name)]
            if foreign := [name for name in named if not re.fullmatch(inert, name)]:
                raise CheckpointError(
                    f"{path}: names {', '.join(foreign[:8])}: only plain tensors and values are "
                    "loaded, as others "
                    "could run any code. Where you trust it, load it with its own program and save "
                    "its tensors alone"
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
        # torch's own text begins with the advice to load it without care
        inner = (
            error.__context__
            if isinstance(error, pickle.UnpicklingError) and error.__context__
            else error
        )
        reason = str(inner).strip().partition("\n")[0] or type(inner).__name__
        raise CheckpointError(
            f"{path}: is damaged, or not a file of torch.save ({reason})"
        ) from None


def _names(file: IO[bytes], is_zip: bool) -> list[str]:
    """Names in the pickles of a file. Raises: any error, if it is damaged."""
    programs: list[tuple[IO[bytes], int]] = [(file, _NUM_OLD)]
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if packed := [
                entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED
            ]:
                raise ValueError(f"{packed[0]} is compressed")
            for entry in entries:  # torch.save may leave them out (set_crc32_options)
                entry.CRC = None  # type: ignore[assignment]
            described = [
                entry for entry in entries if entry.filename.lower().endswith(_PROGRAM)
            ]  # as torch finds it
            if len(described) != 1:
                raise ValueError(f"it has {len(described)} files data.pkl, and not one")
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
    """How deep the objects of a pickle nest, followed operation by operation without making them.

    Python hashes and prints nested tuples by recursion in C, so a million of them would end the
    process. Each entry of the stack is the depth of its object. A dictionary that is filled after
    another has taken it in counts as it was then; `_walk` bounds those.
    """

    def __init__(self) -> None:
        self._stack: list[int | None] = []  # None: a mark
        self._memo: dict[int, int] = {}
        self._count = 0

    def follow(self, operation: pickletools.OpcodeInfo, value: Any) -> None:
        """Take in the next operation. Raises: ValueError for too many, too deep objects, or a
        damaged pickle."""
        self._count += 1
        if self._count > _MOST_OPERATIONS:
            raise ValueError(f"it has more than {_MOST_OPERATIONS} operations")
        stack = self._stack
        name = operation.name
        if len(stack) > _MOST_WAITING:
            raise ValueError(
                f"more than {_MOST_WAITING} of its objects wait for one that takes them in"
            )
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
        """Take an operation's arguments, and return the depth of what it makes of them."""
        taken = self._taken(operation)
        if operation.name in _INTO:
            outer, *inner = taken
        else:
            outer = 0
            inner = taken
        depth = max([outer, *(one + 1 for one in inner)])
        if depth > _DEEPEST:
            raise ValueError(f"its objects nest deeper than {_DEEPEST}")
        return depth

    def _taken(self, operation: pickletools.OpcodeInfo) -> list[int]:
        """Take an operation's arguments from the stack, and return their depths."""
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
    """The depth of an entry of the stack that is an object. Raises: ValueError for a mark."""
    if entry is None:
        raise ValueError("it takes a mark for an object")
    return entry


@contextmanager
def _only_ours() -> Iterator[None]:
    """Hides the names that other code of this process has declared safe."""
    theirs = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(theirs)


def tensors_in(value: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of nested mappings, by dotted name. Raises: CheckpointError for some that are not
    plain ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in _walk(value, path):
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: {name} is no plain tensor ({tensor.layout}, {tensor.device})"
            )
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, more than the file holds of it"
            )
        if name in found:
            raise CheckpointError(f"{path}: has {name} twice")
        found[name] = tensor.detach()
    return found


def _walk(value: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors and their names, depth first, without recursion. Raises: CheckpointError for a
    very deep one."""
    waiting: list[tuple[str, int, Any]] = [("", 0, value)]
    seen = set()
    while waiting:
        name, depth, value = waiting.pop()
        if depth > _DEEPEST:
            raise CheckpointError(f"{path}: its mappings nest deeper than {_DEEPEST}")
        kind = type(value)  # not what an object says of itself
        if issubclass(kind, Tensor):
            yield name, value
        elif issubclass(kind, Mapping) and id(value) not in seen:
            seen.add(id(value))
            for key, part in reversed(list(value.items())):
                word = key if isinstance(key, str) else shown(key)
                waiting.append((f"{name}.{word}" if name else word, depth + 1, part))
