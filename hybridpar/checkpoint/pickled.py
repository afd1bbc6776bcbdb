"""Files of torch.save, read with suspicion: nothing that they name is imported or called.

All names in a file are looked at first: those of plain tensors and values may be there. A caller may list others that
are known and carry nothing we need (settings, enumerations, states of random generators): an inert stand-in takes their
place, which only keeps the attributes it is given. Then torch's own weights-only unpickler reads it, which would refuse
every name that it does not know. So a file can hold anything, and run nothing.
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

from hybridpar.errors import CheckpointError
from hybridpar.reading import BoundedReader, open_regular

_ZIP = b"PK\x03\x04"
_PROGRAM = "/data.pkl"
_NUM_OLD = 5
"""Pickles in a file from before torch 1.6: a number, the format, the system's types, what was saved, its storages."""
_PLAIN = re.compile(
    r"collections\.OrderedDict|builtins\.(set|complex)|_codecs\.encode"
    r"|torch\.(Tensor|Size|device|layout|b?float\d\w*|u?int\d+|bool|complex\d+)|torch\.(storage\.)?(?!Typed)\w*Storage"
    r"|torch\._utils\._rebuild_(tensor(_v[23])?|parameter(_with_state)?)|torch\._tensor\._rebuild_from_type_v2")


class Inert:
    """Stands for an object of a class that is not loaded; its attributes are those that the file gives it."""

    def __init__(self, *_: object):
        pass

    def __new__(cls, *_: object) -> Inert:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})

    def __reduce__(self) -> str:
        raise TypeError("a stand-in is not written")


def load_pickled(path: Path, inert: str = r"(?!)") -> Any:
    """The value that torch.save has put into a file; its tensors are mapped, not read, where the format allows that.

    inert: pattern of the names that a stand-in takes the place of.
    Raises: CheckpointError if the file is missing, damaged, or names anything else.
    """
    try:
        with BoundedReader(open_regular(path)) as file, _only_ours():
            is_zip = file.peek(len(_ZIP)).startswith(_ZIP)
            named = [name for name in _names(file, is_zip) if not _PLAIN.fullmatch(name)]
            if foreign := [name for name in named if not re.fullmatch(inert, name)]:
                raise CheckpointError(
                    f"{path}: names {', '.join(foreign[:8])}: only plain tensors and values are loaded, as others "
                    "could run any code. Where you trust it, load it with its own program and save its tensors alone")
            serialization.add_safe_globals([(Inert, name) for name in named])
            file.seek(0)
            return torch.load(path if is_zip else file, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a damaged pickle can raise any
        # torch's own text begins with the advice to load it without care
        inner = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
        reason = str(inner).strip().partition("\n")[0] or type(inner).__name__
        raise CheckpointError(f"{path}: is damaged, or not a file of torch.save ({reason})") from None


def _names(file: IO[bytes], is_zip: bool) -> list[str]:
    """Names in the pickles of a file. Raises: any error, if it is damaged."""
    programs: list[tuple[IO[bytes], int]] = [(file, _NUM_OLD)]
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if packed := [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]:
                raise ValueError(f"{packed[0]} is compressed")
            for entry in entries:  # torch.save may leave them out (set_crc32_options)
                entry.CRC = None  # type: ignore[assignment]
            programs = [(BytesIO(archive.read(entry)), 1) for entry in entries if entry.filename.endswith(_PROGRAM)]
    found = {str(value).replace(" ", ".") for program, number in programs for _ in range(number)
             for operation, value, _ in pickletools.genops(program) if operation.name == "GLOBAL"}
    return sorted(found)


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
    """The tensors of nested mappings, by dotted name. Raises: CheckpointError for some that are not plain ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in _walk(value, ""):
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(f"{path}: {name} is no plain tensor ({tensor.layout}, {tensor.device})")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name} has shape {list(tensor.shape)}, more than the file holds of it")
        if name in found:
            raise CheckpointError(f"{path}: has {name} twice")
        found[name] = tensor.detach()
    return found


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Depth first, without recursion: a hostile file may nest as deep as it likes."""
    waiting, seen = [(prefix, value)], set()
    while waiting:
        name, value = waiting.pop()
        kind = type(value)  # not what an object says of itself
        if issubclass(kind, Tensor):
            yield name, value
        elif issubclass(kind, Mapping) and id(value) not in seen:
            seen.add(id(value))
            waiting += [(f"{name}.{key}" if name else str(key), part) for key, part in reversed(list(value.items()))]
