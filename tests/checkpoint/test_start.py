"""A run that starts from the weights of a checkpoint, on any grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.exchange import OURS, random_like, save_ours, start_engine
from ranks import run_ranks
from train.runs import metrics, steps, write_config

from hybridpar import checkpoint
from hybridpar.cli import main
from hybridpar.config import (
    Config,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    from_mapping,
)
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine


def start(folder: Path, tp: int, pp: int, dp: int) -> None:
    """Every parameter is its part of the one in the checkpoint; tied ones are found under either
    name."""
    engine = start_engine(folder, tp, pp, dp)
    for name, tensor in engine.state.weights.full_weights().items():
        place = engine.state.placements[name]
        whole = random_like("blocks.0.tokens.weight" if place.tied else name, place.shape)
        assert torch.equal(tensor, place.take(whole, engine.grid.tp.rank)), name


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "grid"),
    [("gpt2", (3, 1, 1)), ("llama", (3, 1, 1)), ("bert", (2, 2, 1)), ("gpt2", (1, 2, 2))],
)
def test_one_process_to_a_grid(tmp_path: Path, kind: str, grid: tuple[int, int, int]) -> None:
    tp, pp, dp = grid
    run_ranks(start, tp * pp * dp, save_ours(tmp_path, OURS[kind]), tp, pp, dp)


def grid_to_grid(root: Path, dtype: str, zero: int) -> None:
    """Weights that tp=2 dp=2 has trained, taken by pp=4."""
    train = TrainConfig(2, 2, dtype)  # type: ignore[arg-type]
    config = Config(
        OURS["gpt2"], ParallelConfig(2, 1, 2, zero), PipelineConfig("1f1b", 2), train=train
    )  # type: ignore[arg-type]
    engine = Engine(JobPlan(config), grid := ProcessGrid(tp=2, dp=2), torch.device("cpu"))
    loader = SyntheticLoader(config.model, 2, 2, grid.dp.rank, grid.dp.size)
    engine.train(loader, 2, lambda step: None)
    folder = checkpoint.save(root, engine, "corpus")
    _, full = checkpoint.load_full(folder)
    other = replace(config, parallel=ParallelConfig(1, 4, 1))
    taken = Engine(JobPlan(other), ProcessGrid(pp=4), torch.device("cpu"))
    checkpoint.start_from(folder, taken)
    assert taken.batches_done == 0
    for name, tensor in taken.state.weights.full_weights().items():
        assert torch.equal(
            tensor, full["blocks.0.tokens.weight" if taken.state.placements[name].tied else name]
        ), name


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "zero"), [("fp32", 0), ("bf16", 1)])
def test_one_grid_to_another(tmp_path: Path, dtype: str, zero: int) -> None:
    run_ranks(grid_to_grid, 4, tmp_path, dtype, zero)


def start_from_damaged(folder: Path) -> str:
    try:
        start_engine(folder, 1, 2)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_damage_found_by_one_rank_fails_on_all(tmp_path: Path) -> None:
    """Only rank 0 reads checksums."""
    folder = save_ours(tmp_path, OURS["gpt2"])
    path = folder / "pp0-tp0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    first, second = run_ranks(start_from_damaged, 2, folder)
    assert first == second
    assert "checksum" in first


@pytest.mark.thorough
def test_a_run_starts_goes_on_and_forgets_where_it_came_from(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", str(config)]) == 0
    learnt = steps(metrics(tmp_path / "runs" / "run"))
    flags = [
        "--run.name",
        "second",
        "--train.start_from",
        str(tmp_path / "runs" / "run"),
        "--train.num_steps",
        "4",
    ]
    assert main(["train", str(config), *flags]) == 0
    second = steps(metrics(tmp_path / "runs" / "second"))
    assert second[0][0] == 1
    assert second[0][1] < learnt[0][1] - 0.1
    assert main(["train", str(config), *flags[:-1], "6"]) == 0  # from its own checkpoint
    assert [step for step, *_ in steps(metrics(tmp_path / "runs" / "second"))] == [1, 2, 3, 4, 5, 6]


def test_weights_for_other_tokens_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another text has another tokenizer, unless data.tokenizer names the one of the weights."""
    config = write_config(tmp_path)
    assert main(["train", str(config)]) == 0
    (tmp_path / "other.txt").write_text("".join(f"word{i} " for i in range(2000)))
    flags = [
        "--run.name",
        "second",
        "--train.start_from",
        str(tmp_path / "runs" / "run"),
        "--train.num_steps",
        "2",
        "--data.corpus",
        str(tmp_path / "other.txt"),
        "--data.split",
        "0",
        "--train.eval_interval",
        "0",
    ]
    assert main(["train", str(config), *flags]) == 1
    tokenizer = tmp_path / "runs" / "run" / "tokenizer.json"
    assert f"which were trained with another tokenizer; try '{tokenizer}'" in capfd.readouterr().err
    assert main(["train", str(config), *flags, "--data.tokenizer", str(tokenizer)]) == 0


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"hidden_size": 64, "num_heads": 4},
            r"model\.hidden_size = 64: does not match train\.start_from = .* has 48; try 48",
        ),
        ({"activation": "gelu_exact"}, r"model\.activation = 'gelu_exact'"),
        ({"norm_eps": 1e-3}, r"model\.norm_eps"),
        (
            {"seq_length": 10},
            r"model\.max_positions = 0: does not match train\.start_from = .* has a table of 20 "
            r"positions; try 20",
        ),
        ({"seq_length": 10, "max_positions": 21}, r"model\.max_positions = 21"),
        ({"position": "rotary"}, r"model\.position"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    folder = save_ours(tmp_path, OURS["gpt2"])
    model = from_mapping({"model": changes}, Config(OURS["gpt2"])).model
    with pytest.raises(ConfigError, match=says):
        checkpoint.find_start(folder, model)


def test_allowed_differences(tmp_path: Path) -> None:
    folder = save_ours(tmp_path, OURS["llama"])
    model: ModelConfig = replace(OURS["llama"], dropout=0.1, logits_chunk=7, seq_length=8)
    assert checkpoint.find_start(folder, model) == folder
    assert checkpoint.find_start(folder, replace(model, max_positions=99)) == folder
    learned = save_ours(tmp_path / "learned", OURS["gpt2"])
    assert (
        checkpoint.find_start(learned, replace(OURS["gpt2"], seq_length=8, max_positions=20))
        == learned
    )
    with pytest.raises(CheckpointError, match="is neither a run folder nor a checkpoint"):
        checkpoint.find_start(tmp_path / "nowhere", model)
