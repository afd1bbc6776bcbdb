"""Blocks of a custom model, which may hold ordinary modules of torch.

Every tp rank holds all parameters of an ordinary module, which start as its constructor leaves
them. A constructor draws from torch's global generator, in the order of its code, so a block is
always constructed as a whole, from a seed of its own, even if only one of its parameters is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridpar import random
from hybridpar.config import (
    AUTO,
    KernelsConfig,
    ModelSpec,
    RoutedExperts,
    message_shape,
    spec_error,
)
from hybridpar.errors import ConfigError, config_error, described
from hybridpar.grid import Axis
from hybridpar.models.dropout import KEYED, KeyedDropouts
from hybridpar.models.metrics import LossesAndMetrics, require_metrics
from hybridpar.models.watched import BlockWatch
from hybridpar.nn.context import ALONE, Context, ContextComm
from hybridpar.nn.moe import MixtureOfExperts
from hybridpar.nn.placement import Init, ParallelModule, Placement
from hybridpar.nn.sequence import SequencePart

_DRAWS = (
    "is not supported: it draws its mask from torch's generator, so results would depend "
    "on the grid"
)
_CONVOLUTIONS = nn.modules.conv._ConvNd
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
"""Torch's norms with parameters; the last one is the base of batch norm and instance norm."""
_OF_RECURRENT = ("weight_ih_", "weight_hh_", "weight_hr_")
_NO_LAYERS = ("torch.nn.modules.module", "torch.nn.modules.container")


@dataclass(frozen=True)
class Build:
    """How a block is built.

    Attributes:
        axis: The tp axis that its layers are split over.
        name: The block's global name, after which its dropout is named.
        kernels: Backends of operators.
        sequence: Whether each rank holds its rows of every sample between the split layers
            (parallel.sequence).
        device: Device of its parameters.
        dtype: Type of its parameters.
        context: The ranks that share the tokens of each sample (parallel.cp); for the layers that
            see several tokens, such as `ParallelAttention(.., context=build.context)`.
        ep: The ranks that share the experts of each layer (parallel.ep); None: a rank has all.
        expert_load: Largest load of a rank's experts in a round (memory.expert_load).
    """

    axis: Axis
    name: str
    kernels: KernelsConfig
    sequence: bool
    device: str | torch.device
    dtype: torch.dtype
    context: Context = ALONE
    ep: Axis | None = None
    expert_load: float = 0.0

    @property
    def factory(self) -> dict[str, Any]:
        """The keywords `device` and `dtype` that layers take."""
        return {"device": self.device, "dtype": self.dtype}


@contextmanager
def making(device: str | torch.device, dtype: torch.dtype) -> Any:
    """Make modules and tensors on this device, and floats of this type, unless their code says
    otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Constructed:
    """The starting value of a parameter as the block's constructor leaves it, drawn from a seed.

    Attributes:
        model: The model.
        number: Number of the block.
        name: Name of the parameter in the block.
    """

    model: ModelSpec
    number: int
    name: str

    def __call__(self, seed: int) -> Tensor:
        """Return the value in float32, on the CPU. Shapes: the parameter's."""
        return constructed(self.model, self.number, seed)[self.name]


@lru_cache(maxsize=1)  # a block at a time: its parameters are asked for one after the other
def constructed(model: ModelSpec, number: int, seed: int) -> dict[str, Tensor]:
    """Return a block's parameters and buffers, unsharded, as its constructor leaves them, by
    name."""
    build = Build(Axis("tp"), f"blocks.{number}", AUTO, False, "cpu", torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random.site(f"{seed}.blocks.{number}"))
        block = construct(model, number, build)
    return {
        name: tensor.detach()
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    }


def construct(model: ModelSpec, number: int, build: Build) -> nn.Module:
    """Construct block `number` of a custom model on the device of `build`.

    Raises:
        ConfigError: The model returns something that is no module.
    """
    with making(build.device, build.dtype), torch.random.fork_rng(devices=[]):
        block = model.block(number, build)
    if not isinstance(block, nn.Module):
        rule = f"block({number}) must return a torch.nn.Module; it returns {described(block)}"
        raise spec_error(model, rule, "a subclass of torch.nn.Module")
    return block


Shape = tuple[int, ...] | dict[str, tuple[int, ...]]
"""The shape of one sample of a block's output: one tensor, or several by name."""


def context_of(model: ModelSpec, cp: Axis, comm: ContextComm = "all_gather") -> Context:
    """Return the ranks of the axis as the ranks that share the tokens of the model's samples."""
    if cp.size == 1:
        return Context(cp)
    shape = model.activation_shape(0)
    assert not isinstance(shape, dict), "rows of several tensors are not split"
    if (formulas := model.cost_model) is None:
        return Context(cp, shape[0], comm=comm)
    windows = tuple(map(formulas.layer_window, range(formulas.num_layers)))
    follows = model.text_format is model  # custom blocks do not ask for a micro-batch's cut
    return Context(cp, shape[0], windows or (0,), comm, follows)


def local_message_shape(
    model: ModelSpec, number: int, axis: Axis, sequence: bool, context: Context = ALONE
) -> tuple[int, ...]:
    """Return the shape of one sample of what this rank sends on from block `number`."""
    if not (sequence or context.is_split) or model.num_blocks == 1:
        return message_shape(model, number)
    shape = local_shape(model, number, axis, sequence, context)
    assert not isinstance(shape, dict), "rows of several tensors are not split"
    return shape


def local_shape(
    model: ModelSpec, number: int, axis: Axis, sequence: bool, context: Context = ALONE
) -> Shape:
    """Return the shape of one sample of block `number`'s output on this rank.

    With a context, and with `sequence`, a rank has its own rows, the first dimension of the sample.

    Raises:
        ConfigError: Rows are split, and the block returns several tensors.
    """
    shape = model.activation_shape(number)
    if not sequence and not context.is_split:
        return shape
    if isinstance(shape, dict):
        rule = f"returns several tensors from block {number}, whose rows cannot be split"
        works = "parallel.sequence = false" if sequence else "parallel.cp = 1"
        raise spec_error(model, rule, works)
    rows = context.local_length(shape[0])
    return (SequencePart.of(rows, axis, sequence).length, *shape[1:])


def adopt(block: nn.Module, model: ModelSpec, number: int, build: Build) -> None:
    """Make a custom block train alike on every grid.

    Parameters of its ordinary modules get a placement, and buffers, which nobody trains, values.
    From now on floats of micro-batches come to it as `build.dtype`, its output is compared with
    what the model says, and its forward is watched (watched.BlockWatch). Dropout of torch draws by
    the key (dropout.KeyedDropouts).

    Raises:
        ConfigError: A module does not do the same on every grid, or has a tensor without values; or
            the model does not describe its experts.
    """
    require_same_everywhere(block, model, number)
    _require_registered(block, model, number)
    _require_described_experts(block, model, number)
    wanted = None
    if number < model.num_blocks - 1:
        wanted = local_shape(model, number, build.axis, build.sequence, build.context)
    if model.max_tp == 1 and not model.context_parallel:
        KeyedDropouts(block, model, number, build.kernels)
    BlockWatch(block, model, number)
    block.register_forward_pre_hook(partial(_given, wanted is None, build.dtype))
    block.register_forward_hook(partial(_check_output, model, number, wanted))
    inner = 0 < number < model.num_blocks - 1
    shared = model.shared_parameters(number)
    for prefix, module in block.named_modules():
        full: Callable[[str], str] = f"{prefix}.{{}}".format if prefix else "{}".format
        if isinstance(module, ParallelModule):
            module.placements = {
                name: replace(placement, trainable=getattr(module, name).requires_grad)
                for name, placement in module.placements.items()
            }
        else:
            placements = {}
            for name, parameter in module.named_parameters(recurse=False):
                first = shared.get(full(name))
                draw = Constructed(model, *(first or (number, full(name))))
                tied = "" if first is None else "blocks.{}.{}".format(*first)
                placements[name] = replace(
                    _placement(module, name, parameter, draw, inner), tied=tied
                )
            if placements:
                cast(Any, module).placements = placements
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = constructed(model, number, 0)[full(name)].to(buffer.dtype)


class _Noting(dict[str, Tensor]):
    """A micro-batch that notes which of its tensors are read."""

    asked: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        self.asked |= {name}
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked |= {name}
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # so that who makes a copy asks for each


def _given(
    is_last: bool, dtype: torch.dtype, block: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Convert a block's arguments: floats of samples come in the working precision.

    The last block, unless it is the first as well, keeps wider floats, as losses compare with them.
    """
    x, batch, *rest = args
    keeps = is_last and x is not None
    kinds = {
        name: torch.promote_types(one.dtype, dtype) if keeps else dtype
        for name, one in batch.items()
        if one.is_floating_point() and one.dim()
    }  # without dimensions: the counts
    if any(batch[name].dtype != kind for name, kind in kinds.items()):
        batch = {**batch, **{name: batch[name].to(kind) for name, kind in kinds.items()}}
    return x, _Noting(batch) if is_last else batch, *rest


def _check_output(
    model: ModelSpec, number: int, wanted: Any, block: nn.Module, args: Any, out: Any
) -> Any:
    """Check a block's output; return the losses together with the metrics of a last block that
    has some.

    Raises:
        ConfigError: The block returns something else than the model's `activation_shape`, `losses`
            and `metric_names`, or losses that cannot be parts of a mean over the whole batch.
    """
    if isinstance(out, Tensor) and wanted == out.shape[1:]:
        return None  # at once: it is asked at every micro-batch
    where = f"block {number} ({type(block).__name__}) of {model.kind}"
    if wanted is None:
        metrics: Any = {}
        if isinstance(out, tuple) and len(out) == 2:
            out, metrics = out
        require_metrics(model, metrics, where)
        names = list(out) if isinstance(out, dict) else f"a {type(out).__name__}"
        if names != list(model.losses) or any(loss.dim() for loss in out.values()):
            if names == list(model.losses):
                shapes = [tuple(loss.shape) for loss in out.values()]
                rule = f"each loss must be a number (0-d tensor); {where} returns shapes {shapes}"
                raise config_error("model.losses", names, rule, "loss.mean()")
            raise config_error(
                "model.losses",
                list(model.losses),
                f"does not match the losses that {where} returns: {names}",
                "the names of that dict",
            )
        if (
            torch.is_grad_enabled()
            and isinstance(args[0], Tensor)
            and args[0].requires_grad
            and not any(loss.requires_grad for loss in out.values())
        ):
            rule = (
                f"the losses must have a gradient; {where} leaves autograd's graph (detach, "
                f"item, numpy or no_grad)"
            )
            raise spec_error(model, rule, "a loss that torch computes of its input")
        if not {"num_samples", "num_targets"} & args[1].asked:
            rule = (
                f"losses must be divided by the size of the global batch, so that "
                f"micro-batches add up to the mean; {where} reads neither batch['num_samples'] "
                f"nor batch['num_targets']"
            )
            raise spec_error(
                model, rule, 'cross_entropy(.., reduction="sum") / batch["num_samples"]'
            )
        return LossesAndMetrics(out, metrics) if metrics else out
    if not isinstance(wanted, dict):
        wanted = tuple(wanted)
        found = _shape_of(out)
    else:
        wanted = {name: tuple(one) for name, one in wanted.items()}
        found = f"a {type(out).__name__}"
        if isinstance(out, dict):
            found = {name: _shape_of(one) for name, one in out.items()}
    if found != wanted:
        raise config_error(
            "model.activation_shape",
            wanted,
            f"does not match what {where} returns for each sample: {found}",
            str(found),
        )
    return None


def _shape_of(x: Any) -> Any:
    """Return the shape of a sample; for `x` that is no tensor, say its type."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _placement(
    module: nn.Module, name: str, parameter: nn.Parameter, draw: Constructed, inner: bool
) -> Placement:
    is_matrix = inner and isinstance(module, nn.Linear) and name == "weight"
    return Placement(
        tuple(parameter.shape),
        Init("constructed", draw=draw),
        weight_decay=_decays(module, name, parameter),
        matrices=(((0, len(parameter)),),) if is_matrix else (),
        trainable=parameter.requires_grad,
    )


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter of an ordinary module.

    It applies to the weights of torch's layers, but neither to their biases nor to any parameter of
    a norm. A bare parameter decays if two of its dimensions are above 1.
    """
    if isinstance(module, _NORMS):
        return False
    if _is_layer_of_torch(module):
        if name == "bias" or name.startswith("bias_") or name.endswith("_bias"):
            return False
        if name == "weight" or name.endswith("_weight") or name.startswith(_OF_RECURRENT):
            return parameter.dim() > 1
    return sum(size > 1 for size in parameter.shape) > 1


def _is_layer_of_torch(module: nn.Module) -> bool:
    """Whether the class is one of torch's layers or inherits from one. Containers hold anything."""
    return any(
        kind.__module__.startswith("torch.nn.modules.") and kind.__module__ not in _NO_LAYERS
        for kind in type(module).__mro__
    )


def require_same_everywhere(block: nn.Module, model: ModelSpec, number: int) -> None:
    """Require that no module's numbers depend on micro-batches or on the place of the process.

    Raises:
        ConfigError: One of them does; it names a module that works.
    """
    has_convolutions = any(isinstance(module, _CONVOLUTIONS) for module in block.modules())
    for name, module in block.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            why = (
                "is not supported: it normalizes over the samples of a micro-batch, so "
                "results would depend on the micro-batch size"
            )
            raise _refused(
                model, number, name, module, why, _instead_of_batch_norm(module, has_convolutions)
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            if model.max_tp > 1:
                why = f"{_DRAWS}, and a tp rank cannot know which shard of the tensor it has"
                works = "hybridpar.Dropout(p, build.name), called with the key"
                raise _refused(model, number, name, module, why, works)
            if model.context_parallel:
                why = f"{_DRAWS}, and a cp rank cannot know which tokens of the sample it has"
                works = "hybridpar.Dropout(p, build.name), with build.context.rows_of(..)"
                raise _refused(model, number, name, module, why, works)
            if not isinstance(module, KEYED):
                raise _refused(model, number, name, module, _DRAWS, f"nn.Dropout({module.p})")
        dropout = getattr(module, "dropout", 0.0)
        if (
            isinstance(module, nn.MultiheadAttention | nn.RNNBase)
            and isinstance(dropout, float)
            and dropout > 0
        ):
            kept = "; nn.Dropout on its output works"
            inside = f"{name}.dropout = 0.0" if name else "dropout=0.0"
            raise _refused(model, number, name, module, _DRAWS, inside + kept)


def _instead_of_batch_norm(norm: nn.modules.batchnorm._BatchNorm, has_convolutions: bool) -> str:
    """Return a norm that does not depend on the other samples, as code."""
    channels = norm.num_features
    if has_convolutions or isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
        return f"nn.GroupNorm({gcd(channels, 8)}, {channels})"
    return f"nn.LayerNorm({channels})"


def _require_registered(block: nn.Module, model: ModelSpec, number: int) -> None:
    """Require that each tensor made on the meta device is a parameter or a buffer. Raises:
    ConfigError."""
    for prefix, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                why = (
                    f"is not supported: it keeps the tensor {name!r} as a plain attribute; "
                    f"only parameters and buffers get values and move to the device"
                )
                raise _refused(
                    model, number, prefix, module, why, f"self.register_buffer({name!r}, ..)"
                )


def _require_described_experts(block: nn.Module, model: ModelSpec, number: int) -> None:
    """Require that the model describes the block's layer of experts (`routed_experts`), on which
    metrics and rules of other settings depend. Raises: ConfigError."""
    layers = [module for module in block.modules() if isinstance(module, MixtureOfExperts)]
    said = model.routed_experts
    blocks = () if said is None else said.blocks
    if len(layers) > 1:
        rule = f"has {len(layers)} layers of experts in block {number}; a block has one at most"
        raise spec_error(model, rule, "a block of its own for each layer of experts")
    if not layers:
        if number in blocks:
            rule = f"routed_experts names block {number}, which has no layer of experts"
            others = tuple(other for other in blocks if other != number)
            raise spec_error(model, rule, f"blocks={others}")
        return
    router = layers[0].options
    has_losses = router.balance_loss > 0 or router.z_loss > 0
    named = tuple(sorted({*blocks, number}))
    found = RoutedExperts(layers[0].num_experts, router.bias_rate, has_losses, named)
    if found != said:
        rule = f"routed_experts must describe the layer of experts in block {number}"
        raise spec_error(model, rule, f"routed_experts = hybridpar.{found}")


def _refused(
    model: ModelSpec, number: int, name: str, module: object, why: str, works: str
) -> ConfigError:
    rule = f"has a {type(module).__name__} ({name or 'itself'}) in block {number}, which {why}"
    return spec_error(model, rule, works)
