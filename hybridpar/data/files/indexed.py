"""Token files in Megatron's format: `<prefix>.bin` holds ids, `<prefix>.idx` where sequences and
documents lie.

    .bin    token ids of all sequences, back to back, little-endian
    .idx    9 bytes  magic              4 * S  int32 length of each sequence, in tokens
            uint64   version, 1         8 * S  int64 offset of each sequence in .bin, in bytes
            uint8    dtype code         8 * D  int64 first sequence of each document, and S at the end
            uint64   S, sequences       (the arrays start at byte 34, so they are not aligned)
            uint64   D, documents + 1

The format has no checksum, so everything that can be wrong is checked before anything is allocated
by it.
Source: megatron/core/datasets/indexed_dataset.py of NVIDIA Megatron-LM (layout only).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import DataError
from hybridpar.reading import errors_as, open_regular

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_CODES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_CODES = (6, 7)
_SMALL_VOCAB = 65500
_CHUNK = 1 << 20  # entries of the index that are checked at a time
_NUM_PROBES = 64
_PROBE_BYTES = 4096


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's type for the ids of a vocabulary: uint16 below 65500 entries, else
    int32."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCAB else "<i4")


def is_indexed(prefix: str | Path) -> bool:
    """Return whether a .bin/.idx pair (or one file of it) has this prefix."""
    return any(Path(f"{prefix}{suffix}").is_file() for suffix in (".idx", ".bin"))


def indexed_prefix(name: str) -> str:
    """Return the prefix of the pair that a corpus of this name would be: a file's, without its
    ending."""
    return name[:-4] if name.endswith((".bin", ".idx")) else name


class IndexedDataset:
    """A .bin/.idx pair, memory-mapped.

    Attributes: `tokens` [T] ids of all sequences; `sizes` int32 [S]; `documents` int64 [D + 1], the
    first sequence of each document. The two views into the index are not aligned: slice or copy
    them, do not pass them to C code.

    Raises:
        DataError: A file is missing, damaged, truncated, or does not hold token ids.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        self.bin_path = Path(f"{prefix}.bin")
        self.idx_path = Path(f"{prefix}.idx")
        index = _map(self.idx_path)
        self.dtype, num_sequences, num_entries = self._read_header(index)
        start = _HEADER.size
        self.sizes = np.frombuffer(index, "<i4", num_sequences, start)
        self._offsets = np.frombuffer(index, "<i8", num_sequences, start + 4 * num_sequences)
        self.documents = np.frombuffer(index, "<i8", num_entries, start + 12 * num_sequences)
        self._check_documents()
        self.tokens = np.frombuffer(_map(self.bin_path, self._check_sequences()), self.dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Return the ids of sequence i: a view."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        start = int(self._offsets[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[i])]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @cached_property
    def sequence_starts(self) -> NDArray[np.int64]:
        """Return the position in `tokens` of each sequence, and the end. Shapes: [S + 1]."""
        return np.append(self._offsets // self.dtype.itemsize, self.num_tokens)

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """Return the position in `tokens` of each document, and the end. Shapes: [D + 1]."""
        return self.sequence_starts[self.documents]

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the whole index, and of the .bin's length and 64 positions in it."""
        digest = hashlib.sha256()
        with self.idx_path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        data = self.tokens.view(np.uint8)
        digest.update(len(data).to_bytes(8, "little"))
        for i in range(_NUM_PROBES):
            start = (
                (len(data) - _PROBE_BYTES) * i // (_NUM_PROBES - 1)
                if len(data) > _PROBE_BYTES
                else 0
            )
            digest.update(data[start : start + _PROBE_BYTES].tobytes())
        return digest.hexdigest()[:32]

    def largest_token(self) -> int:
        """Return the largest id, by reading all. Raises: DataError if one is negative."""
        largest = 0
        for start in range(0, self.num_tokens, 64 * _CHUNK):
            chunk = self.tokens[start : start + 64 * _CHUNK]
            if (smallest := int(chunk.min())) < 0:
                at = start + int(chunk.argmin())
                raise DataError(
                    f"{self.bin_path}: token {at} is {smallest}; ids must not be negative"
                )
            largest = max(largest, int(chunk.max()))
        return largest

    def _read_header(self, index: bytes | mmap.mmap) -> tuple[np.dtype[Any], int, int]:
        if len(index) < _HEADER.size:
            raise self._damaged(
                f"has {len(index)} bytes, fewer than the {_HEADER.size} of its header"
            )
        magic, version, code, num_sequences, num_entries = _HEADER.unpack_from(index)
        if magic != _MAGIC:
            raise self._damaged(f"starts with {magic!r}; an index must start with {_MAGIC!r}")
        if version != _VERSION:
            raise self._damaged(f"has version {version}; only {_VERSION} exists")
        if code in _FLOAT_CODES:
            raise self._damaged(
                f"has dtype code {code}: floating-point numbers, which are not token ids"
            )
        if code not in _CODES:
            raise self._damaged(
                f"has the unknown dtype code {code}; codes of token ids: "
                f"{', '.join(map(str, _CODES))}"
            )
        expected = _HEADER.size + 12 * num_sequences + 8 * num_entries
        counts = f"{num_sequences} sequences and {num_entries} document indices"
        if len(index) == expected + num_sequences and num_sequences:
            raise self._damaged(
                f"has modes of {num_sequences} sequences: multimodal data, which is not supported"
            )
        if len(index) != expected:
            raise self._damaged(
                f"has {len(index)} bytes; must have {expected} for the {counts} in its header"
            )
        if num_entries < 1:
            raise self._damaged("has no document indices; must have one more than documents")
        return np.dtype(_CODES[code]), num_sequences, num_entries

    def _check_documents(self) -> None:
        first = int(self.documents[0])
        last = int(self.documents[-1])
        if first != 0:
            raise self._damaged(f"document index 0 is {first}; must be 0")
        if last != len(self):
            raise self._damaged(
                f"the last document index is {last}; must be the number of sequences, {len(self)}"
            )
        for start in range(0, self.num_documents, _CHUNK):
            part = self.documents[start : start + _CHUNK + 1].astype(np.int64)  # aligned copy
            if (falls := np.flatnonzero(part[1:] < part[:-1])).size:
                i = int(falls[0])
                raise self._damaged(
                    f"document index {start + i + 1} is {part[i + 1]}, below the one before it, "
                    f"{part[i]}; indices must not decrease"
                )

    def _check_sequences(self) -> int:
        """Check lengths and offsets; return the number of bytes that .bin must have."""
        end = 0
        for start in range(0, len(self), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if (negative := np.flatnonzero(sizes < 0)).size:
                i = int(negative[0])
                raise self._damaged(
                    f"sequence {start + i} has length {sizes[i]}; lengths must not be negative"
                )
            ends = end + np.cumsum(sizes) * self.dtype.itemsize
            expected = np.concatenate(([end], ends[:-1]))
            offsets = self._offsets[start : start + _CHUNK]
            if (wrong := np.flatnonzero(offsets != expected)).size:
                i = int(wrong[0])
                raise self._damaged(
                    f"sequence {start + i} has offset {offsets[i]}, which does not match the "
                    f"lengths before it: {expected[i]}"
                )
            end = int(ends[-1])
        return end

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.idx_path}: {what}")


class IndexedWriter:
    """Writes a .bin/.idx pair aside and renames it into place when closed. As a context manager, it
    leaves nothing after a failure.

    Raises:
        DataError: An id does not fit the type.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | str):
        self._paths = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._asides = [path.with_name(f"{path.name}.{os.getpid()}.part") for path in self._paths]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in _CODES.items() if np.dtype(name) == self.dtype)
        self._sizes, self._documents = array("i"), array("q", [0])
        self._open = 0  # tokens of a sequence that has not ended
        self.num_tokens = 0
        self._file = self._asides[0].open("wb")

    def add(self, tokens: NDArray[np.integer] | Sequence[int]) -> None:
        """Append to the current sequence. Shapes: `tokens` [t]."""
        ids = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if ids.size and not (limits.min <= ids.min() and ids.max() <= limits.max):
            raise DataError(
                f"{self._paths[0]}: ids from {ids.min()} to {ids.max()} do not fit "
                f"{self.dtype.name}, "
                f"which holds {limits.min} to {limits.max}"
            )
        self._file.write(ids.astype(self.dtype).tobytes())
        self._open += ids.size
        self.num_tokens += ids.size

    def end_sequence(self, *, keep_empty: bool = True) -> None:
        """End a sequence. `keep_empty`: also if it has no tokens."""
        if self._open > np.iinfo(np.int32).max:
            raise DataError(
                f"{self._paths[1]}: a sequence has {self._open} tokens; the format allows at "
                f"most 2**31 - 1"
            )
        if self._open or keep_empty:
            self._sizes.append(self._open)
        self._open = 0

    def end_document(self, *, keep_empty: bool = True) -> None:
        """End a document after the last ended sequence. `keep_empty`: also if it has no
        sequences."""
        assert not self._open, "a sequence has not ended"
        if keep_empty or self._documents[-1] < len(self._sizes):
            self._documents.append(len(self._sizes))

    def close(self) -> None:
        """Write the index and put both files in place, .bin first."""
        self._file.close()
        sizes = np.array(self._sizes, "<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        with self._asides[1].open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, self._code, len(sizes), len(self._documents)))
            file.write(sizes.tobytes())
            file.write(
                (ends - sizes.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes()
            )
            file.write(np.array(self._documents, "<i8").tobytes())
        for aside, path in zip(self._asides, self._paths, strict=True):
            _flush(aside)
            os.replace(aside, path)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._file.close()
            for aside in self._asides:
                with contextlib.suppress(FileNotFoundError):
                    aside.unlink()


def _map(path: Path, num_bytes: int | None = None) -> bytes | mmap.mmap:
    """Return a file's bytes, mapped read-only. Raises: DataError if it cannot be read or does
    not have `num_bytes` bytes."""
    with errors_as(DataError, path), open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if num_bytes is not None and found != num_bytes:
            raise DataError(
                f"{path}: has {found} bytes, which does not match its index: {num_bytes}"
            )
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if found else b""


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
