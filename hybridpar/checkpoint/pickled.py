"""Files of torch.save, read with suspicion: nothing that they name is imported or called.

torch's own weights-only unpickler builds tensors and plain containers and refuses every other name. A caller may list
names that are known and carry nothing we need (settings, enumerations, states of random generators): an inert stand-in
takes their place, which only keeps the attributes it is given. So a file can hold anything, and run nothing.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, serialization

from hybridpar.errors import CheckpointError
from hybridpar.reading import open_regular

_ZIP = b"PK\x03\x04"


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


def load_pickled(path: Path, inert: str = r"(?!)", old_inert: tuple[str, ...] = ()) -> Any:
    """What torch.save has put into a file; its tensors are mapped, not read, where the format allows that.

    inert: pattern of the names that a stand-in takes the place of. old_inert: those in files older than torch 1.6,
    which cannot be searched first.
    Raises: CheckpointError if the file is missing, damaged, or names anything else.
    """
    try:
        with open_regular(path) as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        with _only_ours():
            named = sorted(serialization.get_unsafe_globals_in_checkpoint(str(path))) if is_zip else old_inert
            if foreign := [name for name in named if not re.fullmatch(inert, name)]:
                raise _refused(path, ", ".join(foreign[:8]))
            serialization.add_safe_globals([(Inert, name) for name in named])
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a damaged pickle can raise any
        if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL (\S+)", str(error))):
            raise _refused(path, found[1]) from None
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path}: is damaged, or not a file of torch.save ({reason})") from None


@contextmanager
def _only_ours() -> Iterator[None]:
    """Without the names that other code of this process has declared safe."""
    theirs = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(theirs)


def _refused(path: Path, names: str) -> CheckpointError:
    return CheckpointError(f"{path}: names {names}, which could run any code if it were loaded; only tensors and plain "
                           "values are. Where you trust it, load it with its own program and save its tensors alone")


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
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            waiting += [(f"{name}.{key}" if name else str(key), part) for key, part in reversed(list(value.items()))]
