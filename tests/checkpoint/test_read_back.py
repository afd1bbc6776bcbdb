"""A file that is damaged as it is written: noticed before its checkpoint is published, or when it
is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.test_resume import make_config
from engines import start
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.background import Write
from hybridpar.checkpoint.handover import Written
from hybridpar.config import from_mapping
from hybridpar.errors import CheckpointError


def flip(path: Path) -> None:
    """A bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("read_back", [False, True])
def test_a_damaged_file_is_not_published_where_it_is_read_back(
    tmp_path: Path, read_back: bool, beside: bool
) -> None:
    engine, loader = start(
        from_mapping({"checkpoint": {"read_back": read_back}}, make_config(pp=1))
    )
    saver = checkpoint.Saver(tmp_path, engine, "corpus")
    engine.train(loader, 2, lambda step: None)
    saver.start(beside=beside)
    assert saver.settle() == tmp_path / "step_00000002"

    def damaging(write: Write) -> Write:
        def damage(tensors: dict[str, Tensor]) -> Written:
            written = write(tensors)
            (path,) = tmp_path.glob(".step_*.part/*.safetensors")
            flip(path)
            return written

        return damage

    saver.write_with(damaging)
    engine.train(loader, 1, lambda step: None)
    saver.start(beside=beside)
    if read_back:
        with pytest.raises(
            CheckpointError, match=r"rank 0 .* cannot write the checkpoint: .*pp0-tp0.*checksum"
        ):
            saver.settle()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    else:
        assert saver.settle() == tmp_path / "step_00000003"
    said: list[str] = []
    assert checkpoint.resume(tmp_path, start(engine.config)[0], "corpus", said.append) == 2
    assert len(said) == (0 if read_back else 1)
