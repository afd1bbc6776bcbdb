"""Read the files of a Hugging Face folder safely: no name leads out of the folder, sizes are
known before anything is allocated, and pickled files cannot run code (pickled.py)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpar.checkpoint.format.pickled import load_pickled, tensors_in
from hybridpar.checkpoint.format.tensorfile import DTYPES
from hybridpar.errors import CheckpointError, shown
from hybridpar.reading import errors_as, open_regular
from hybridpar.reading import read_json as read_any

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 64 << 20
PICKLED = "pytorch_model.bin"
DAMAGED = "is damaged, truncated or not a safetensors file"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in safetensors, or in torch if safetensors does not have it."""
    return _NAMES.get(dtype, str(dtype))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: CheckpointError if the file is missing, or not one."""
    with errors_as(CheckpointError, path, "is not valid JSON"):
        plain = read_any(path, MAX_JSON)
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not a {type(plain).__name__}")
    return plain


class Weights(Protocol):
    """Tensors of another program, by its names. `dtypes`: in safetensors' names."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor: ...


class WeightFiles:
    """The tensors of model.safetensors, or of the files in model.safetensors.index.json; if there
    are none, of pytorch_model.bin or its index.

    Nothing stays in memory but what `read` returned and is still held. Each read maps the file and
    unmaps it, as the pages of a mapping count as the process's memory once they were touched. Files
    from before torch 1.6 cannot be mapped, and are held.

    Raises:
        CheckpointError: A file is missing, truncated or of another format, or its tensors do not
            match the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, tuple[str, Callable[[str], Tensor]]] = {}
        for weights in (WEIGHTS, PICKLED):
            index = f"{weights}.index.json"
            if (folder / weights).is_file():
                self._open(weights)
                return
            if (folder / index).is_file():
                self._open_all(folder / index, weights.rpartition(".")[2])
                return
        raise CheckpointError(f"{folder}: has neither {WEIGHTS} nor {INDEX} (nor {PICKLED})")

    def _open_all(self, path: Path, suffix: str) -> None:
        where = read_json(path).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise CheckpointError(f"{path}: has no weight_map")
        for name, file in where.items():
            if not isinstance(file, str) or not re.fullmatch(rf"[\w.-]+\.{suffix}", file):
                raise CheckpointError(
                    f"{path}: the file of {name} is {shown(file)}; must be the plain name of a "
                    f".{suffix} file in the folder, such as model-00001-of-00002.{suffix}"
                )
        for file in sorted(set(where.values())):
            self._open(file)
        for name, file in where.items():
            if name not in self._files or self._files[name][0] != file:
                raise CheckpointError(f"{path}: says that {name} is in {file}, but it is not")

    def _open(self, file: str) -> None:
        path = self.folder / file
        with errors_as(CheckpointError, path, DAMAGED, SafetensorError):
            open_regular(path).close()  # not a pipe or a device
            if file.endswith(".safetensors"):
                opened: Any = safe_open(path, framework="pt")
                found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
                kinds = {
                    name: (tuple(part.get_shape()), part.get_dtype())
                    for name, part in found.items()
                }
                read: Callable[[str], Tensor] = partial(_read_safetensors, path)
            else:
                tensors = tensors_in(load_pickled(path), path)
                kinds = {
                    name: (tuple(tensor.shape), dtype_name(tensor.dtype))
                    for name, tensor in tensors.items()
                }
                is_mapped = zipfile.is_zipfile(path)
                read = partial(_read_pickled, path) if is_mapped else tensors.__getitem__
        for name, (shape, dtype) in kinds.items():
            if name in self._files:
                raise CheckpointError(f"{path}: has {name}, which is in {self._files[name][0]} too")
            self._files[name], self.shapes[name], self.dtypes[name] = (file, read), shape, dtype

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises: CheckpointError."""
        file, read = self._files[name]
        failure = f"{name} cannot be read"
        with errors_as(
            CheckpointError,
            self.folder / file,
            failure,
            SafetensorError,
            RuntimeError,
            failure=failure,
        ):
            tensor = read(name)
        if tuple(tensor.shape) != self.shapes[name]:
            raise CheckpointError(f"{self.folder / file}: was changed while it was read")
        return tensor


def _read_safetensors(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _read_pickled(path: Path, name: str) -> Tensor:
    return tensors_in(load_pickled(path), path)[name]
