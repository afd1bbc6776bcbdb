"""Rotary frequencies of models that were extended to longer texts.

An unscaled pair i of d rotated features turns by f_i = base^(-2i/d) per position; its wave is
2 pi / f_i positions long. All scalings change f alone, but yarn and longrope, which also multiply
the rotated features.

Sources: linear: arXiv 2306.15595; yarn: arXiv 2309.00071; longrope: arXiv 2402.13753; llama3: Meta's
    Llama 3.1, as transformers computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hybridpar.ops.rotary import POWERS, Frequencies

ScalingKind = Literal["none", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How rotary frequencies are scaled; the fields are the keys rotary_* of [model].

    Attributes:
        kind: 'none': the powers of the base.
        magnitude: Factor of the rotated features; 0: the usual one of yarn or longrope.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_positions: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def frequencies(self, base: float, features: int, length: int) -> Frequencies:
        """Return the frequencies for texts of `length` positions.

        Only longrope's depend on the length.
        """
        if self.kind == "none":
            return POWERS
        is_long = self.kind == "longrope" and length > self.original_positions
        return _frequencies(self, base, features, is_long)


UNSCALED = RotaryScaling()


@lru_cache(maxsize=64)
def _frequencies(scaling: RotaryScaling, base: float, features: int, is_long: bool) -> Frequencies:
    half = features // 2
    plain = [base ** (i / -half) for i in range(half)]
    if scaling.kind == "linear":
        return Frequencies(tuple(f / scaling.factor for f in plain))
    if scaling.kind == "llama3":
        return Frequencies(tuple(_llama3(scaling, f) for f in plain))
    if scaling.kind == "yarn":
        usual = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
        values = _yarn(scaling, base, features, plain)
        return Frequencies(values, scaling.magnitude or usual)
    usual = 1.0
    if scaling.factor > 1:
        usual = (1 + math.log(scaling.factor) / math.log(scaling.original_positions)) ** 0.5
    divisors = scaling.long_factors if is_long else scaling.short_factors
    values = tuple(f / divisor for f, divisor in zip(plain, divisors, strict=True))
    return Frequencies(values, scaling.magnitude or usual)


def _llama3(scaling: RotaryScaling, frequency: float) -> float:
    """Return the frequency of a wave: divided if it is long, unchanged if short, else between."""
    turns = scaling.original_positions * frequency / (2 * math.pi)
    if turns > scaling.high_factor:
        return frequency
    if turns < scaling.low_factor:
        return frequency / scaling.factor
    share = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return (1 - share) * frequency / scaling.factor + share * frequency


def _yarn(
    scaling: RotaryScaling, base: float, features: int, plain: list[float]
) -> tuple[float, ...]:
    """Return frequencies that are unchanged for the first pairs, divided for the last, and a linear
    mixture between."""

    def pair_of(turns: float) -> float:
        """Return the pair that turns so often in the original positions."""
        wave = scaling.original_positions / (turns * 2 * math.pi)
        return features * math.log(wave) / (2 * math.log(base))

    low = pair_of(scaling.beta_fast)
    high = pair_of(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, features - 1)
    if low == high:
        high += 0.001  # no division by zero
    values = []
    for i, frequency in enumerate(plain):
        divided = min(max((i - low) / (high - low), 0.0), 1.0)
        values.append(frequency / scaling.factor * divided + frequency * (1 - divided))
    return tuple(values)
