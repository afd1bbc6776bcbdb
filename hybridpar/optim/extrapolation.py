"""Update extrapolation: makes up for gradients that are a step old."""

from __future__ import annotations

from torch import Tensor

from hybridpar.ops.update import Weights
from hybridpar.optim.base import Optimizer


class Extrapolation(Optimizer):
    """Any optimizer, each of its updates u_t (weight decay included) applied as u_t + (u_t -
    u_(t-1)), with u_(-1) = 0.

    The difference feeds back an error: the update before stood in for this one, which was not known
    yet. With z_(t+1) = z_t + u_t, the path of the optimizer alone, the weights are x_(t+1) =
    z_(t+1) + u_t: gradients are taken one predicted update ahead, as with staleness = "prediction".
    The two differ in what weight decay acts on and what is evaluated and saved: x here, z there.
    For them to agree the first update counts double: a prediction from W(1) too moves on by what it
    has just moved.

    Wants momentum. Descent on a parabola with gradients a step old is stable while lr * curvature <
    1, whatever the (averaging) momentum; extrapolated, up to 0.6 without momentum, 2.7 with 0.9,
    4.0 with 0.95.

    Source: after the error feedback of arXiv 2606.30634 ("One-Step Gradient Delay is Not a Barrier
        ..."), of which only summaries were at hand: a correction of updates, for any optimizer,
        that keeps one more tensor a parameter.
    """

    state_names = ("previous_update",)

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer.slots, optimizer.settings, optimizer.tp, optimizer.backend)
        self.inner = (optimizer,)
        self.divisible = optimizer.divisible  # type: ignore[method-assign]

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        assert not weights.predicted
        old = [x.clone() for x in weights.old] if weights.new is weights.old else weights.old
        self.inner[0].step(
            Weights(weights.old, weights.new), gradients, lr=lr, gradient_scale=scale
        )
        parts = self._weight_parts(Weights(old, weights.new, weights.working))
        self._passes.extrapolate(parts, self._state_parts("previous_update"))
