"""Quantized copies of a stage's hidden matrices, one for each live version of the weights
(train.fp8).

    buffer of version t      [ W ]  --refresh-->  [ W8 by rows | W8^T by rows | scales ]     2 bytes a parameter
    buffer of version t+1    [ W ]  --refresh-->  [ W8 by rows | W8^T by rows | scales ]
    frozen parameters        [ W ]  --refresh-->  [ W8 by rows | W8^T by rows | scales ]     quantized once

Code that writes a buffer of weights marks its quantized copies as stale. The weight store refreshes
them before the next micro-batch is bound to that version: after the update has arrived from other
replicas, and outside of any CUDA graph, whose kernels read the quantized buffers in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from hybridpar.nn.fp8 import MULTIPLE, Fp8Weight
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear

_LAYERS = ColumnParallelLinear, RowParallelLinear


class Fp8Weights:
    """Owns the quantized forms of the named parameters of several buffers of weights.

    Args:
        names: Parameters whose products are in fp8; none without train.fp8.
    """

    def __init__(self, buffers: Sequence[Mapping[str, Tensor]], names: Collection[str]):
        self._weights: list[list[Fp8Weight]] = []
        self.by_leaf: dict[int, Fp8Weight] = {}
        """Quantized forms by the id of the leaf that they are made from."""
        for leaves in buffers:
            weights = []
            for name in leaves:
                if name in names:
                    weight = Fp8Weight(leaves[name])
                    self.by_leaf[id(leaves[name])] = weight
                    weights.append(weight)
            self._weights.append(weights)
        self._stale = set(range(len(buffers)))

    def mark_stale(self, *buffers: int) -> None:
        """Note that the weights of these buffers, by index, are being changed."""
        self._stale.update(buffers)

    def refresh(self, *buffers: int) -> None:
        """Quantize the weights of these buffers that have changed since they were quantized."""
        for buffer in self._stale.intersection(buffers):
            for weight in self._weights[buffer]:
                weight.refresh()
        self._stale.difference_update(buffers)

    def tensors(self) -> list[Tensor]:
        """Return all quantized buffers and scales."""
        return [
            tensor for weights in self._weights for weight in weights for tensor in weight.tensors()
        ]


def fp8_parameters(stage: nn.Module) -> set[str]:
    """Return the names of the hidden matrices whose sizes fit fp8 products."""
    found = set[str]()
    for name, module in stage.named_modules():
        if isinstance(module, _LAYERS):
            placement = module.placements["weight"]
            if placement.matrices and all(size % MULTIPLE == 0 for size in placement.shape):
                found.add(f"{name}.weight")
    return found


def unquantized_layers(stage: nn.Module) -> list[str]:
    """Return the names of hidden linear layers whose products are not in fp8."""
    found = []
    for name, module in stage.named_modules():
        if isinstance(module, _LAYERS):
            is_hidden = bool(module.placements["weight"].matrices)
            is_quantized = module.binding("weight").fp8_weight(module.weight) is not None
        else:
            is_hidden = isinstance(module, nn.Linear)
            is_quantized = False
        if is_hidden and not is_quantized:
            found.append(name)
    return found
