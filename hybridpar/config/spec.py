"""The protocol between a model and everything that trains it, and the base class of all models.

    @dataclass(frozen=True)
    class Classifier(ModelSpec):             [model]
        depth: int = 6                       spec = "my_package:Classifier"
        width: int = 192                     depth = 12

A model is a row of blocks, numbered from 0: `block(x, batch, key) -> x`. The first one takes no x,
the last one returns its partial losses by name, or these and metrics.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hybridpar.config.capabilities import Adapters, RoutedExperts
from hybridpar.config.samples import SampleSource
from hybridpar.config.typed import hints_of
from hybridpar.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import nn

    from hybridpar.config.sections.model import ModelConfig

T = TypeVar("T")


class ModelSpec:
    """A model as a frozen dataclass: its fields are the keys of [model]; methods say how it is
    built.

    A subclass must define `num_blocks`, `block` and `activation_shape`; to be trained on data,
    `dataset` or Trainer's `datasets`; without either, `sample`. The other defaults suit a model
    whose blocks no axis divides and whose losses are means over samples.

    Nothing outside the models asks for the class of a model. A capability is asked of the model
    itself: `sequence_parallel`, `context_parallel`, `cuda_graph_safe`, `layers_field`,
    `cost_model`, `text_format`, `logits_chunk`, `routed_experts`, `can_generate`, `lora_adapters`.
    A custom model may provide all of them but the last two.
    """

    kind: str = ""
    """Name in messages; by default the name of the class."""
    losses: ClassVar[Sequence[str]] = ("loss",)
    """Names of the partial losses that the last block returns. Their sum is trained."""
    metric_names: ClassVar[Sequence[str]] = ()
    """Names of metrics, such as accuracy. With metrics, the last block returns two dicts, (losses,
    metrics), whose numbers have the same divisors. Metrics are reported under their names, and
    train nothing."""
    tie_embeddings: bool = False
    """Whether the first block and the last one share parameters (`Placement.tied`)."""
    max_tp: int = 1
    """Largest number of tp ranks that its blocks may be divided over."""
    tokens_per_sample: int = 1
    """Amount that a sample counts in speeds and totals."""
    counts: str = "samples"
    """Name of the unit that `tokens_per_sample` counts, for people."""
    sequence_parallel: bool = False
    """Whether blocks support `Build.sequence` (parallel.sequence): the x between them then holds
    this rank's rows of each sample."""
    context_parallel: bool = False
    """Whether blocks support `Build.context` (parallel.cp): each rank then has its tokens of every
    sample, in the micro-batch (`Context.cut`) and in the x between blocks. Attention with
    `context=build.context` sees all tokens; everything else must act on single tokens."""
    cuda_graph_safe: bool = False
    """Whether a forward reads nothing that changes but its arguments and parameters. If False,
    replayed CUDA graphs are compared with runs kernel by kernel from time to time."""
    layers_field: str = ""
    """Name of the field that holds the number of inner blocks, if these are all alike and there is
    one more at either end. Memory is then predicted from a few layers."""
    layers_are_alike: bool = True
    """Whether the layers that `layers_field` counts run equal operators on equal shapes."""
    logits_chunk: int | None = None
    """Tokens whose logits exist at a time (0: all), if the head can compute them in chunks."""
    can_generate: bool = False
    """Whether `generate` can continue text with it."""
    every_block_has_parameters: bool = False
    """Whether a checkpoint without parameters of one of the blocks must be damaged."""
    position_rows: int = 0
    """Rows of a learned position table; 0 without one."""
    may_freeze: bool = True
    """Whether the model may freeze some of its parameters. If False, no block is built to find out."""
    lora_adapters: Adapters | None = None
    """The adapters that its layers are given when they are built. None: there are none."""
    routed_experts: RoutedExperts | None = None
    """The experts among which routers choose, and the blocks that have a layer of them
    (hybridpar.MixtureOfExperts). None: no block has any."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if not cls.__dict__.get("kind"):
            cls.kind = cls.__name__

    @property
    def num_blocks(self) -> int:
        """Units that a split into stages can separate."""
        raise self._undefined("num_blocks = 8")

    def block(self, number: int, build: Any) -> nn.Module:
        """Block `number`, on the axes, the device and with the type of `build`
        (models.build.Build)."""
        raise self._undefined("def block(self, number, build): ...")

    def activation_shape(self, number: int) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """The shape of one sample of block `number`'s output, features last. The last block's is
        not asked for.

        If a block returns several tensors in a dict, so are the shapes.
        """
        raise self._undefined("def activation_shape(self, number): ...")

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        """A random sample in the form of the data's: arrays by name, the same for the same
        arguments.

        `verify`, profiles and predicted memory use it. By default it is one of the training set's
        samples, or random text in the model's `text_format`.
        """
        source = _lent.get(spec_name(type(self))) or _own_samples(self)
        if source is not None:
            return source.sample(number, seed)
        if self.text_format is None:
            raise self._undefined("def sample(self, number, seed): ...")
        return self.text_format.sample(number, seed)

    @classmethod
    def lend(cls, source: SampleSource) -> None:
        """Give all models of this class the samples that `sample` returns, if the class does not
        define it."""
        _lent[spec_name(cls)] = source

    def dataset(self, part: str) -> Any:
        """The samples of "train" or "valid", dicts of arrays by name; None: there are none.

        A map-style dataset (`len`, `[i]`) is shuffled. An iterable keeps its own order, and a
        resumed run skips what it has seen. A function returns an iterator that begins at the sample
        of a given number. Several validation sets are a dict by their names.
        """
        return None

    def num_targets(self, sample: dict[str, Any]) -> int:
        """How many labels of a sample count: losses divide by their number in the batch,
        `batch["num_targets"]`."""
        return 1

    @property
    def counts_targets(self) -> bool:
        """Whether the model counts labels; otherwise each sample is one target, and none need be
        read to count them."""
        return type(self).num_targets is not ModelSpec.num_targets

    @property
    def spec(self) -> str:
        """The name "module:class" under which a configuration finds the class; empty for the
        models that `model.kind` names."""
        return spec_name(type(self))

    @property
    def cost_model(self) -> ModelConfig | None:
        """The GPT or BERT whose formulas and kernels stand for this model's costs.

        It has the same number of blocks and the same `tokens_per_sample`. None: operations are
        counted and times estimated by running the blocks on the meta device.
        """
        return None

    @property
    def text_format(self) -> ModelConfig | None:
        """The GPT or BERT whose samples the model takes: corpora of text then become its training
        data. None: `dataset` has the samples."""
        return None

    def as_transformer(self) -> ModelConfig:
        """Return the model itself, for tools that read and write GPT and BERT alone.

        Raises:
            ConfigError: The model is another one.
        """
        problem = Problem(*self.shown_as, "supported for GPT and BERT only", 'model.kind = "gpt"')
        raise ConfigError(problem)

    @property
    def tensor_sizes(self) -> Mapping[str, int]:
        """PipelineShape, by name, none of which is larger than the largest dimension of a
        parameter.

        A checkpoint whose tensors are all smaller is damaged, and no block is built for it.
        """
        return {}

    @property
    def max_tp_rule(self) -> str:
        """The largest number of tp ranks, in words."""
        return f"{self.max_tp}, as {self.kind}.max_tp says"

    @property
    def context_parallel_rule(self) -> str:
        """The rule about sharing the tokens of a sample that the model breaks, in words; empty if
        it breaks none."""
        if self.context_parallel:
            return ""
        return (
            "requires blocks that act on single tokens, except in their attention "
            f"({self.kind}.context_parallel = True)"
        )

    def shared_parameters(self, number: int) -> Mapping[str, tuple[int, str]]:
        """The parameters of block `number` that other blocks hold, too, by name.

        Each has its first holder: the number of that block, and the parameter's name there.
        """
        return {}

    def start_checksum(self, *, resumes: bool) -> str:
        """A checksum of the weights that a program has made, from which training starts; empty:
        there are none.

        resumes: the trained weights come from a checkpoint instead.
        """
        return ""

    @property
    def shown_as(self) -> tuple[str, str]:
        """The field and the value that name the model in errors."""
        return "model.spec", self.spec

    def settings_table(self) -> dict[str, Any]:
        """The keys of [model] with their values."""
        return asdict(self)  # type: ignore[call-overload]  # every ModelSpec that is made is a dataclass

    def canonical(self) -> ModelSpec:
        """An equal model in which no field at a special value stands for another field's value."""
        return self

    def with_layers(self, number: int) -> ModelSpec:
        """Return this model with another number of layers.

        Raises:
            ConfigError: The model does not say that its layers are alike (`layers_field`).
        """
        if not self.layers_field:
            rule = "requires a model that says that its layers are all alike"
            raise spec_error(self, rule, f'layers_field = "depth" in {self.kind}')
        return replace(self, **{self.layers_field: number})  # type: ignore[type-var]

    def with_length(self, tokens: int) -> ModelSpec | None:
        """Return this model for samples of another number of tokens; None if it does not say
        how."""
        return None

    def named_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return trained weights, given by global name, under the names that the user knows."""
        return weights

    def forward_flops(self, number: int) -> int | None:
        """Operations of the forward pass of block `number` for a sample. None: they are counted as
        its code runs."""
        return None

    def conflicts(self) -> Iterator[Problem]:
        """Settings that do not go together."""
        return iter(())

    def _undefined(self, works: str) -> ConfigError:
        what = works.removeprefix("def ").partition("(")[0].partition(" ")[0]
        return spec_error(self, f"must define {what}", works)


_lent: dict[str, SampleSource] = {}
"""Samples by the name of a class, as a configuration, which names the class, cannot hold a data
set."""


@lru_cache(maxsize=4)
def _own_samples(model: ModelSpec) -> SampleSource | None:
    """The samples of a model's own training set; None if it has none."""
    dataset = model.dataset("train")
    return None if dataset is None else SampleSource(dataset)


def spec_error(model: ModelSpec, rule: str, works: str) -> ConfigError:
    """An error of a custom model's definition."""
    return ConfigError(Problem(*model.shown_as, rule, works))


@dataclass(frozen=True)
class UnloadedModel(ModelSpec):
    """A custom model of a run folder whose code was not imported.

    Args:
        name: "module:class".
        settings: The keys of [model] with their values.
    """

    name: str = ""
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:  # type: ignore[override]  # other models have it from their class
        """Name in messages: the class that was not imported."""
        return self.name.partition(":")[2] or self.name

    @property
    def spec(self) -> str:
        return self.name

    @property
    def num_blocks(self) -> int:
        raise self.error()

    def settings_table(self) -> dict[str, Any]:
        return dict(self.settings)

    def _undefined(self, works: str) -> ConfigError:
        return self.error()

    def error(self) -> ConfigError:
        """The error for whoever needs the code of this model."""
        return not_imported("model.spec", self.name)


def not_imported(field: str, name: str) -> ConfigError:
    """The error for code that a run folder names and that nobody has imported. `field`: the key
    that names it."""
    rule = "names code that was not imported: reading a run folder runs its code only with --trust"
    return ConfigError(Problem(field, name, rule, "--trust, if you trust whoever wrote the code"))


def message_shape(model: ModelSpec, number: int) -> tuple[int, ...]:
    """The shape of one sample of the message from block `number` to another stage: several tensors
    are one row.

    A model of one block sends nothing.
    """
    if model.num_blocks == 1:
        return (0,)
    shape = model.activation_shape(number)
    return (sum(map(prod, shape.values())),) if isinstance(shape, dict) else tuple(shape)


def spec_name(kind: type) -> str:
    """The name under which a configuration finds the class: "module:class". Of a script, the module
    is its file."""
    module = kind.__module__
    if module == "__main__" and (path := getattr(sys.modules["__main__"], "__file__", "")):
        module = Path(path).stem
    return f"{module}:{kind.__qualname__}"


def known_spec(name: str) -> type[ModelSpec]:
    """The class of that name, which must have been imported: what a checkpoint says imports
    nothing.

    Raises: ConfigError.
    """
    if (found := _imported(name, ModelSpec)) is None:
        rule = "unknown model: a checkpoint's model must have been imported by this program"
        raise ConfigError(
            Problem(
                "model.spec",
                name,
                rule,
                f'importing the module, or a configuration with spec = "{name}"',
            )
        )
    return found


def _imported(name: str, base: type[T]) -> type[T] | None:
    """The class of that name, where its module has been imported; the newest, if it was defined
    more than once, as when a cell of a notebook runs again."""
    left = [base]
    while left:
        kind = left.pop()
        if spec_name(kind) == name:
            return kind
        left += kind.__subclasses__()
    return None


def is_imported(name: str, base: type) -> bool:
    """Whether the class that "module:class" names has been imported. `base`: what it inherits
    from."""
    return _imported(name, base) is not None


def spec_folder(kind: type) -> Path:
    """The folder in which its module is found by name."""
    module = sys.modules[kind.__module__]
    depth = 0 if kind.__module__ == "__main__" else kind.__module__.count(".")
    return Path(getattr(module, "__file__", None) or ".").resolve().parents[depth]


def import_spec(name: str, folders: Sequence[str | Path] = (".",)) -> type[ModelSpec]:
    """The model that "module:class" names (see `import_class`). Raises: ConfigError."""
    found = import_class("model.spec", name, ModelSpec, folders)
    require_settings(found)
    return found


def import_class(
    field: str, name: str, base: type[T], folders: Sequence[str | Path] = (".",)
) -> type[T]:
    """The class that "module:class" names, imported; modules of `folders` come before others.

    `field`: the key that names it; `base`: what it must inherit from. Raises: ConfigError.
    """
    if (known := _imported(name, base)) is not None:
        return known
    module, colon, attribute = name.partition(":")
    works = f'"my_package.my_module:My{base.__name__}"'
    if not (module and colon and attribute.isidentifier()):
        raise ConfigError(
            Problem(field, name, "must be a module and a class, as module:class", works)
        )
    paths = [str(Path(folder).resolve()) for folder in folders]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        rule = (
            f"cannot be imported ({error}); Python looks in {', '.join(paths)} and in "
            f"installed packages"
        )
        raise ConfigError(Problem(field, name, rule, works)) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        rule = (
            f"must name a subclass of hybridpar.{base.__name__}; {attribute} of {module} is "
            f"{found!r}"
        )
        raise ConfigError(Problem(field, name, rule, works))
    return found


def require_settings(kind: type[ModelSpec]) -> None:
    """Raises: ConfigError where the class is no frozen dataclass whose fields all have types and
    defaults."""
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        rule = "must be a frozen dataclass"
        raise ConfigError(Problem("model.spec", spec_name(kind), rule, "@dataclass(frozen=True)"))
    if bare := [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]:
        rule = f"must have a default for every field; {bare[0]} has none"
        raise ConfigError(Problem("model.spec", spec_name(kind), rule, f"{bare[0]}: int = 8"))
    try:
        hints_of(kind)
    except (NameError, AttributeError) as error:
        rule = (
            f"all names in its annotations must be defined or imported at the top of its "
            f"module ({error})"
        )
        raise ConfigError(Problem("model.spec", spec_name(kind), rule, "depth: int = 8")) from None
    try:
        hash(kind())
    except TypeError as error:
        rule = f"all its values must be hashable ({error})"
        raise ConfigError(
            Problem("model.spec", spec_name(kind), rule, "tuple[int, ...] for a list")
        ) from None
