"""Training from Python: the same runs as `hybridpar train`, with the same folders.

    row = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    trainer = hybridpar.Trainer(row, loss=loss, datasets={"train": samples}, parallel={"pp": 2})
    assert trainer.verify().ok          # the same training as one process, in float64
    print(trainer.fit().history.losses)
    row.load_state_dict(trainer.state_dict())

A script of that starts alone, and then `fit` starts the processes of its grid, or under torchrun:
`torchrun --nproc-per-node 2 script.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.config import (
    Config,
    Launch,
    ModelSpec,
    UpdateRule,
    as_typed,
    from_keywords,
    load_toml,
    spec_name,
    without_unused,
)
from hybridpar.config.samples import SampleSource
from hybridpar.config.spec import import_class, require_settings
from hybridpar.errors import config_error, raises_short_errors
from hybridpar.train.faults import watchdog
from hybridpar.train.stop import StopFlag
from hybridpar.validate import resolve

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hybridpar.models.given import GivenRow
    from hybridpar.prediction import StageMemory
    from hybridpar.train.batches.step_result import StepResult
    from hybridpar.train.run import Outcome
    from hybridpar.verify.run import Report


_KEYWORDS = ("config", "loss", "metrics", "num_targets", "datasets", "optimizer", "lr_schedule")
"""Arguments of a Trainer that are not sections of the configuration."""


@raises_short_errors
class Trainer:
    """A model with its data and configuration, ready to train.

    Args:
        model: A ModelSpec, such as a ModelConfig; or a sequence of modules, each of which takes the
            previous one's output: an nn.Sequential or a list, whose weights training starts from.
            None: the model of `config`.
        config: A Config, or the path of a TOML file. None: the defaults.
        loss: For modules: a function of the last module's output and the batch (a dict of tensors)
            that returns the mean loss over the samples of the micro-batch (a 0-d tensor). With
            `num_targets` it returns the sum over the labels that count instead.
        metrics: For modules: a function of the same arguments that returns further numbers by name,
            such as an accuracy. They are reported, and do not affect training.
        num_targets: For modules: a function of a sample that returns how many of its labels count.
            None: losses are means over samples.
        datasets: Data sets by split ("train", "valid"), instead of the model's (`ModelSpec.dataset`
            lists the accepted types). Several validation sets are a dict by name. Samples are dicts
            of arrays; the first module takes the array "x", or else a sample's first array. Samples
            for a GPT have `tokens` and `labels`, each [seq_length]; a label of -100 does not count.
        optimizer: A subclass of UpdateRule, instead of optim.name.
        lr_schedule: A function of the update number, counted from 0, that returns the learning
            rate, instead of optim.lr and its schedule settings. The constructor calls it for all of
            train.num_steps and stores the result as optim.lr_points, which differ from it by at
            most a millionth of the highest rate.
        **sections: Keys of the configuration by section, which override `config`: `parallel={"pp":
            2}`.

    Raises:
        ConfigError: Names every unknown key and every value of a wrong type.
    """

    def __init__(
        self,
        model: ModelSpec | nn.Module | Iterable[nn.Module] | None = None,
        /,
        config: Config | str | Path | None = None,
        *,
        loss: Callable[[Any, dict[str, Tensor]], Tensor] | None = None,
        metrics: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]] | None = None,
        num_targets: Callable[[dict[str, Any]], int] | None = None,
        datasets: Mapping[str, Any] | None = None,
        optimizer: type[UpdateRule] | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        **sections: Mapping[str, Any],
    ):
        self.datasets = _checked_datasets(datasets)
        self._stop = StopFlag()
        self._given: GivenRow | None = None
        if isinstance(model, type):
            rule = "must be an object, not its class"
            raise config_error("model", model, rule, f"{model.__name__}(..)")
        if _is_modules(model):
            self._given, model = self._row(model, loss, metrics, num_targets)
        else:
            functions = {"loss": loss, "metrics": metrics, "num_targets": num_targets}
            for name, function in functions.items():
                if function is not None:
                    rule = (
                        "not supported with a ModelSpec, which defines it as a method; only "
                        "with an nn.Sequential or a list of modules"
                    )
                    raise config_error(
                        name, function, rule, f"def {name}(..) in the class of the model"
                    )
        if config is None:
            base = Config()
        elif isinstance(config, Config):
            base = config
        else:
            base = load_toml(config)
        if model is not None:
            base = dataclasses.replace(base, model=model)  # type: ignore[arg-type]
        if not isinstance(base.model, ModelSpec):
            rule = (
                "must be a ModelSpec, an nn.Sequential or a list of modules; give a "
                "configuration or its file as config="
            )
            raise config_error("model", base.model, rule, "hybridpar.ModelConfig()")
        require_settings(type(base.model))
        base = as_typed(base)
        if optimizer is not None:
            base = _with_optimizer(base, optimizer)
        config = from_keywords(sections, base, _KEYWORDS)
        if lr_schedule is not None:
            config = _with_schedule(config, lr_schedule)
        self.config, unused = without_unused(config)
        for line in unused if Launch.from_environment().rank == 0 else ():
            print(f"hybridpar: {line}", file=sys.stderr)
        self._lend_samples()

    def fit(
        self,
        *,
        on_step: Callable[[StepResult], Any] | None = None,
        on_evaluation: Callable[[int, dict[str, Any]], Any] | None = None,
        on_save: Callable[[Path], Any] | None = None,
    ) -> Outcome:
        """Train to the end or until a stop is requested, resuming from the run folder's last
        checkpoint if there is one.

        If no launcher has started this program, `fit` starts the processes of a larger grid on this
        machine: forks of the program under the same supervisor as `hybridpar train --ranks`.
        Callbacks run in these processes. Under torchrun, the grid consists of torchrun's processes.

        Args:
            on_step: Called after each optimizer step with its numbers.
            on_evaluation: Called after each evaluation with the step and the validation numbers.
            on_save: Called with the folder of a complete checkpoint.

        Callbacks are called on all processes of the grid, at the same step. If one returns
        `hybridpar.STOP` on any process, training ends on all processes a few steps later: they
        save, and `fit` returns.

        Returns:
            How training ended. `history` has the losses and the evaluations of the run.

        Collectives: on all processes of the job.

        Raises:
            CallbackError: A callback has raised; the run has saved.
            HybridparError: The error that `hybridpar train` would report.
        """
        given = {"on_step": on_step, "on_evaluation": on_evaluation, "on_save": on_save}
        for name, call in given.items():
            if not (call is None or callable(call)):
                raise config_error(name, call, "must be a function", "None")
        functions = {name: _staying(call) for name, call in given.items() if call is not None}

        def train(config: Config, launch: Launch) -> Outcome:
            from hybridpar.train.callbacks import Callbacks
            from hybridpar.train.job import train

            callbacks = Callbacks(**functions, stop=self._stop)  # type: ignore[arg-type]
            return train(config, launch, callbacks=callbacks, datasets=self.datasets)

        self._stop.clear()
        return self._run_on_grid(train)

    def request_stop(self) -> None:
        """Ask `fit`, in this process or in forks of it, to stop: all ranks save and stop at the
        same step.

        May be called from a callback, another thread or a signal handler. `fit` ignores requests
        that were made before it started.
        """
        self._stop.set()

    def evaluate(self) -> dict[str, Any]:
        """Return the validation numbers of the run's newest weights, over train.eval_batches
        batches.

        These are the numbers that `on_evaluation` receives. Before the first checkpoint, the
        initial weights are evaluated. The grid is the same as for `fit`.

        Collectives: on all processes of the job.

        Raises:
            ConfigError: There are no validation samples.
        """

        def evaluate(config: Config, launch: Launch) -> dict[str, Any]:
            from hybridpar.train.evaluate_job import evaluate

            return evaluate(config, launch, self.datasets)

        numbers: dict[str, Any] = self._run_on_grid(evaluate)
        return numbers

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the run's newest checkpoint, or the initial weights if there is
        none.

        Modules keep their own parameter names, so that
        `modules.load_state_dict(trainer.state_dict())` works with strict=True; a list of modules is
        named like nn.Sequential(*modules). Other models use the names in their checkpoints
        (`blocks.0.layer.weight`). Weights are on the CPU, in the precision of the optimizer's copy.

        Returns:
            All weights, and for modules also their buffers. Empty on all ranks except the first.
        """
        from hybridpar.train.inference.trained_weights import trained_weights

        if Launch.from_environment().rank:
            return {}
        with self._prepared():
            return trained_weights(self.config)

    def verify(self, grid: Mapping[str, int] | None = None, num_batches: int = 4) -> Report:
        """Compare a few batches on a grid (None: the configuration's) with one process, in float64.

        This method starts the ranks itself, so it cannot run under torchrun.

        Raises:
            ConfigError: The grid does not fit the model.
            HybridparError: A rank failed.
        """
        from hybridpar.verify.run import on_grid, verify

        parallel = self.config.parallel
        own = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep")}
        own["dp"] = max(parallel.dp, parallel.least_dp)
        sizes = own if grid is None else grid
        with self._prepared():
            on = on_grid(self.config, sizes)
            resolve(on, on.parallel.num_ranks)
            return verify(self.config, sizes, num_batches)

    def memory(self) -> list[StageMemory]:
        """Return the peak memory that a process of each pipeline rank will take, without allocating
        it.

        Raises:
            ConfigError: The configuration cannot work.
        """
        from hybridpar.job import JobPlan
        from hybridpar.prediction import predict

        with self._prepared():
            return predict(JobPlan(resolve(self.config, self.config.parallel.num_ranks)))

    def _row(
        self, modules: Any, loss: Any, metrics: Any, num_targets: Any
    ) -> tuple[GivenRow, ModelSpec]:
        from hybridpar.models.given import GivenModules, make_row

        row = make_row(modules, loss, metrics, num_targets, self.datasets)
        self.datasets = dict(row.datasets)
        row.register()
        return row, GivenModules(row.structure)

    def _lend_samples(self) -> None:
        """Give the samples of the training set to a model without a method `sample`."""
        kind = type(self.config.model)
        reads_text = self.config.model.text_format is not None
        lacks_samples = not reads_text and kind.sample is ModelSpec.sample
        if lacks_samples and self.datasets.get("train") is not None:
            from hybridpar.models.sequential import forget_shapes

            source = SampleSource(self.datasets["train"])
            self.datasets["train"] = source.dataset
            kind.lend(source)
            forget_shapes()

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Make this trainer's modules the model of the configuration, and restore the program's
        global state afterwards."""
        import torch

        drawn = random.getstate()  # importing rich draws from Python's generator
        threads = (
            torch.get_num_threads()
        )  # train.threads applies to training, not to the surrounding program
        if self._given is not None:
            self._given.register()
        try:
            yield
        finally:
            random.setstate(drawn)
            torch.set_num_threads(threads)
            watchdog.current().phase(
                "between calls of fit"
            )  # no time limit, because the program may do anything between two calls

    def _run_on_grid(self, action: Callable[[Config, Launch], Any]) -> Any:
        """Run `action` on this process of a job, or start the grid, and return the result of the
        first rank."""
        launch = Launch.from_environment()
        parallel = self.config.parallel
        num_ranks = dataclasses.replace(parallel, dp=max(parallel.dp, 1)).num_ranks
        with self._prepared():
            if launch.launched or num_ranks == 1:
                return action(self.config, launch)
            from hybridpar.train.launching.forked_job import run_forked

            return run_forked(resolve(self.config, num_ranks), action)


def _is_modules(model: object) -> bool:
    """Return whether the model is given as modules instead of a ModelSpec."""
    torch = sys.modules.get("torch")  # a caller with a torch module has already imported torch
    return isinstance(model, list | tuple) or (
        torch is not None and isinstance(model, torch.nn.Module)
    )


def _checked_datasets(datasets: Any) -> dict[str, Any]:
    """Return the data sets by split. Raises: ConfigError if they are not valid."""
    if not isinstance(datasets or {}, Mapping):
        kind = f"a {type(datasets).__name__}"
        raise config_error(
            "datasets", kind, 'must be a dict with the keys "train" and "valid"', '{"train": ..}'
        )
    if unknown := set(datasets or {}) - {"train", "valid"}:
        rule = (
            'has unknown keys. Valid keys: "train" and "valid"; several validation sets are '
            'a dict under "valid"'
        )
        works = '{"train": .., "valid": {"wiki": .., "code": ..}}'
        raise config_error("datasets", sorted(map(str, unknown)), rule, works)
    return dict(datasets or {})


def _with_optimizer(base: Config, optimizer: Any) -> Config:
    """Return the configuration with a custom update rule. Raises: ConfigError if it cannot be
    used."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, UpdateRule)):
        raise config_error(
            "optimizer", optimizer, "must be a subclass of hybridpar.UpdateRule", "None"
        )
    name = spec_name(optimizer)
    if import_class("optim.spec", name, UpdateRule) is not optimizer:
        rule = (
            f"must be the newest class named {name!r}: a run finds the class by its name, "
            f"and a later definition has replaced this one"
        )
        raise config_error("optimizer", optimizer, rule, "a class of another name")
    own = {"name": "own", "spec": name}
    return dataclasses.replace(base, optim=dataclasses.replace(base.optim, **own))  # type: ignore[arg-type]


def _with_schedule(config: Config, schedule: Callable[[int], float]) -> Config:
    """Return the configuration with the user's learning-rate schedule as a table.

    Raises:
        ConfigError: The schedule does not return finite rates.
    """
    from hybridpar.optim.schedule import tabulate

    if not callable(schedule):
        raise config_error(
            "lr_schedule", schedule, "must be a function", "lambda step: 1e-3 * 0.99**step"
        )
    points = tabulate(schedule, config.train.num_steps)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr_points=points))


def _staying(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a callback so that the working folder, which run.dir may be relative to, is restored
    after each call, even if it raises.

    While the callback runs, no watchdog ends this process, and other ranks wait up to
    train.timeout_s.
    """
    home = os.getcwd()

    def called(*news: Any) -> Any:
        try:
            with watchdog.current().unlimited():
                return call(*news)
        finally:
            os.chdir(home)

    return called
