"""Our safetensors files are everyone's; a header that does not describe its file exactly is
refused."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridpar.checkpoint.format import tensorfile
from hybridpar.checkpoint.format.tensorfile import TensorFile, write_tensors
from hybridpar.errors import CheckpointError

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.randn(5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "fp16": torch.ones(1, 1, dtype=torch.float16),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6.0).view(2, 3).T,
    "one": torch.tensor(3.0),
}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    size, checksums = write_tensors(path, TENSORS, {"key": "väl\nue"})
    assert size == path.stat().st_size
    assert len(checksums) == 8 * (1 + sum(1 for t in TENSORS.values() if t.numel())), (
        "header, and each of the tensors"
    )
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in TENSORS.items()
    )
    assert TensorFile(path).metadata == {"key": "väl\nue"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({name: t.contiguous() for name, t in TENSORS.items()}, path, metadata={"k": "v"})
    file = TensorFile(path)
    assert file.metadata == {"k": "v"}
    for name, tensor in TENSORS.items():
        target = torch.empty(tensor.numel(), dtype=tensor.dtype)
        file.read(name, np.array([[0, 0, tensor.numel()]]), target)
        assert torch.equal(target, tensor.flatten())
        assert file.tensors[name].shape == tensor.shape


def test_pieces(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"x": torch.arange(10.0), "y": torch.arange(10.0) + 100}, {})
    target = torch.zeros(6)
    TensorFile(tmp_path / "file").read("y", np.array([[8, 0, 2], [1, 3, 3]]), target)
    assert target.tolist() == [108, 109, 0, 101, 102, 103]


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Pieces of a flat tensor, in any order: (first there, first here, how many)."""
    edges = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=8)))
    kept = [(a, b) for a, b in pairwise(edges) if draw(st.booleans())]
    at = 0
    found = []
    for a, b in draw(st.permutations(kept)):
        found.append([a, at, b - a])
        at += b - a
    return found


@given(st.data())
def test_read_parts_alone_are_compared(data: st.DataObject) -> None:
    """Chunks of 16 bytes. One byte of the file is damaged."""
    tensors = {
        "a": torch.arange(13.0),
        "b": torch.arange(30, dtype=torch.bfloat16),
        "c": torch.arange(9.0) + 50,
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tensorfile, "CHUNK", 16):
        path = Path(folder, "file")
        size, _ = written = write_tensors(path, tensors, {})
        file = TensorFile(path, written)
        name = data.draw(st.sampled_from("abc"))
        tensor = tensors[name]
        info = file.tensors[name]
        pieces = data.draw(cuts(tensor.numel()))
        bad = data.draw(st.integers(0, size - 1))
        content = bytearray(path.read_bytes())
        content[bad] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        if bad < size - sum(t.nbytes for t in tensors.values()):
            with pytest.raises(
                CheckpointError, match=r"its header|damaged, or no safetensors file"
            ):
                TensorFile(path, written)
            return
        at = bad - (size - sum(t.nbytes for t in tensors.values())) - info.start
        width = info.dtype.itemsize
        chunks = {
            byte // 16
            for first, _, n in pieces
            for byte in range(first * width, (first + n) * width)
        }
        target = torch.full((sum(n for *_, n in pieces),), -1, dtype=tensor.dtype)
        if 0 <= at < info.num_bytes and at // 16 in chunks:
            with pytest.raises(CheckpointError, match=f"{path}: is damaged, {name} cannot be read"):
                file.read(name, np.array(pieces), target)
        else:
            file.read(name, np.array(pieces, np.int64).reshape(-1, 3), target)
            for first, here, n in pieces:
                assert torch.equal(target[here : here + n], tensor[first : first + n])
        with pytest.raises(CheckpointError, match="is damaged"):
            file.check()


def test_checksums_of_another_file_are_refused(tmp_path: Path) -> None:
    size, checksums = write_tensors(tmp_path / "file", {"x": torch.arange(4.0)}, {})
    with pytest.raises(CheckpointError, match=f"it has {size} bytes, but must have {size + 1}"):
        TensorFile(tmp_path / "file", (size + 1, checksums))
    with pytest.raises(CheckpointError, match="it must have 2 checksums, and has 3"):
        TensorFile(tmp_path / "file", (size, checksums + checksums[:8]))
    with pytest.raises(CheckpointError, match="the checksum of its header"):
        TensorFile(tmp_path / "file", (size, checksums[8:] + checksums[:8]))


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"x": torch.arange(1000.0)}, {})
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="x cannot be read"):
        file.read("x", np.array([[0, 0, 1000]]), torch.empty(1000))
    path.unlink()
    with pytest.raises(CheckpointError, match="x cannot be read"):
        file.read("x", np.array([[0, 0, 1]]), torch.empty(1000))


def write_header(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int = 0, stop: int = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": entry(0, 8, (2,)), "b": entry(8, 16, (2,), "F99")}, "has type 'F99'"),
        ({"a": entry(shape=(5,))}, r"has 16 bytes, which does not match its shape \[5\]"),
        ({"a": entry(shape=(2**61, 2))}, "does not match its shape"),
        ({"a": entry(shape=(-4,))}, "must be at least 0"),
        ({"a": entry(shape=(4.0,))}, "must be of type int"),
        ({"a": entry(shape=(True, 4))}, "must be of type int"),
        ({"a": entry(shape="4")}, "must be a list"),
        ({"a": entry(shape=(1,) * 9 + (4,))}, "does not match its shape"),
        ({"a": entry(0, 8, (2,))}, "end at byte 8 of 16"),
        ({"a": entry(8, 16, (2,))}, "begins at byte 8"),
        ({"a": entry(), "b": entry()}, "begins at byte 0, but the tensor before it ends at 16"),
        (
            {"a": entry(0, 12, (3,)), "b": entry(8, 16, (2,))},
            "begins at byte 8, but the tensor before it ends at 12",
        ),
        ({"a": entry(0, 32, (8,))}, "from 0 to 16"),
        ({"a": entry(16, 0)}, "from 0 to 16"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "'data_offsets' is missing"),
        ({"a": 3}, "a is 3, which must be of type dict"),
        ([], "the header is .*, which must be of type dict"),
        ({"__metadata__": {"k": 3}, "a": entry()}, "metadata__.k is 3, which must be of type str"),
        (b'{"a":{},"a":{}}', "the same key twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "damaged"),
        (b"", "cannot be 0 bytes long"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        TensorFile(write_header(tmp_path / "file", header))


@pytest.mark.parametrize("length", [0, 1, 25, 2**20, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{}" * 8)
    with pytest.raises(CheckpointError, match="damaged, or no safetensors file"):
        TensorFile(tmp_path / "file")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFile(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="damaged"):
        TensorFile(tmp_path / "file")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "dtype", "shape", "data_offsets"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.one_of(
        VALUES,
        st.dictionaries(
            st.text(max_size=3),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "F64", "I8"]),
                    "shape": st.lists(st.integers(-1, 5), max_size=3),
                    "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
                }
            ),
            max_size=3,
        ),
    ),
    st.integers(0, 40),
)
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Any, size: int
) -> None:
    path = write_header(tmp_path_factory.getbasetemp() / "fuzzed", header, b"\0" * size)
    try:
        file = TensorFile(path)
    except CheckpointError:
        return
    assert sum(t.dtype.itemsize * int(np.prod(t.shape)) for t in file.tensors.values()) == size
