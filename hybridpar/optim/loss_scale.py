"""Loss scaling for fp16, whose gradients would otherwise vanish or overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


@dataclass(slots=True)
class LossScaler:
    """The factor of the loss, whose inverse scales gradients; told after each batch if it
    overflowed.

    A dynamic `scale` halves when a batch overflows (that update is skipped) and doubles after
    `growth_interval` good ones in a row. A static one (fp32, bf16) stays. A pipeline that starts
    batches before earlier ones are updated passes the scale each batch ran with: an overflow at a
    scale already given up says nothing new and is not punished twice. `hysteresis` tolerates that
    many overflows, less one, since the scale last changed before it halves. All ranks call `update`
    with the same arguments in the same order and so keep the same state.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    hysteresis: int = 1
    good_steps: int = 0
    overflows: int = 0

    @staticmethod
    def for_dtype(dtype: torch.dtype, initial: float = 2.0**16) -> LossScaler:
        """Make a dynamic scaler from `initial` for fp16, otherwise a constant 1."""
        return LossScaler(initial, dynamic=True) if dtype == torch.float16 else LossScaler()

    def update(self, found_inf: bool, scale: float | None = None) -> None:
        """Note the result of one batch that ran with `scale` (default: the current one)."""
        if not self.dynamic or (scale is not None and scale != self.scale):
            return
        if found_inf:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self._set(self.scale / 2)
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self._set(self.scale * 2)

    def _set(self, scale: float) -> None:
        self.scale = min(max(scale, MIN_SCALE), MAX_SCALE)
        self.good_steps = self.overflows = 0

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self.overflows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`; a static scaler keeps its scale."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
            self.overflows = int(state["overflows"])
