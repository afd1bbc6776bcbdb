"""Training of imported models, and text of exported ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import make_theirs, tensors_of
from ranks import run_ranks
from train.runs import write_config, write_corpus

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.cli import main
from hybridpar.config import (
    Config,
    Launch,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    load_toml,
)
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine
from hybridpar.train.inference.generate import Generator, Sampling
from hybridpar.train.job import train

transformers = pytest.importorskip("transformers")

GPT2 = {"vocab_size": 300, "n_positions": 20, "n_embd": 48, "n_layer": 2, "n_head": 3}
BERT = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 70,
    "max_position_embeddings": 20,
}
NEOX = BERT | {"rotary_pct": 0.25}


def test_a_rotary_gpt_is_a_gpt_neox_there(tmp_path: Path) -> None:
    """Like gpt_tiny.toml: with its own tokenizer, it writes the same text there."""
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("[model]", '[model]\nposition = "rotary"'))
    run = train(load_toml(path), Launch(0, 0, 1, 1)).folder
    assert main(["export", str(run), str(tmp_path / "theirs"), "--verify"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "theirs", local_files_only=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", local_files_only=True
    )
    assert (type(model).__name__, model.config.max_position_embeddings) == (
        "GPTNeoXForCausalLM",
        16,
    )
    ours = Generator.load(run, print)
    tokens = tokenizer("Stone rivers")
    assert tokens["input_ids"] == ours.tokenizer.encode("Stone rivers").tolist()
    made = model.generate(
        **tokenizer("Stone rivers", return_tensors="pt"), max_new_tokens=4, do_sample=False
    )
    text = "".join(ours.generate("Stone rivers", Sampling(max_tokens=4, temperature=0)))
    assert tokenizer.decode(made[0]) == "Stone rivers" + text


def steps_of(start: Path, tp: int, pp: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of three batches in float64, from a checkpoint."""
    model = replace(checkpoint.read_manifest(start).config.model, dropout=0.1)
    config = Config(
        model,
        ParallelConfig(tp, pp, 1),
        PipelineConfig("2bw", 4),
        OptimConfig(lr=1e-2),
        TrainConfig(3, 2, "fp64"),
    )
    engine = Engine(JobPlan(config), grid := ProcessGrid(tp=tp, pp=pp), torch.device("cpu"))
    checkpoint.start_from(start, engine)
    found: list[tuple[float, float]] = []
    loader = SyntheticLoader(model, 2, 4, grid.dp.rank, grid.dp.size)
    engine.train(loader, 3, lambda step: found.append((step.loss, step.grad_norm)))
    return found


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_pythia_trains_alike_on_every_grid(tmp_path: Path) -> None:
    made = import_folder(make_theirs(tmp_path / "theirs", "gpt_neox", **NEOX), tmp_path / "ours")
    alone, *others = (
        run_ranks(steps_of, tp * pp, made.checkpoint, tp, pp)[-1]
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2))
    )
    assert len(alone) == 3
    for other in others:
        for step, expected in zip(other, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-9)  # float64: sums in another order


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "sizes"), [("gpt2", GPT2), ("bert", BERT | {"head": "ForMaskedLM"})]
)
def test_shorter_sequences_than_positions(tmp_path: Path, kind: str, sizes: dict[str, Any]) -> None:
    """The imported table stays whole, and goes back; without weight decay unused rows keep their
    bits."""
    theirs = make_theirs(tmp_path / "theirs", kind, **sizes)
    assert main(["import", str(theirs), str(tmp_path / "ours")]) == 0
    write_corpus(tmp_path / "corpus.txt")
    flags = [
        "--data.corpus",
        str(tmp_path / "corpus.txt"),
        "--run.dir",
        str(tmp_path / "runs"),
        "--data.split",
        "0.2",
        "--train.device",
        "cpu",
        "--train.threads",
        "1",
        "--optim.weight_decay",
        "0",
        "--model.seq_length",
        "12",
    ]
    config = str(tmp_path / "ours" / "config.toml")
    assert main(["train", config, *flags, "--train.num_steps", "2"]) == 0
    assert main(["train", config, *flags, "--train.num_steps", "3"]) == 0  # resumed
    assert (
        main(
            ["export", str(tmp_path / "runs" / "ours-trained"), str(tmp_path / "back"), "--verify"]
        )
        == 0
    )
    name = {"gpt2": "transformer.wpe.weight", "bert": "bert.embeddings.position_embeddings.weight"}[
        kind
    ]
    before, after = (tensors_of(folder)[name] for folder in (theirs, tmp_path / "back"))
    assert after.shape == (20, 48)
    assert (after[:12] != before[:12]).any(1).all()
    assert torch.equal(after[12:], before[12:])
    assert main(["train", config, *flags[:-1], "21"]) == 1
