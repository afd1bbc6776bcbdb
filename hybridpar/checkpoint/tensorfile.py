"""safetensors files, written in one pass and read in pieces.

    8 bytes: n, little endian | n bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__": texts} | the tensors

Nothing is unpickled. A file is read only after its header has been checked: types, sizes, and tensors that follow each
other without gap or overlap to the end of the file; so no more is ever allocated than the file holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridpar.checkpoint import plain
from hybridpar.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # as the library has it
_MAX_DIMS = 8
_CHUNK = 4 << 20  # of a write; stays in the cache between checksum and write

Pieces = NDArray[np.int64]
"""Rows of (first element in a flat tensor, first element in another, how many)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file; `start`: its first byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes a file and makes its content last; its size in bytes and its SHA-256, in hexadecimal.

    Tensors may be on any device; one that is not contiguous or not on the CPU is copied, one at a time.
    Raises: OSError.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each is aligned
    header: dict[str, object] = {_METADATA: dict(metadata)}
    stop = 0
    for name in names:
        start, stop = stop, stop + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in chain([memoryview(len(text).to_bytes(8, "little") + text)],
                           *(_chunks(tensors[name]) for name in names)):
            digest.update(piece)
            size += len(piece)
            while piece:
                piece = piece[file.write(piece):]
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    view = _bytes_of(tensor.detach().contiguous().cpu())
    return (view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A file whose header has been read and checked; it is open only while something is read.

    Raises: CheckpointError if it is missing, truncated, or no safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, _MAX_HEADER):
                    raise ValueError(f"its header cannot be {length} bytes long")
                header = bytearray(length)
                _fill(file, memoryview(header))
            self._start = 8 + length
            self.metadata, self.tensors = _parse_header(bytes(header), size - self._start)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        except ValueError as error:
            raise CheckpointError(f"{path}: is damaged, or no safetensors file ({error})") from None

    def read(self, name: str, pieces: Pieces, target: Tensor) -> None:
        """Copies pieces of a tensor, as rows of (first element there, first element here, how many), into `target`.

        Shapes: target flat, contiguous, on the CPU, of the tensor's dtype. Raises: CheckpointError.
        """
        info, view = self.tensors[name], _bytes_of(target)
        assert target.dtype == info.dtype, f"{name} is {info.dtype}, not {target.dtype}"
        try:
            with self.path.open("rb", buffering=0) as file:
                for there, here, count in (pieces * info.dtype.itemsize).tolist():
                    file.seek(self._start + info.start + there)
                    _fill(file, view[here : here + count])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from None


def _fill(file: FileIO, view: memoryview) -> None:
    while view:
        if not (count := file.readinto(view)):
            raise ValueError("it ends too early")
        view = view[count:]


def _parse_header(text: bytes, size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Texts, and tensors that fill `size` bytes. Raises: ValueError."""
    header = plain.mapping(plain.parse(text), "the header")
    metadata = {key: plain.string(value, f"metadata {key}")
                for key, value in plain.mapping(header.pop(_METADATA, {}), _METADATA).items()}
    found = {}
    stops = {}
    for name, entry in header.items():
        entry = plain.mapping(entry, name)
        kind = DTYPES.get(plain.string(entry.get("dtype"), f"{name}: dtype"))
        if kind is None:
            raise ValueError(f"{name} is of type {entry['dtype']!r}, not one of {', '.join(DTYPES)}")
        shape = tuple(plain.integer(n, f"{name}: shape") for n in plain.sequence(entry.get("shape"), f"{name}: shape"))
        start, stop = plain.span(entry.get("data_offsets"), f"{name}: data_offsets", size)
        if len(shape) > _MAX_DIMS or prod(shape) * kind.itemsize != stop - start:
            raise ValueError(f"{name} has {stop - start} bytes, which is not shape {list(shape)[:_MAX_DIMS]}")
        found[name], stops[name] = TensorInfo(kind, shape, start), stop
    at = 0
    for name in sorted(found, key=lambda name: (found[name].start, stops[name])):
        if found[name].start != at:
            raise ValueError(f"{name} begins at byte {found[name].start}, what comes before ends at {at}")
        at = stops[name]
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")
    return metadata, found
