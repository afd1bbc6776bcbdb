"""Map-style datasets as streams of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridpar.config import Config, DataConfig, ModelSpec, ParallelConfig
from hybridpar.data import BatchLoader, Blend, open_data
from hybridpar.data.mapped import MappedDataset, rehearsal
from hybridpar.errors import ConfigError, DataError


class Model(ModelSpec):
    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.full(2, number, np.float32), "y": number % 3}


class Counting(Model):
    def num_targets(self, sample: dict[str, Any]) -> int:
        return int(sample["x"][0]) % 2


class Samples:
    def __init__(self, size: int, change: Any = None):
        self.size = size
        self.change = change
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        sample = {"x": torch.full((2,), float(i)), "y": i}
        return sample if self.change is None else self.change(i, sample)


def loader(model: ModelSpec, samples: Samples, dp: int = 1, rank: int = 0) -> BatchLoader:
    return BatchLoader(
        Blend([MappedDataset(model, samples, "train")], seed=3),
        micro_batch_size=2,
        num_microbatches=4 // dp,
        dp_rank=rank,
        dp_size=dp,
    )


def test_every_sample_once_an_epoch_on_any_grid() -> None:
    one = loader(Model(), Samples(24))
    seen = [one.microbatch(t, i) for t in range(3) for i in range(4)]
    assert sorted(int(y) for batch in seen for y in batch["y"]) == list(range(24))
    assert all(torch.equal(batch["x"][:, 0], batch["y"].float()) for batch in seen)
    halves = [loader(Model(), Samples(24), 2, rank) for rank in range(2)]
    dealt = [half.microbatch(1, i)["y"] for i in range(2) for half in halves]
    assert torch.equal(torch.cat(dealt), torch.cat([one.microbatch(1, i)["y"] for i in range(4)]))


def test_targets_are_counted_only_where_a_model_says_how() -> None:
    samples = Samples(24)
    plain = loader(Model(), samples)
    counting = loader(Counting(), samples)
    before = samples.read
    assert plain.num_targets(0) == 8
    assert samples.read == before, "one each"
    odd = sum(int(counting.microbatch(0, i)["y"].remainder(2).sum()) for i in range(4))
    assert counting.num_targets(0) == odd


def test_another_dataset_has_another_fingerprint() -> None:
    def changed(i: int, sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"y": i + (i == 23)}

    prints = {
        loader(Model(), samples).fingerprint
        for samples in (Samples(24), Samples(25), Samples(24, changed))
    }
    assert len(prints) == 3
    assert loader(Model(), Samples(24)).fingerprint in prints


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda i, s: (s["x"], i),
            r"dataset\('train'\) of Model\[0\] must be a dict of arrays by name, not a tuple",
        ),
        (lambda i, s: s | {"name": "a"}, r"'name' has the type <U1; must be numbers"),
        (lambda i, s: {}, "must be a dict of arrays"),
    ],
)
def test_samples_that_are_none(change: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        loader(Model(), Samples(4, change))


def test_samples_of_different_forms_are_named() -> None:
    ragged = loader(Model(), Samples(24, lambda i, s: s | {"x": np.zeros(2 + (i == 7))}))
    ragged.micro_batch_size = 1  # so that none is beside another
    with pytest.raises(
        DataError, match=r"Model\[7\] has .*\(3,\).*does not match the first sample's"
    ):
        [ragged.microbatch(t, i) for t in range(6) for i in range(4)]
    with pytest.raises(DataError, match="is empty"):
        loader(Model(), Samples(0))


def test_data_come_from_the_model_or_are_given(tmp_path: Any) -> None:
    config = Config(Model(), ParallelConfig(dp=1), data=DataConfig(cache=str(tmp_path)))
    with pytest.raises(ConfigError, match="must return training samples"):
        open_data(config)
    data = open_data(config, datasets={"train": Samples(5)})
    assert not data.valid
    assert data.train.batch([0, 1])["x"].shape == (2, 2)


def test_a_rehearsal_has_the_form_of_the_data() -> None:
    batch = rehearsal(Model(), 3)
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert set(batch) == {"x", "y", "num_targets", "num_samples"}
