"""The registry of compression methods: a row for each value of [compression], read without torch.

A row names the method's file, and says what the rest of the program asks of the method: nothing
else in the program compares names. The file (in hybridpar/state/compression/methods/) has all that
computes; state/compression/registry.py loads it. To remove a method, remove its file and its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

_METHODS = "hybridpar.state.compression.methods"


@dataclass(frozen=True)
class GradientCompression:
    """A value of compression.gradients.

    Attributes:
        keeps_unsent: Every replica keeps what it has not sent of its gradients (error feedback).
        takes_factors: It takes gradients of weights as factors, which are never multiplied. What it
            learns is equal on all replicas.
        depends_on_values: Values of the data decide which operators it runs.
        value_types: The values of compression.gradients_values that it supports; empty: it does not
            read that setting.
        coded_as_messages: It encodes numbers as the message codec of the same name does, so the
            codec's measured speeds hold.
        loss_percent: By how many per cent the validation loss ended higher in small studies (means
            over three seeds, of 1f1b and 2bw the larger; benchmarks/README.md). `plan
            --compression` tries the methods that have this number.
    """

    keeps_unsent: bool = True
    takes_factors: bool = False
    depends_on_values: bool = False
    value_types: tuple[str, ...] = ()
    coded_as_messages: bool = False
    loss_percent: float | None = None


@dataclass(frozen=True)
class MessageCompression:
    """A value of compression.messages: the codec of activations between stages.

    Attributes:
        is_for_gradients: compression.messages_backward may name it by itself.
        bytes_per_number: If a message's size does not depend on other settings.
        loss_percent: As of `GradientCompression`.
    """

    is_for_gradients: bool = False
    bytes_per_number: float | None = None
    loss_percent: float | None = None


@dataclass(frozen=True)
class CompressionMethod:
    """A row of the registry. module: the method's file, with GRADIENTS and MESSAGES."""

    module: str
    gradients: GradientCompression | None = None
    messages: MessageCompression | None = None


METHODS: Mapping[str, CompressionMethod] = MappingProxyType(
    {
        "bf16": CompressionMethod(
            f"{_METHODS}.bf16",
            GradientCompression(coded_as_messages=True),
            MessageCompression(is_for_gradients=True, bytes_per_number=2.0),
        ),
        "int8": CompressionMethod(
            f"{_METHODS}.int8",
            GradientCompression(coded_as_messages=True, loss_percent=0.0),
            MessageCompression(is_for_gradients=True, bytes_per_number=66 / 64, loss_percent=0.0),
        ),
        "int4": CompressionMethod(
            f"{_METHODS}.int4",
            GradientCompression(coded_as_messages=True, loss_percent=0.1),
            MessageCompression(is_for_gradients=True, bytes_per_number=34 / 64, loss_percent=0.5),
        ),
        "dct": CompressionMethod(
            f"{_METHODS}.dct",
            GradientCompression(
                depends_on_values=True, value_types=("full", "bf16"), loss_percent=23.0
            ),
            MessageCompression(loss_percent=19.0),
        ),
        "powersgd": CompressionMethod(
            f"{_METHODS}.powersgd",
            GradientCompression(value_types=("full", "bf16", "int8", "int4")),
        ),
        "sbpca": CompressionMethod(
            f"{_METHODS}.sbpca",
            GradientCompression(
                keeps_unsent=False,
                takes_factors=True,
                depends_on_values=True,
                value_types=("full", "bf16"),
            ),
        ),
    }
)
"""The methods by name, from the one that changes least to the one that saves most."""

GRADIENTS: Mapping[str, GradientCompression] = MappingProxyType(
    {name: row.gradients for name, row in METHODS.items() if row.gradients is not None}
)
MESSAGES: Mapping[str, MessageCompression] = MappingProxyType(
    {name: row.messages for name, row in METHODS.items() if row.messages is not None}
)

if TYPE_CHECKING:
    GradientsName = str
    MessagesName = str
    BackwardName = str
else:
    GradientsName = Literal[("none", *GRADIENTS)]
    MessagesName = Literal[("none", *MESSAGES)]
    BackwardName = Literal[
        ("same", "none", *(name for name, row in MESSAGES.items() if row.is_for_gradients))
    ]


def other_gradients(allows: Callable[[GradientCompression], bool]) -> str:
    """The method that saves most among those that `allows`, for an error that suggests a value;
    none if there is no such."""
    return ["none", *(name for name, row in GRADIENTS.items() if allows(row))][-1]
