"""The weights of a run by their global names, for the program that has trained them."""

from __future__ import annotations

from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.models.given import GivenModules
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.train import folder as run_folder

Tensors = dict[str, Tensor]


def trained_weights(config: Config) -> Tensors:
    """Return the weights of the newest checkpoint of a run, or its starting weights if it has none.

    Those of modules that a program has made have the names of these modules, and their buffers are
    with them.

    Shapes: the global ones.
    Raises: CheckpointError.
    """
    weights = _saved(config) or _initial(config)
    return _as_modules(config.model, weights) if isinstance(config.model, GivenModules) else weights


def _saved(config: Config) -> Tensors:
    if not checkpoint.saved_steps(config.run.folder / run_folder.CHECKPOINTS):
        return {}
    with checkpoint.hold_start(config.run.folder, config.model) as hold:
        return checkpoint.load_full(hold.folder)[1]


def _initial(config: Config) -> Tensors:
    blocks = build_blocks(config.model, Axis("tp"), range(config.model.num_blocks), device="cpu")
    named = [
        (f"blocks.{number}.{name}", parameter, placement)
        for number, block in blocks.items()
        for name, parameter, placement in named_placements(block)
    ]
    initialize(named, config.train.seed)
    return {name: parameter.detach() for name, parameter, _ in named}


def _as_modules(model: GivenModules, weights: Tensors) -> Tensors:
    found: Tensors = {}
    for number, (prefix, module) in enumerate(model.given.modules.items()):
        shared = model.shared_parameters(number)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name not in parameters:
                found[f"{prefix}.{name}"] = tensor.detach().clone()
                continue
            own = f"layer.{first[id(parameters[name])]}"
            holder, there = shared.get(own, (number, own))
            saved = weights.get(f"blocks.{number}.{own}")
            found[f"{prefix}.{name}"] = (
                weights[f"blocks.{holder}.{there}"] if saved is None else saved
            )
    return found
