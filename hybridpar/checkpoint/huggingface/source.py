"""The files of a Hugging Face folder, read with suspicion: nothing is unpickled, no name leads out of the folder, and
sizes are known before anything is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridpar.errors import CheckpointError, shown
from hybridpar.reading import open_regular, read_limited

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_JSON = 64 << 20
PICKLED = "pytorch_model*.bin"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


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


class WeightFiles:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json names.

    Raises: CheckpointError if a file is missing, truncated or no safetensors file, holds other tensors than the index
    says, or if there are pickled weights only.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        if (folder / WEIGHTS).is_file():
            self._open(WEIGHTS)
        elif (folder / INDEX).is_file():
            self._open_all(read_json(folder / INDEX))
        else:
            raise CheckpointError(self._missing())

    def _missing(self) -> str:
        if pickled := sorted(path.name for path in self.folder.glob(PICKLED)):
            return (f"{self.folder}: holds {pickled[0]}, which is pickled and could run any code when it is loaded; "
                    "convert it where you trust it: transformers' AutoModelForCausalLM (BERT: AutoModelForPreTraining)"
                    ".from_pretrained(folder).save_pretrained(other_folder), then import that")
        return f"{self.folder}: has neither {WEIGHTS} nor {INDEX}"

    def _open_all(self, index: Mapping[str, Any]) -> None:
        path, where = self.folder / INDEX, index.get("weight_map")
        if not isinstance(where, dict) or not where:
            raise CheckpointError(f"{path}: has no weight_map")
        for name, file in where.items():
            if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise CheckpointError(f"{path}: says that {name} is in {shown(file)}; must be the plain name of a "
                                      ".safetensors file in the folder, such as model-00001-of-00002.safetensors")
        for file in sorted(set(where.values())):
            self._open(file)
        for name, file in where.items():
            if self._files.get(name, (None, None))[0] != file:
                raise CheckpointError(f"{path}: says that {name} is in {file}, but it is not")

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            open_regular(path).close()  # no pipe, no device
            opened = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in self._files:
                    raise CheckpointError(f"{path}: has {name}, which {self._files[name][0]} has too")
                self._files[name] = file, opened
                part = opened.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
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
