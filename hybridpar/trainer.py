"""Training from Python: the same runs as `hybridpar train`, with the same folders.

    trainer = hybridpar.Trainer(MyModel(depth=4), parallel={"pp": 2}, pipeline={"schedule": "2bw"})
    assert trainer.verify().ok          # the same training as one process, in float64
    trainer.fit(on_step=lambda result: print(result.loss))

A script of that starts alone or under torchrun: `torchrun --nproc-per-node 2 script.py`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.config import (
    Config,
    Launch,
    ModelSpec,
    UpdateRule,
    as_typed,
    from_mapping,
    load_toml,
    spec_name,
    without_unused,
)
from hybridpar.config.spec import import_class, require_settings
from hybridpar.errors import config_error
from hybridpar.train import watchdog
from hybridpar.validate import resolve

if TYPE_CHECKING:
    from hybridpar.memory import StageMemory
    from hybridpar.train.policy import StepResult
    from hybridpar.train.run import Outcome
    from hybridpar.verify.run import Report


class Trainer:
    """Trains `model` with `config` (a Config, a TOML file, or the defaults), changed by keywords named as its sections.

    `model`: a ModelSpec, such as a ModelConfig; None: that of `config`. `datasets`: by part ("train", "valid"), instead
    of the model's own (`ModelSpec.dataset` says what they may be; samples for a GPT have `tokens` and `labels`, each
    [seq_length], where a label of -100 does not count). `optimizer`: your own UpdateRule, instead of optim.name.

    Raises: ConfigError naming every key that is unknown and every value of a wrong type.
    """

    def __init__(self, model: ModelSpec | None = None, /, config: Config | str | Path | None = None, *,
                 datasets: Mapping[str, Any] | None = None, optimizer: type[UpdateRule] | None = None,
                 **sections: Mapping[str, Any]):
        base = Config() if config is None else config if isinstance(config, Config) else load_toml(config)
        base = base if model is None else dataclasses.replace(base, model=model)
        if not isinstance(base.model, ModelSpec):
            rule = "must be a ModelSpec; a configuration or its file is named config"
            raise config_error("model", base.model, rule, "hybridpar.ModelConfig()")
        require_settings(type(base.model))
        base = as_typed(base)
        if optimizer is not None:
            if not (isinstance(optimizer, type) and issubclass(optimizer, UpdateRule)):
                raise config_error("optimizer", optimizer, "must be a class made of hybridpar.UpdateRule", "None")
            name = spec_name(optimizer)
            if import_class("optim.spec", name, UpdateRule) is not optimizer:
                rule = f"must be the newest class that is named {name!r}, as a run finds it by this name"
                raise config_error("optimizer", optimizer, rule, "a class of another name")
            own = {"name": "own", "spec": name}
            base = dataclasses.replace(base, optim=dataclasses.replace(base.optim, **own))  # type: ignore[arg-type]
        self.config, unused = without_unused(from_mapping(sections, base))
        for line in unused if Launch.from_environment().rank == 0 else ():
            print(f"hybridpar: {line}", file=sys.stderr)
        if not isinstance(datasets or {}, Mapping):
            raise config_error("datasets", datasets, "must be datasets by part of a run", '{"train": ..}')
        if unknown := set(datasets or {}) - {"train", "valid"}:
            raise config_error("datasets", sorted(map(str, unknown)), "are no parts of a run", '"train", "valid"')
        self.datasets = dict(datasets or {})

    def fit(self, *, on_step: Callable[[StepResult], None] | None = None,
            on_evaluation: Callable[[int, dict[str, float]], None] | None = None,
            on_save: Callable[[Path], None] | None = None) -> Outcome:
        """Trains to the end, or to a signal; goes on from the last checkpoint of the run folder, if there is one.

        The functions are called as `train.callbacks.Callbacks` says. Collectives: on all processes of the job.
        Raises: HybridparError, as `hybridpar train` reports it.
        """
        import torch

        drawn = random.getstate()  # rich draws from it when it is imported
        from hybridpar.train.callbacks import Callbacks
        from hybridpar.train.loop import train
        random.setstate(drawn)

        given = {"on_step": on_step, "on_evaluation": on_evaluation, "on_save": on_save}
        for name, call in given.items():
            if not (call is None or callable(call)):
                raise config_error(name, call, "must be a function", "None")
        callbacks = Callbacks(**{name: _staying(call) for name, call in given.items() if call is not None})
        threads = torch.get_num_threads()  # train.threads is of training, not of the program around it
        try:
            return train(self.config, Launch.from_environment(), callbacks=callbacks, datasets=self.datasets)
        finally:
            torch.set_num_threads(threads)
            watchdog.current().phase("between calls of fit")  # without a limit: what follows is the program's affair

    def verify(self, grid: Mapping[str, int] | None = None, num_batches: int = 4) -> Report:
        """Compares a few batches on a grid (None: that of the configuration) with one process, in float64.

        Starts the ranks itself, so not under torchrun. Raises: ConfigError; HybridparError if a rank failed.
        """
        from hybridpar.verify.run import on_grid, verify

        parallel = self.config.parallel
        sizes = {"tp": parallel.tp, "pp": parallel.pp, "dp": max(parallel.dp, 1)} if grid is None else grid
        on = on_grid(self.config, sizes)
        resolve(on, on.parallel.num_ranks)
        return verify(self.config, sizes, num_batches)

    def memory(self) -> list[StageMemory]:
        """The peak memory that a process of each pipeline rank will take; nothing is allocated. Raises: ConfigError."""
        from hybridpar.memory import predict

        return predict(resolve(self.config, self.config.parallel.num_ranks))


def _staying(call: Callable[..., None]) -> Callable[..., None]:
    """The function with this working folder, in which run.dir may lie, again after each call, also where it raises.

    No watchdog ends this process meanwhile. Other ranks wait for it for up to train.timeout_s.
    """
    home = os.getcwd()

    def called(*news: Any) -> None:
        try:
            with watchdog.current().unlimited():
                call(*news)
        finally:
            os.chdir(home)

    return called
