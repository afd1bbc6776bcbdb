"""safetensors files, written in one pass and read in pieces, with a checksum of each piece.

    8 bytes: n, little endian | n bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__":
    texts} | the tensors checksum of the header
    ...........................................................................  | of each chunk

A tensor is cut into chunks of 1 MiB, counted from its own start. So a reader of parts of some
tensors can compare all that it uses and reads little else: one checksum of a whole file would take
reading it all. CRC-32 finds what disks, networks and memory damage, at 4 GB/s (SHA-256: 1.4 GB/s),
which a save beside training takes from it. It is no protection from forgery: for that sign the
folder.

Each chunk is also checked for numbers that are not finite when it is written and when it is
read, while it is in the cache: a state with NaN in it never becomes a checkpoint, and one that an
older version has saved is not loaded.

Nothing is unpickled. A file is read only after its header has been checked: types, sizes, and
tensors that follow each other without gap or overlap to the end of the file; so no more is ever
allocated than the file holds.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridpar.config import Within, from_plain, span
from hybridpar.errors import CheckpointError, NotFiniteError, shown
from hybridpar.flight import NO_FLIGHT, Flight
from hybridpar.reading import errors_as, open_regular, parse_json

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXPONENTS: dict[torch.dtype, NDArray[Any]] = {
    torch.float64: np.array(0x7FF0 << 48, np.uint64),
    torch.float32: np.array(0x7F80 << 16, np.uint32),
    torch.bfloat16: np.array(0x7F80, np.uint16),
    torch.float16: np.array(0x7C00, np.uint16),
}
"""Exponent bits of each type. All are set in infinity and NaN, and in no other number."""
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # as the library has it
_MAX_DIMS = 8
CHUNK = 1 << 20
"""Number of bytes per checksum; a chunk stays in the cache between checksum and write."""
_DIGITS = 8  # of a checksum, hexadecimal

Pieces = NDArray[np.int64]
"""Rows of (first element in one flat tensor, first element in another, number of elements)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file. `start`: its first byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    flight: Flight = NO_FLIGHT,
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[int, str]:
    """Write a file and sync it; return its size in bytes and its checksums as hexadecimal digits.

    `flight` is told of every chunk. Tensors may be on any device; one that is not contiguous or not
    on the CPU is copied, one at a time. `read` returns what is to be written for a tensor.

    Raises:
        OSError: The file cannot be written.
        NotFiniteError: Names the first tensor with NaN or infinity. The file is not usable then.
    """
    names = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # so that each is aligned
    header: dict[str, object] = {_METADATA: dict(metadata)}
    stop = 0
    for name in names:
        start = stop
        stop = stop + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sums = []
    size = 0
    with path.open("wb", buffering=0) as file:
        for piece in chain(
            [memoryview(len(text).to_bytes(8, "little") + text)],
            chain.from_iterable(_finite_chunks(name, read(tensors[name])) for name in names),
        ):
            sums.append(_checksum(piece))
            size += len(piece)
            while piece:
                piece = piece[file.write(piece) :]
            flight.tick()
        os.fsync(file.fileno())
    return size, "".join(sums)


def _checksum(piece: bytes | memoryview) -> str:
    return f"{zlib.crc32(piece):0{_DIGITS}x}"


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    view = _bytes_of(tensor.detach().contiguous().cpu())
    return (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


def _finite_chunks(name: str, tensor: Tensor) -> Iterator[memoryview]:
    """Yield the chunks of a tensor, each after checking that it is finite. Raises:
    NotFiniteError."""
    for chunk in _chunks(tensor):
        if not _is_finite(chunk, tensor.dtype):
            raise NotFiniteError(f"{name} is not finite")
        yield chunk


def _is_finite(chunk: memoryview, dtype: torch.dtype) -> bool:
    """Return whether all numbers in some memory are finite. Allocates as much memory again, and
    releases Python's lock meanwhile."""
    exponent = _EXPONENTS[dtype]
    return not chunk.nbytes or bool(
        (np.frombuffer(chunk, exponent.dtype) & exponent).max() < exponent
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A file whose header has been read and checked; it is open only while something is read.

    `written` is the result of `write_tensors`, against which all that is read is verified; None:
    nothing is verified.

    Raises:
        CheckpointError: The file is missing, truncated, damaged, or not a safetensors file.
    """

    def __init__(self, path: Path, written: tuple[int, str] | None = None):
        self.path = path
        expected, checksums = written or (-1, "")
        self._sums = [checksums[i : i + _DIGITS] for i in range(0, len(checksums), _DIGITS)]
        self._scratch = bytearray()
        with (
            errors_as(CheckpointError, path, "is damaged, or no safetensors file"),
            open_regular(path, within=path.parent) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            if written is not None and size != expected:
                raise ValueError(f"it has {size} bytes, but must have {expected}")
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header cannot be {length} bytes long")
            file.seek(0)
            header = bytearray(8 + length)
            _fill(file, memoryview(header))
            self._compare(header, 0, "its header")
            self._start = 8 + length
            self.metadata, self.tensors = _parse_header(bytes(header[8:]), size - self._start)
            self._first_sums = self._number_chunks()

    def _number_chunks(self) -> dict[str, int]:
        """Return the index of the checksum of each tensor's first chunk."""
        first = {}
        number = 1
        for name, info in sorted(
            self.tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
        ):
            first[name] = number
            number += -(-info.num_bytes // CHUNK)
        if self._sums and len(self._sums) != number:
            raise ValueError(f"it must have {number} checksums, and has {len(self._sums)}")
        return first

    def _compare(self, piece: bytes | bytearray | memoryview, number: int, what: str) -> None:
        if self._sums and _checksum(memoryview(piece)) != self._sums[number]:
            raise ValueError(
                f"the checksum of {what} does not match: the file has changed since it was written"
            )

    def check(self, flight: Flight = NO_FLIGHT) -> None:
        """Read the file once, piece by piece, and tell `flight` of each piece.

        Raises:
            CheckpointError: Names the first tensor that is damaged or not finite.
        """
        for name, info in self.tensors.items():
            with self._reading(name) as file:
                for number in range(-(-info.num_bytes // CHUNK)):
                    start, stop = self._span(name, number)
                    self._read_chunk(file, name, number, self._spare()[: stop - start])
                    flight.tick()

    def read(self, name: str, pieces: Pieces, target: Tensor) -> None:
        """Copy pieces of a tensor, as rows of (first element there, first element here, number),
        into `target`.

        Pieces must not overlap in `target`. Each chunk that contains one is read once and verified
        against its checksum.
        Shapes: target flat, contiguous, on the CPU, of the tensor's dtype.

        Raises:
            CheckpointError: A chunk is damaged.
            NotFiniteError: A chunk that was read has NaN or infinity.
        """
        info = self.tensors[name]
        view = _bytes_of(target)
        assert target.dtype == info.dtype, f"{name} is {info.dtype}, not {target.dtype}"
        pieces = pieces[np.argsort(pieces[:, 0], kind="stable")] * info.dtype.itemsize
        starts = pieces[:, 0]
        stops = pieces[:, 0] + pieces[:, 2]
        with self._reading(name) as file:
            for number in _touched(starts, stops):
                start, stop = self._span(name, number)
                inside = pieces[
                    np.searchsorted(stops, start, "right") : np.searchsorted(starts, stop, "left")
                ].tolist()
                there, here, count = inside[0]
                if there <= start and there + count >= stop:  # the range is contiguous
                    self._read_chunk(
                        file, name, number, view[here + start - there : here + stop - there]
                    )
                    continue
                chunk = self._read_chunk(file, name, number, self._spare()[: stop - start])
                for there, here, count in inside:
                    first = max(there, start)
                    last = min(there + count, stop)
                    view[here + first - there : here + last - there] = chunk[
                        first - start : last - start
                    ]

    def _span(self, name: str, number: int) -> tuple[int, int]:
        return number * CHUNK, min((number + 1) * CHUNK, self.tensors[name].num_bytes)

    def _spare(self) -> memoryview:
        self._scratch = self._scratch or bytearray(CHUNK)
        return memoryview(self._scratch)

    def _read_chunk(self, file: FileIO, name: str, number: int, place: memoryview) -> memoryview:
        start, stop = self._span(name, number)
        file.seek(self._start + self.tensors[name].start + start)
        _fill(file, place)
        self._compare(place, self._first_sums[name] + number, f"its bytes {start} to {stop}")
        if not _is_finite(place, self.tensors[name].dtype):
            raise NotFiniteError(
                f"{self.path}: {name} has NaN or infinite values; use an earlier checkpoint"
            )
        return place

    @contextmanager
    def _reading(self, name: str) -> Iterator[FileIO]:
        failure = f"{name} cannot be read"
        with (
            errors_as(CheckpointError, self.path, f"is damaged, {failure}", failure=failure),
            open_regular(self.path, within=self.path.parent) as file,
        ):
            yield file


def _touched(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[int]:
    """Return the chunks that ranges of bytes overlap, in order; empty ranges overlap none."""
    lie = starts < stops
    first = starts[lie] // CHUNK
    after = (stops[lie] - 1) // CHUNK + 1
    length = int(after.max(initial=0)) + 1
    changes = np.bincount(first, minlength=length) - np.bincount(after, minlength=length)
    return np.flatnonzero(np.cumsum(changes)).tolist()


def _fill(file: FileIO, view: memoryview) -> None:
    while view:
        if not (count := file.readinto(view)):
            raise ValueError("it ends too early")
        view = view[count:]


@dataclass(frozen=True)
class _Entry:
    """A tensor in the header, as JSON has it."""

    dtype: str
    shape: Annotated[tuple[int, ...], Within(0, 2**62)]
    data_offsets: tuple[int, int]


def _parse_header(text: bytes, size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Return the texts in a header, and its tensors, which must fill `size` bytes. Raises:
    ValueError."""
    header = from_plain(dict[str, Any], parse_json(text), "the header")
    metadata = from_plain(dict[str, str], header.pop(_METADATA, {}), _METADATA)
    found = {}
    stops = {}
    for name, entry in header.items():
        told: _Entry = from_plain(_Entry, entry, name, lenient=True)
        kind = DTYPES.get(told.dtype)
        shape = told.shape
        if kind is None:
            raise ValueError(
                f"{name} has type {shown(told.dtype)}; must be one of {', '.join(DTYPES)}"
            )
        start, stop = span(told.data_offsets, f"{name}.data_offsets", size)
        if len(shape) > _MAX_DIMS or prod(shape) * kind.itemsize != stop - start:
            raise ValueError(
                f"{name} has {stop - start} bytes, which does not match its shape "
                f"{list(shape)[:_MAX_DIMS]}"
            )
        found[name], stops[name] = TensorInfo(kind, shape, start), stop
    at = 0
    for name in sorted(found, key=lambda name: (found[name].start, stops[name])):
        if found[name].start != at:
            raise ValueError(
                f"{name} begins at byte {found[name].start}, but the tensor before it ends at {at}"
            )
        at = stops[name]
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")
    return metadata, found
