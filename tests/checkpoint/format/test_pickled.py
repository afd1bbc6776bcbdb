"""Files of torch.save can hold tensors and plain values; whatever else they name is refused, and
nothing is run."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.exchange import OURS, same_bits, save_ours, tensors_of
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.format.pickled import Inert, load_pickled, tensors_in
from hybridpar.checkpoint.huggingface import export_folder, import_folder
from hybridpar.errors import CheckpointError

FORMATS = [True, False]  # since torch 1.6, and before
FORMAT = pytest.mark.parametrize("is_zip", FORMATS, ids=["zip", "old"])


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.mkdir):
        self.path = path
        self.function = function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, (str(self.path),)


def write(path: Path, value: object, is_zip: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


@FORMAT
def test_tensors_and_plain_values(tmp_path: Path, is_zip: bool) -> None:
    whole = torch.randn(6, 4)
    value = {
        "a": {"b": whole, "c": {"d": whole[1:3].t(), "n": 3}},
        "text": "x",
        "list": [1, (2.0, None, True)],
    }
    found = load_pickled(write(tmp_path / "x.pt", value, is_zip))
    assert (found["text"], found["list"], found["a"]["c"]["n"]) == ("x", [1, (2.0, None, True)], 3)
    same_bits(tensors_in(found, tmp_path), {"a.b": whole, "a.c.d": whole[1:3].t()})


@FORMAT
@pytest.mark.parametrize(
    "wrap", [lambda e: e, lambda e: {"w": torch.ones(1), "x": [e]}], ids=["bare", "inside"]
)
def test_code_in_a_pickle_is_refused_and_does_not_run(
    tmp_path: Path, wrap: Callable[[object], object], is_zip: bool
) -> None:
    made = tmp_path / "made"
    path = write(tmp_path / "x.pt", wrap(Evil(made)), is_zip)
    with pytest.raises(
        CheckpointError, match=r"x\.pt: contains (posix|nt)\.mkdir; only plain .* can run any code"
    ):
        load_pickled(path)
    with pytest.raises(CheckpointError, match="mkdir"):
        load_pickled(path, r"argparse\.Namespace")
    assert not made.exists()
    path = write(tmp_path / "y.pt", wrap(Evil(made, tempfile.mkdtemp)), is_zip)
    load_pickled(path, r"tempfile\.mkdtemp")  # a stand-in is made in its place
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.pt", "y.pt"]


@FORMAT
def test_stand_ins_keep_attributes_alone(tmp_path: Path, is_zip: bool) -> None:
    settings = argparse.Namespace(num_layers=3, dtype=torch.float16, nested=argparse.Namespace(a=1))
    path = write(
        tmp_path / "x.pt", {"args": settings, "rng": np.arange(3), "w": torch.ones(2)}, is_zip
    )
    with pytest.raises(CheckpointError, match=r"contains argparse\.Namespace"):
        load_pickled(path)
    found = load_pickled(path, r"argparse\.Namespace|numpy(\.\w+)+")
    assert type(found["args"]) is type(found["rng"]) is Inert
    assert (found["args"].num_layers, found["args"].dtype, found["args"].nested.a) == (
        3,
        torch.float16,
        1,
    )
    assert list(tensors_in(found, tmp_path)) == ["w"]


def test_globals_that_others_declare_safe_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", Evil(tmp_path / "made", tempfile.mkdtemp))
    theirs = [tempfile.mkdtemp, (Evil, "some.name")]
    with torch.serialization.safe_globals(theirs):
        before = torch.serialization.get_safe_globals()
        with pytest.raises(CheckpointError, match=r"contains tempfile\.mkdtemp"):
            load_pickled(path)
        assert set(torch.serialization.get_safe_globals()) == set(before)
    assert list(tmp_path.iterdir()) == [path]


@FORMAT
def test_damaged_files(tmp_path: Path, is_zip: bool) -> None:
    whole = write(tmp_path / "x.pt", {"w": torch.arange(200.0)}, is_zip).read_bytes()
    path = tmp_path / "y.pt"
    for cut in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(
            CheckpointError,
            match=r"y\.pt: (is damaged, or not written by torch\.save|contains " r"\S+; )",
        ):
            load_pickled(path)
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_pickled(path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_pickled(tmp_path / "none.pt")


def test_tensors_that_claim_more_than_there_is(tmp_path: Path) -> None:
    for tensor, said in (
        (torch.ones(1).expand(10**9), "w has shape"),
        (torch.ones(3).to_sparse(), "_sparse_tensor"),
        (torch.empty(3, device="meta"), "contains .*; only plain tensors and values"),
    ):
        path = write(tmp_path / "x.pt", {"w": tensor})
        with pytest.raises(CheckpointError, match=said):
            tensors_in(load_pickled(path), path)
    path = tmp_path / "y.pt"
    for text in (b"X\xff\xff\xff\x7fabc.", b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."):
        path.write_bytes(b"\x80\x02" + text)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"is damaged|contains builtins\.bytearray"):
            load_pickled(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24


def test_zips_that_others_have_packed(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.pt", {"w": torch.arange(1000.0)})
    with zipfile.ZipFile(whole) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for way in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "y.pt", "w", way) as archive:
            for name, record in records.items():
                archive.writestr(name, record)
        if way == zipfile.ZIP_STORED:
            same_bits(load_pickled(tmp_path / "y.pt"), {"w": torch.arange(1000.0)})
    with pytest.raises(
        CheckpointError, match=r"y\.pt: is damaged, .* \(x/data\.pkl is compressed\)"
    ):
        load_pickled(tmp_path / "y.pt")
    torch.serialization.set_crc32_options(False)
    try:
        same_bits(
            load_pickled(write(tmp_path / "z.pt", {"w": torch.ones(9)})), {"w": torch.ones(9)}
        )
    finally:
        torch.serialization.set_crc32_options(True)


def test_reasons_are_not_torchs_advice(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", {"w": torch.ones(1)})
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, record in records.items():
            archive.writestr(
                name, record if not name.endswith("data.pkl") else b"\x80\x02]}K\x01K\x01sa0K\x01a."
            )
    with pytest.raises(CheckpointError, match=r"torch\.save \((?!.*weights_only).+\)$"):
        load_pickled(path)


def test_nesting_without_end(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(10**5):
        deep = {"d": deep}
    with pytest.raises(CheckpointError, match="mappings are nested deeper than 100"):
        tensors_in(deep, tmp_path)
    around: dict[str, Any] = {}
    around["self"] = around
    assert not tensors_in(around, tmp_path)


def as_pickled(folder: Path, is_zip: bool, num_files: int) -> None:
    """Puts the tensors of a folder into files of torch.save, as folders had them before
    safetensors."""
    tensors = tensors_of(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if num_files == 1:
        write(folder / "pytorch_model.bin", tensors, is_zip)
        return
    where: dict[str, str] = {}
    for i in range(num_files):
        part: dict[str, Tensor] = dict(list(tensors.items())[i::num_files])
        file = f"pytorch_model-{i + 1:05d}-of-{num_files:05d}.bin"
        write(folder / file, part, is_zip)
        where |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


@FORMAT
@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_folders_from_before_safetensors(
    tmp_path: Path, kind: str, num_files: int, is_zip: bool
) -> None:
    folder = save_ours(tmp_path / "made", OURS[kind])
    theirs = export_folder(folder, tmp_path / "theirs").folder
    as_pickled(theirs, is_zip, num_files)
    made = import_folder(theirs, tmp_path / "ours")
    same_bits(checkpoint.load_full(made.checkpoint)[1], checkpoint.load_full(folder)[1])


def test_a_folder_whose_weights_could_run_code(tmp_path: Path) -> None:
    theirs = export_folder(save_ours(tmp_path / "made", OURS["llama"]), tmp_path / "theirs").folder
    as_pickled(theirs, True, 1)
    write(theirs / "pytorch_model.bin", {"model.norm.weight": Evil(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: contains \w+\.mkdir"):
        import_folder(theirs, tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))
    assert not (tmp_path / "ran").exists()
    with zipfile.ZipFile(theirs / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": 1}, protocol=4))
    with pytest.raises(CheckpointError, match="is damaged, or not written"):
        import_folder(theirs, tmp_path / "ours")


def nested(operations: bytes, path: Path) -> Path:
    """A file of torch.save whose value is what these operations make."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + operations + b".")
        archive.writestr("a/version", "3\n")
    return path


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "operations",
    [
        b"}X\1\0\0\0a" * 10**6 + b"}" + b"s" * 10**6,
        b")" + b"\x85" * 10**6,
        b")" + b"\x85" * 10**6 + b"q\0}h\0h\0s",
        b"]" * 10**6 + b"a" * (10**6 - 1),
        b"(" * 10**6 + b"}",
        b"}0" * 1_100_000 + b"}",
    ],
    ids=["dictionaries", "tuples", "a key of tuples", "lists", "marks", "many"],
)
def test_a_pickle_that_nests_without_end_is_refused(operations: bytes, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nested deeper|on its stack|more than .* operations"
    ) as error:
        load_pickled(nested(operations, tmp_path / "x.pt"))
    assert len(str(error.value)) < 400


def test_dictionaries_that_contain_each_other_are_not_walked_for_ever(tmp_path: Path) -> None:
    """Each is put into the one before it while it is empty, so that no operation sees how deep they
    are."""
    made = b"}q\0" + b"".join(
        b"j" + i.to_bytes(4, "little") + b"X\1\0\0\0a}r" + (i + 1).to_bytes(4, "little") + b"s"
        for i in range(1000)
    )
    path = nested(made + b"h\0", tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="mappings are nested deeper than 100"):
        tensors_in(load_pickled(path), path)
