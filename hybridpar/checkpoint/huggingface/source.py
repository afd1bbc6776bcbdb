"""The files of a Hugging Face folder, read with suspicion: no name leads out of the folder, sizes are known before
anything is allocated, and pickled files can run nothing (pickled.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpar.checkpoint.pickled import load_pickled, tensors_in
from hybridpar.errors import CheckpointError, shown
from hybridpar.reading import open_regular, read_limited

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_JSON = 64 << 20
PICKLED = "pytorch_model.bin"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """As safetensors calls it; others as torch does."""
    return _NAMES.get(dtype, str(dtype))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: CheckpointError if the file is missing, or something else."""
    try:
        plain = json.loads(read_limited(path, MAX_JSON))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not a {type(plain).__name__}")
    return plain


class Weights(Protocol):
    """Tensors of another program, by its names. `dtypes`: as safetensors calls them."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor: ...


class Pickled:
    """The tensors of a file of torch.save, as safetensors' own reader shows those of its files."""

    def __init__(self, path: Path):
        self.tensors = tensors_in(load_pickled(path), path)

    def keys(self) -> Iterator[str]:
        return iter(self.tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]


class WeightFiles:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json names; where there are none,
    those of pytorch_model.bin or its index.

    Raises: CheckpointError if a file is missing, truncated or of another format, or holds other tensors than the index
    says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
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
                raise CheckpointError(f"{path}: says that {name} is in {shown(file)}; must be the plain name of a "
                                      f".{suffix} file in the folder, such as model-00001-of-00002.{suffix}")
        for file in sorted(set(where.values())):
            self._open(file)
        for name, file in where.items():
            if self._files.get(name, (None, None))[0] != file:
                raise CheckpointError(f"{path}: says that {name} is in {file}, but it is not")

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            open_regular(path).close()  # no pipe, no device
            opened: Any = safe_open(path, framework="pt") if file.endswith(".safetensors") else Pickled(path)
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in self._files:
                    raise CheckpointError(f"{path}: has {name}, which {self._files[name][0]} has too")
                self._files[name] = file, opened
                self.shapes[name], self.dtypes[name] = _kind(opened, name)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path}: is damaged, truncated or no safetensors file ({error})") from None

    def read(self, name: str) -> Tensor:
        """Raises: CheckpointError."""
        file, opened = self._files[name]
        try:
            return opened.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder / file}: {name} cannot be read ({error})") from None


def _kind(opened: Any, name: str) -> tuple[tuple[int, ...], str]:
    """A tensor's shape, and its type as safetensors calls it."""
    if isinstance(opened, Pickled):
        tensor = opened.tensors[name]
        return tuple(tensor.shape), dtype_name(tensor.dtype)
    part = opened.get_slice(name)
    return tuple(part.get_shape()), part.get_dtype()
