"""Sampling: the choice of a token, the sliding window, text in whole characters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.runs import write_config

from hybridpar.config import Launch, load_toml
from hybridpar.data import Tokenizer, train_tokenizer
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.train.generate import Generator, Sampling, choose
from hybridpar.train.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_toml(write_config(tmp_path_factory.mktemp("run")))
    return train(config, Launch(0, 0, 1, 1)).folder


def test_choices() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, -9.0])
    random = torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(temperature=0.0), random) == 1
    assert {choose(logits, Sampling(top_k=2, temperature=10.0), random) for _ in range(60)} == {1, 2}
    assert {choose(logits, Sampling(top_k=0, temperature=100.0), random) for _ in range(99)} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="temperature"):
        Sampling(temperature=-1.0)


def test_text_depends_on_the_seed_alone(run: Path) -> None:
    generator = Generator.load(run, print)
    texts = ["".join(generator.generate("Stone", Sampling(30, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    named = Generator.load(run / "checkpoints" / "step_00000006", print)
    assert "".join(named.generate("Stone", Sampling(30, seed=1))) == texts[0]


def test_a_long_text_slides_through_the_window(run: Path) -> None:
    generator = Generator.load(run, print)
    tokens = list(range(1, 60))
    window = generator.model.seq_length
    assert torch.equal(generator.next_logits(tokens), generator.next_logits(tokens[-window:]))
    assert len(generator.next_logits(tokens)) == generator.tokenizer.vocab_size
    assert len(list(generator.generate("Stone " * 40, Sampling(5, temperature=0.0)))) <= 6


class Scripted(Generator):
    """Says given tokens instead of what a model would."""

    def __init__(self, tokenizer: Tokenizer, script: list[int]):
        self.tokenizer, self.script = tokenizer, script

    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.script.pop(0)), self.tokenizer.vocab_size).float()


def test_pieces_are_whole_characters_and_the_end_token_ends() -> None:
    tokenizer = train_tokenizer(["plain text"], 300)
    ids = [int(i) for i in tokenizer.encode("é→x")]
    assert len(ids) == 6
    end = tokenizer.special("<|endoftext|>")
    greedy = Sampling(20, temperature=0.0)
    assert list(Scripted(tokenizer, [*ids, end, *ids]).generate("", greedy)) == ["é", "→", "x"]
    cut = list(Scripted(tokenizer, ids[:3]).generate("", Sampling(3, temperature=0.0)))
    assert cut == ["é", "\ufffd"]


def test_what_cannot_generate(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        Generator.load(tmp_path / "none", print)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Generator.load(tmp_path, print)
    bert = write_config(tmp_path)
    bert.write_text(bert.read_text().replace("[model]", '[model]\nkind = "bert"'))
    folder = train(load_toml(bert), Launch(0, 0, 1, 1)).folder
    with pytest.raises(ConfigError, match="only a gpt generates"):
        Generator.load(folder, print)
