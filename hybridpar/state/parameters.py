"""The parameters of a stage: placements, the modules that hold them, flat layouts."""

from __future__ import annotations

import torch
from torch import nn

from hybridpar.nn.placement import Placement, named_placements
from hybridpar.state.fp8 import fp8_parameters
from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import block_of
from hybridpar.state.residency.uses import layout_run

LOW_PRECISION = (torch.bfloat16, torch.float16)


def move_buffers(stage: nn.Module, device: torch.device) -> None:
    """Move the buffers of all modules, which custom blocks may have, to the stage's device."""
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _layout_order(parameter: tuple[str, nn.Parameter, Placement]) -> tuple[int, str]:
    """Return a sort key that orders tied parameters alike on the first and the last stage."""
    placement = parameter[2]
    return layout_run(placement), placement.tied


class StageParameters:
    """The parameters of a stage on the meta device: placements by name, and flat layouts.

    Args:
        rounds_gradients: Gradients have this type, too, and not the master copy's.

    Attributes:
        layout: Layout of the trained parameters, in the dtype of gradients.
        frozen: Layout of the frozen parameters, in `dtype`.
        quantizable: Hidden matrices that fp8 products can use.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype, *, rounds_gradients: bool = False):
        self.dtype = dtype
        self.master_dtype = torch.float32 if dtype in LOW_PRECISION else dtype
        self.quantizable = fp8_parameters(stage)
        self.placements: dict[str, Placement] = {}
        by_id: dict[int, str] = {}
        shapes: dict[str, torch.Size] = {}
        for name, parameter, placement in sorted(named_placements(stage), key=_layout_order):
            self.placements[name] = placement
            by_id[id(parameter)] = name
            shapes[name] = parameter.shape
        trained = {n: shape for n, shape in shapes.items() if self.placements[n].trainable}
        gradient_dtype = dtype if rounds_gradients else self.master_dtype
        frozen = {name: shape for name, shape in shapes.items() if name not in trained}
        self.layout = FlatLayout(trained, gradient_dtype, offset_dtype=dtype)
        self.frozen = FlatLayout(frozen, dtype)
        self.blocks: dict[str, list[int]] = {name: [] for name in shapes}
        """Numbers of the blocks that have a parameter, by its name."""
        for path, module in stage.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.blocks[by_id[id(parameter)]].append(block_of(f"{path}."))
        # Every module that holds a parameter, and under which key; a tied parameter has several.
        self.holders = [
            (module, key, by_id[id(parameter)])
            for module in stage.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.places = [(module._parameters, key, name) for module, key, name in self.holders]
