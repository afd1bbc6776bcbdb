"""Optimizers of one's own: the same on every grid, saved and resumed; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.cases import ONE, local, placements, random_tensors, slots
from optim.rules import Lion
from torch import Tensor
from train.runs import metrics, run_job, steps
from verify.test_grids import holds, make

from hybridpar import ModelSpec, Trainer, UpdateRule, load_toml
from hybridpar.config import Config, ModelConfig, OptimConfig, from_mapping, to_toml
from hybridpar.errors import ConfigError
from hybridpar.optim import build_optimizer
from hybridpar.optim.custom_rule import _made, find_rule
from hybridpar.validate import problems

EXAMPLES = Path(__file__).parents[2] / "examples"
LION = {"name": "own", "spec": "optim.rules:Lion"}


def test_it_is_what_it_says() -> None:
    settings = [
        OptimConfig(name="own", spec="optim.rules:Adam", weight_decay=0.1),
        OptimConfig(weight_decay=0.1),
    ]
    found = []
    for one in settings:
        parameters = local(random_tensors(0), 1, 0)
        optimizer = build_optimizer(one, slots(1, 0), ONE)
        for step in range(5):
            optimizer.step(
                parameters, local(random_tensors(step + 1), 1, 0), lr=0.1, gradient_scale=0.5
            )
        found.append(parameters)
    assert len(found[0]) == len(placements(1))
    for own, ours in zip(*found, strict=True):
        torch.testing.assert_close(own, ours, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, {"pipeline": {"schedule": "2bw"}, "parallel": {"zero": 1}}),
        (
            {"dp": 2},
            {
                "parallel": {"zero": 3},
                "pipeline": {"schedule": "1f1b"},
                "model": {"tie_embeddings": False},
            },
        ),
        (
            {"tp": 3, "pp": 2},
            {"pipeline": {"schedule": "2bw"}, "optim": {"staleness": "extrapolation"}},
        ),
        ({"pp": 2}, {"pipeline": {"schedule": "2bw"}, "memory": {"host_optimizer": True}}),
    ],
    ids=str,
)
def test_a_grid_is_the_same_training(grid: dict[str, int], sections: dict[str, Any]) -> None:
    optim = {"name": "own", "spec": "optim.rules:Adam", **sections.pop("optim", {})}
    config = make(
        sections.pop("model", None),
        optim=optim,
        pipeline=sections.pop("pipeline"),
        parallel=sections.pop("parallel", {}),
    )
    holds(grid, from_mapping(sections, config))


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit_and_on_another_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module lies beside neither the configuration nor the working folder: the run's folder has
    noted where."""
    monkeypatch.chdir(tmp_path)
    config = from_mapping(
        {
            "model": {"depth": 2, "width": 16, "image": 16},
            "optim": LION,
            "pipeline": {"num_microbatches": 2},
            "train": {"num_steps": 4, "micro_batch_size": 2, "threads": 1, "eval_interval": 0},
        },
        load_toml(EXAMPLES / "mixer.toml"),
    )
    Path("job.toml").write_text(to_toml(config))
    flags = ["--optim.decay_steps=4", "--train.save_interval=2", "--parallel.pp=2"]
    run_job(2, "train", "job.toml", *flags, "--run.name=whole")
    run_job(2, "train", "job.toml", *flags, "--run.name=parts", "--train.num_steps=2")
    run_job(2, "train", "job.toml", *flags, "--run.name=parts")
    whole, parts = (steps(metrics(Path("runs", name))) for name in ("whole", "parts"))
    assert [step for step, *_ in whole] == [1, 2, 3, 4]
    assert parts == whole
    folders = Path("runs/parts/model_folder").read_text().splitlines()
    assert folders == [str(EXAMPLES), str(Path(__file__).parents[1])]
    assert load_toml("runs/parts/config.toml").optim.spec == LION["spec"]
    trainer = Trainer(
        config="runs/parts/config.toml", parallel={"pp": 1, "dp": 1}, train={"num_steps": 5}
    )
    outcome = trainer.fit()
    assert outcome.resumed_from == 4


def test_a_trainer_takes_the_class() -> None:
    trainer = Trainer(optimizer=Lion, optim={"lr": 1e-4}, model={"num_layers": 1})
    optim = trainer.config.optim
    assert (optim.name, optim.spec, optim.lr) == ("own", "optim.rules:Lion", 1e-4)
    # so that it is tried out where memory is predicted, on tensors without values
    _made.cache_clear()
    assert trainer.memory()[0].optimizer > 0
    wrong = from_mapping({"optim": {"spec": "optim.rules:Noisy"}}, trainer.config)
    assert [problem.field for problem in problems(wrong, 1)] == ["optim.spec"]


def make_rule(factor: float) -> type[UpdateRule]:
    """A class that has the name of another one, as a cell of a notebook makes it that runs
    again."""

    class Same(UpdateRule):
        state_names = ()

        def update(
            self,
            weight: Tensor,
            gradient: Tensor,
            state: dict[str, Tensor],
            *,
            lr: float,
            decay: float,
            step: int,
        ) -> None:
            weight.sub_(gradient, alpha=lr * factor)

    return Same


def test_the_newest_class_of_a_name_is_used() -> None:
    older = make_rule(1.0)
    assert type(find_rule(Trainer(optimizer=older).config.optim)) is older
    newer = make_rule(2.0)
    assert type(find_rule(Trainer(optimizer=newer).config.optim)) is newer
    with pytest.raises(ConfigError, match="must be the newest class named"):
        Trainer(optimizer=older)


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Trainer(optimizer=torch.optim.AdamW),
            "optimizer = .* must be a subclass of hybridpar.UpdateRule",
        ),
        (
            lambda: Trainer(optimizer=Lion(OptimConfig())),
            "optimizer = .* must be a subclass of hybridpar.UpdateRule",
        ),
        (
            lambda: Trainer(datasets={"trian": []}),
            r"datasets = \['trian'\]: has unknown keys. Valid keys:",
        ),
        (lambda: Trainer().verify({"pp": 99}), "parallel.pp = 99: the model has only 6 blocks"),
        (lambda: Trainer(datasets=[1]), r"datasets = 'a list': must be a dict"),  # type: ignore[arg-type]
        (lambda: Trainer(config=5), "config = 5: must be the path of a TOML file"),  # type: ignore[arg-type]
        (lambda: Trainer("my.toml"), "model = 'my.toml': must be a ModelSpec"),  # type: ignore[arg-type]
        (lambda: Trainer(ModelConfig(num_layers="2")), "num_layers = '2': must be of type int"),  # type: ignore[arg-type]
        (lambda: Trainer(config=Config(5)), "model = 5: must be a ModelSpec"),  # type: ignore[arg-type]
        (lambda: Trainer(config=Config(ModelSpec())), "must be a frozen dataclass"),
        (lambda: Trainer(config=Config(train=5)), "train = 5: is a section"),  # type: ignore[arg-type]
        (lambda: Trainer(train={5: 1}), "train.5 = 1: unknown key"),  # type: ignore[dict-item]
        (lambda: Trainer().fit(on_step=5), "on_step = 5: must be a function"),  # type: ignore[arg-type]
        (lambda: Trainer().verify("tp=2"), "grid = 'tp=2': must map names of axes to their sizes"),  # type: ignore[arg-type]
        (
            lambda: Trainer().verify({"pp": "2"}),
            "grid pp = '2': must be a whole number of at least 1",
        ),  # type: ignore[dict-item]
        (lambda: Trainer().verify({"tp": 0}), "grid tp = 0: must be a whole number of at least 1"),
        (
            lambda: Trainer().verify(num_batches=0),
            "num_batches = 0: must be a whole number of at least 1",
        ),
    ],
    ids=range(17),
)
def test_a_trainer_refuses_what_cannot_work(call: Callable[[], object], message: str) -> None:
    """Before any process starts."""
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "OfTheWhole",
            "must give the same result for a weight in two pieces, .*; try an update of each "
            "element",
        ),
        ("Noisy", "must give the same result each time"),
        ("Returning", "must change the weights in place"),
        (
            "Counting",
            "must not keep state in attributes \\(seen\\), which checkpoints do not save; try "
            "state_names = \\('seen',\\)",
        ),
        (
            "Undeclared",
            "uses the state 'momentum', which state_names does not have; try state_names = "
            "\\('momentum',\\)",
        ),
        ("Replacing", "must change its state in place"),
        ("Unmakeable", "its constructor must work with the settings alone"),
        ("Uncallable", "cannot be called .* try def update"),
        ("Unwritten", "must define update; try def update"),
        (
            "Sdg",
            "must name a subclass of hybridpar.UpdateRule; Sdg of optim.rules is None",
        ),
    ],
)
def test_bad_rules_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.spec = 'optim\.rules:{name}': {message}"):
        build_optimizer(OptimConfig(name="own", spec=f"optim.rules:{name}"), slots(1, 0), ONE)


def test_name_and_spec_go_together() -> None:
    for optim in ({"name": "own"}, {"spec": LION["spec"]}, {**LION, "staleness": "nesterov"}):
        (problem,) = problems(make(optim=optim), 1)
        assert problem.field in ("optim.spec", "optim.staleness")
