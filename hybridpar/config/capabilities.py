"""Facts that a model states about its adapters and its experts (ModelSpec)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapters:
    """The adapters (LoRA) of a model, whose other parameters are frozen.

    Attributes:
        rank: Their rank.
        alpha: Their product counts alpha / rank times.
        targets: Patterns of the global names of the weights that get one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a model, among which a router chooses for each token.

    Attributes:
        number: Experts of a layer.
        bias_rate: Step of the biases that balance them in an update. 0: there are no biases.
        has_losses: Whether routers add losses of their own to the training loss.
        blocks: Numbers of the blocks with experts whose loads are reported.
    """

    number: int
    bias_rate: float = 0.0
    has_losses: bool = False
    blocks: tuple[int, ...] = ()
