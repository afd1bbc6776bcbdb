"""The examples train, and are the same training on every grid."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.exchange import make_theirs
from data import foreign
from ranks import run_ranks
from train import forked
from train.forked import Job, supervised
from train.runs import fork_ranks, metrics, steps

import hybridpar
from hybridpar import ProcessGrid, Tokenizer, Trainer, load_toml
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.cli import main
from hybridpar.comm import gather_objects
from hybridpar.config import Config, from_mapping
from hybridpar.data import train_tokenizer
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import HybridparError
from hybridpar.grid import sizes_of
from hybridpar.job import JobPlan
from hybridpar.prediction import MemoryWatch
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.engine import Engine
from hybridpar.train.reporting import progress
from hybridpar.validate import problems, resolve
from hybridpar.watch import Board

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "vit": {"depth": 2, "width": 24, "heads": 3, "image": 16},
    "mixer": {"depth": 2, "width": 16, "image": 16},
    "t5": {"layers": 1, "width": 16, "heads": 2, "length": 6},
    "transformers_model": {
        "depth": 2,
        "width": 16,
        "heads": 2,
        "groups": 1,
        "vocab": 32,
        "length": 8,
    },
}
SMALL["own_schedule"] = SMALL["mixer"]


def config_of(name: str, **sections: dict[str, Any]) -> Config:
    base = from_mapping(
        {
            "model": SMALL[name],
            "train": {"micro_batch_size": 2, "num_steps": 6, "threads": 1},
            "optim": {"lr": 1e-2},
        },
        load_toml(EXAMPLES / f"{name}.toml"),
    )
    return from_mapping(sections, base)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_uses_public_names(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 100
    if path.stem == "vit":
        assert sum(map(bool, map(str.strip, lines))) <= 60, "from an empty file"
    assert not [line for line in lines if "hybridpar." in line and "import" in line], (
        "all is in hybridpar itself"
    )
    assert path.with_suffix(".toml").is_file() or 'if __name__ == "__main__":' in lines


def run_shortened(words: list[str]) -> int:
    """Run an example as its file's main program, for a few small steps alone."""
    unshortened = hybridpar.Trainer
    few = {"num_steps": 4, "micro_batch_size": 2, "eval_interval": 2, "eval_batches": 2}
    hybridpar.Trainer = lambda *args, train, **rest: unshortened(*args, train=train | few, **rest)  # type: ignore[misc,assignment]
    with open("stdout", "w") as file, redirect_stdout(file):
        runpy.run_path(words[0], run_name="__main__")
    return 0


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_grids", "ends_with"),
    [
        ("plain_gpt", 1, r"\ndef (.|\n)*"),
        ("resnet", 2, r"class \d, found \d\n"),
        ("two_towers", 3, r"users: tensor\((.|\n)*"),
    ],
)
def test_a_program_verifies_trains_evaluates_and_has_its_weights(
    tmp_path: Path, name: str, num_grids: int, ends_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an example like a user, but in a fork of this process, which imports nothing again."""
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 80
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(forked.MAINS, "example", run_shortened)
    code, said = Job("example", path).end()
    assert code == 0, said
    stdout = Path("stdout").read_text()
    assert stdout.count("one process: True") == num_grids
    assert "validation: {'loss': " in stdout
    assert re.search(f"{ends_with}$", stdout), stdout
    assert "step 4/4" in said


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_configuration_is_right_and_its_plan_proven(path: Path) -> None:
    config = resolve(load_toml(path), load_toml(path).parallel.num_ranks)
    assert not problems(config, config.parallel.num_ranks)
    JobPlan(config).prove()


@pytest.mark.thorough(keep=3)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "grid", "sections"),
    [
        ("vit", {"tp": 2, "pp": 2}, {}),
        ("vit", {"tp": 3, "dp": 2}, {"parallel": {"zero": 1}, "pipeline": {"recompute": "all"}}),
        ("t5", {"pp": 5}, {"pipeline": {"num_microbatches": 6}}),
        ("t5", {"tp": 2, "pp": 2}, {"pipeline": {"schedule": "1f1b", "recompute": "stage"}}),
        ("mixer", {"pp": 2, "dp": 2}, {"pipeline": {"split_backward": True}}),
        ("transformers_model", {"pp": 2, "dp": 2}, {"pipeline": {"recompute": "all"}}),
        (
            "mixer",
            {"pp": 2},
            {
                "pipeline": {"schedule": "interleaved", "virtual_stages": 2, "recompute": "stage"},
                "optim": {"name": "muon"},
                "compression": {"messages": "int4"},
            },
        ),
    ],
    ids=str,
)
def test_a_grid_is_the_same_training(
    name: str, grid: dict[str, int], sections: dict[str, Any]
) -> None:
    report = Trainer(config=config_of(name, **sections)).verify(grid, 3)
    assert report.ok, report.first_divergence


@pytest.mark.ranks
def test_memory_and_messages_of_several_tensors_are_what_is_said() -> None:
    config = config_of(
        "t5",
        parallel={"pp": 3, "dp": 1},
        pipeline={"split": [1, 2, 2]},
        train={"num_steps": 20},
        checkpoint={"asynchronous": False},
    )
    measured, predicted, sent = run_ranks(train_watched, 3, config)[0]
    # around a forward, the state of torch's generator is read: 5,056 bytes, a fifth of the smallest
    # stage here
    assert measured == pytest.approx(predicted, rel=0.05, abs=5_056)
    one = (
        2 * 6 * 16 * 4
    )  # bytes: micro-batch, length, width, of the encoder's output, and of the decoder's
    steps = 6
    microbatches = 4
    assert sent == [steps * microbatches * size for size in (one, one + 2 * one, 2 * one)], (
        "forward, and back"
    )


def train_watched(config: Config) -> Any:
    """Peaks that were measured and predicted, and the bytes that each stage has sent to its
    neighbours."""
    grid, cpu = ProcessGrid(sizes_of(config.parallel)), torch.device("cpu")
    watch = MemoryWatch(JobPlan(config), cpu)
    engine = Engine(JobPlan(config), grid, cpu)
    loader = SyntheticLoader(
        config.model, config.train.micro_batch_size, config.pipeline.num_microbatches
    )
    engine.train(watch.loader(loader), 6, lambda result: None)
    found = watch.compare(grid)
    sent = gather_objects(
        sum(axis.traffic.num_bytes["send"] for axis in (grid.pp, grid.pp_reverse)), grid.world
    )
    return found.measured, found.predicted, sent


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("t5", {"parallel": {"tp": 2}}),
        ("transformers_model", {}),
        ("mixer", {"parallel": {"dp": 2, "zero": 1}, "pipeline": {"num_microbatches": 2}}),
        ("own_schedule", {"pipeline": {"schedule": "1f1b", "order": [], "split_backward": False}}),
    ],
)
def test_a_killed_run_goes_on_to_the_bit_and_on_another_grid(
    name: str, other: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where another grid may differ by the order of sums. other: that grid, which has
    no pipeline."""
    two = config_of(
        name,
        parallel={"pp": 2},
        train={"dtype": "fp64", "save_interval": 2, "eval_interval": 0},
        optim={"decay_steps": 6},
        checkpoint={"asynchronous": False},
        run={"dir": str(tmp_path)},
    )
    monkeypatch.setattr(
        type(two.model),
        "dataset",
        lambda self, part: [self.sample(i, len(part)) for i in range(60)],
    )

    def train(
        run: str, base: Config, killed_after: int = 0, **sections: dict[str, Any]
    ) -> list[Any]:
        config = from_mapping({"run": {"name": run}} | sections, base)
        fork_ranks(config.parallel.num_ranks, partial(train_until, config, killed_after))
        return steps(metrics(tmp_path / run))

    whole = train("whole", two)
    with pytest.raises(AssertionError, match="lost contact with rank 1"):
        train("killed", two, 3)
    assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]
    assert train("killed", two, train={"num_steps": 4}) == whole[:4]
    resharded = train("killed", from_mapping({"parallel": {"pp": 1}}, two), **other)
    assert np.allclose(resharded, whole, rtol=1e-9, atol=0.0)


def train_until(config: Config, killed_after: int) -> None:
    """Trains; rank 1 kills itself after that step."""

    def on_step(result: StepResult) -> None:
        if result.step == killed_after and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        Trainer(config=config).fit(on_step=on_step)
    except HybridparError as error:
        print(error)
        sys.exit(1)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_run_is_started_again_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        str(EXAMPLES / "vit.toml"),
        *(f"--model.{key}={value}" for key, value in SMALL["vit"].items()),
        "--train.micro_batch_size=2",
        "--train.threads=1",
        "--train.eval_interval=2",
        "--train.save_interval=2",
        "--parallel.pp=2",
        "--train.num_steps=4",
        "--checkpoint.asynchronous=false",
    ]
    code, out = supervised(
        "train", *flags, "--run.name=killed", "--ranks", "2", "--inject", "kill rank 1 at step 4"
    )
    assert code == 0, out
    assert "resuming after step 2" in out
    seen = Board(Path("runs/killed"), trust=True).look()
    assert (seen["latest"]["step"], len(seen["failures"]), len(seen["memory"])) == (4, 1, 2)
    command = [sys.executable, "-m", "hybridpar", "replay", "runs/killed", "--step", "3", "--trust"]
    again = subprocess.run(
        command,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.thorough
def test_commands_that_predict_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        str(EXAMPLES / "mixer.toml"),
        *(f"--model.{key}={value}" for key, value in SMALL["mixer"].items()),
        "--train.threads=1",
    ]
    cluster = str(EXAMPLES.parent / "scripts" / "clusters" / "two_homes.toml")
    for command, said in (
        (["check", *given, "--parallel.pp=2"], "fine on tp=1 pp=2"),
        (["simulate", *given, "--parallel.pp=2"], "steady state"),
        (["profile", *given, "--quick", "--ranks=1", "--output=profile.json"], "blocks.1"),
        (["check", *given, "--profile=profile.json"], "samples/s"),
        (["plan", *given, "--profile=profile.json", "--ranks=1"], "samples/s predicted"),
        (
            ["plan", *given, f"--cluster={cluster}", "--train.dtype=bf16", "--batch-size=64"],
            "samples/s, MFU",
        ),
        (["memory", *given, "--parallel.pp=2"], ""),
    ):
        assert main(command) == 0, command
        assert said in capsys.readouterr().out
    assert main(["check", *given, "--memory-gb=1", "--largest"]) == 1
    assert "model.spec = 'mixer:Mixer': requires a model that says" in capsys.readouterr().err


def test_a_trainer_tells_of_steps_evaluations_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that it calls may go to another folder: files stay together."""

    def on_save(folder: Path) -> None:
        told.append(folder.name)
        os.chdir("/")

    monkeypatch.chdir(tmp_path)
    config = config_of(
        "mixer",
        train={"num_steps": 4, "eval_interval": 2, "eval_batches": 1, "save_interval": 2},
        run={"dir": "runs"},
    )
    told: list[Any] = []
    outcome = Trainer(config=config).fit(
        on_step=lambda result: told.append(result.step),
        on_save=on_save,
        on_evaluation=lambda step, losses: told.append((step, losses)),
    )
    assert [step for step in told if isinstance(step, int)] == [1, 2, 3, 4]
    assert [step for step, _ in (entry for entry in told if isinstance(entry, tuple))] == [0, 2, 4]
    assert [name for name in told if isinstance(name, str)] == ["step_00000002", "step_00000004"]
    assert len([*(tmp_path / outcome.folder / "checkpoints").glob("step_*")]) == 2
    assert outcome.loss is not None
    assert (
        outcome.val_loss == sum(told[-2][1].values())
        if isinstance(told[-2], tuple)
        else outcome.val_loss
    )

    def fail(result: StepResult) -> None:
        os.chdir("/")
        raise ValueError("of the caller")

    with pytest.raises(HybridparError, match="of the caller"):
        Trainer(config=config, run={"name": "failed"}).fit(on_step=fail)
    assert Path.cwd() == tmp_path


@pytest.mark.thorough
def test_a_trainer_leaves_generators_and_threads_as_they_were(tmp_path: Path) -> None:
    """In a fork, which imports rich again."""

    def states() -> list[Any]:
        return [
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
        ]

    def fit() -> None:
        for name in [name for name in sys.modules if name.startswith(("rich", progress.__name__))]:
            del sys.modules[name]
        before = states()
        Trainer(config=config_of("mixer", train={"threads": 2}, run={"dir": str(tmp_path)})).fit()
        assert states() == before

    fork_ranks(1, fit)


@pytest.mark.thorough
def test_a_trainer_goes_on_in_a_stream(tmp_path: Path) -> None:
    from mixer import Mixer

    model = Mixer(**SMALL["mixer"])

    def fit(name: str, num_steps: int) -> list[tuple[int, float, float]]:
        stream = (model.sample(i, 9) for i in range(100))
        Trainer(
            model,
            datasets={"train": stream, "valid": None},
            run={"dir": str(tmp_path), "name": name},
            optim={"decay": "constant"},
            pipeline={"num_microbatches": 2},
            train={"num_steps": num_steps, "micro_batch_size": 3, "threads": 1, "eval_interval": 0},
        ).fit()
        return steps(metrics(tmp_path / name))

    whole = fit("whole", 4)
    fit("parts", 2)
    assert fit("parts", 4) == whole


def test_a_trainer_takes_datasets_and_refuses_what_is_none(tmp_path: Path) -> None:
    from mixer import Mixer

    from hybridpar.errors import ConfigError

    model = Mixer(**SMALL["mixer"])
    given = [model.sample(i, 9) for i in range(16)]
    trainer = Trainer(
        model,
        datasets={"train": given, "valid": None},
        run={"dir": str(tmp_path), "name": "own"},
        train={"num_steps": 1, "micro_batch_size": 2, "threads": 1, "eval_interval": 1},
    )
    with pytest.raises(ConfigError, match=r"train\.eval_interval = 1.*Mixer has none; try 0"):
        trainer.fit()
    trainer = Trainer(config=trainer.config, datasets=trainer.datasets, train={"eval_interval": 0})
    assert trainer.fit().step == 1
    assert next(iter(trainer.memory())).total > 0
    with pytest.raises(ConfigError, match=r"model\.widht .*did you mean model\.width"):
        Trainer(model, model={"widht": 3})


def test_a_conversation_is_as_its_tokenizer_has_it(tmp_path: Path) -> None:
    """It begins once, ends with the folder's own end, and may hold any separator but a line's
    end."""
    import finetune

    inner = foreign.llama()
    inner.add_special_tokens(["<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    pairs = [
        ("The cat", " sat.\u2028It\x85 was happy"),
        ("The cat?", "The mat"),
        ("mat", "s\x1c\x0b\x0c"),
    ]
    lines = [
        json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False)
        for prompt, answer in pairs
    ]
    (tmp_path / "questions.jsonl").write_bytes("\n".join([*lines, ""]).encode())
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    begin = inner.token_to_id("<s>")
    end = inner.token_to_id("<|im_end|>")
    made = finetune.samples(tmp_path / "questions.jsonl", tokenizer, 60)
    assert len(made) == len(pairs)
    for sample, (prompt, answer) in zip(made, pairs, strict=True):
        tokens = sample["tokens"].tolist()
        learned = [label for label in sample["labels"].tolist() if label != -100]
        assert (tokens[0], tokens.count(begin)) == (begin, 1)
        assert tokens[: len(tokenizer.encode_prompt(prompt))] == tokenizer.encode_prompt(prompt)
        assert learned[-1] == end
        assert learned.count(end) == 1
        text = tokenizer.decode(tokens[: tokens.index(end)])
        assert text.removeprefix("<s>").strip().replace(prompt, "", 1).strip() == answer.strip()


@pytest.mark.thorough
def test_answers_alone_are_learned(tmp_path: Path) -> None:
    """The loss before training is that of transformers with labels of -100 where the prompt is."""
    import finetune
    from transformers import LlamaForCausalLM

    theirs = make_theirs(
        tmp_path / "theirs",
        "llama",
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
    )
    words = ("red", "green", "blue", "black")
    train_tokenizer([f"What mixes with {word}? Never {word}." for word in words], 300).save(
        theirs / "tokenizer.json"
    )
    import_folder(theirs, tmp_path / "llama")
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"prompt": f"What mixes with {word}?", "answer": f" Never {word}."}) + "\n"
            for word in words * 5
        )
    )
    outcome = finetune.main(
        [str(tmp_path / "llama"), str(questions), "--steps", "30", "--lr", "0.01"]
    )
    before, *_, after = (
        row["val_loss"] for row in metrics(tmp_path / "llama-tuned") if "val_loss" in row
    )
    assert after == outcome.val_loss < 0.5 * before
    made = finetune.samples(questions, Tokenizer.load(theirs / "tokenizer.json"), 24)[:2]
    tokens, labels = (
        torch.tensor([sample[name].tolist() for sample in made]) for name in ("tokens", "labels")
    )
    assert 0 < (labels != -100).sum() < labels.numel() / 2
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(theirs)(tokens).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    assert before == pytest.approx(expected.item(), rel=1e-5)
    assert (
        main(
            [
                "generate",
                "--checkpoint",
                str(tmp_path / "llama-tuned"),
                "--prompt",
                "What mixes with red?",
                "--max_tokens",
                "4",
            ]
        )
        == 0
    )
    shutil.copytree(tmp_path / "llama", tmp_path / "two" / "llama")
    arguments = [
        str(tmp_path / "two" / "llama"),
        str(questions),
        "--steps",
        "12",
        "--lr",
        "0.01",
        "--pp",
        "2",
    ]
    fork_ranks(2, lambda: finetune.main(arguments).exit_code)
    one, two = (steps(metrics(tmp_path / run / "llama-tuned"))[:10] for run in ("", "two"))
    assert np.allclose(one, two, rtol=1e-4, atol=0.0)  # fp32; all of the warm-up
