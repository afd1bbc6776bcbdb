"""Counts the activations and gradients that a rank sends to neighbouring stages, by link."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.method import Sent


class StageLink(NamedTuple):
    """One direction of the link between two stages.

    Attributes:
        into: The later stage of the two.
        flow: 1 for activations, -1 for their gradients.
        is_coded: A codec encodes what is sent.
    """

    into: int
    flow: int
    is_coded: bool


class MessageTraffic:
    """Elements and bytes of the messages of training that this rank has sent to other stages.

    Evaluation sends without a codec and is not counted.

    Attributes:
        sent: The counts since the start of the run, by link.
    """

    def __init__(self) -> None:
        self.sent: dict[StageLink, Sent] = {}

    def add(self, into: int, flow: int, codec: Codec | None, x: Tensor, message: Tensor) -> None:
        """Count the message that carries `x`, or this rank's slice of it.

        Shapes: x [.., h]; message [rows, bytes of a row] with a codec, otherwise any.
        """
        if not torch.is_grad_enabled():
            return
        sent = self.sent.setdefault(StageLink(into, flow, codec is not None), Sent())
        elements = numel = message.numel()
        if codec is not None:
            columns = x.shape[-1]
            elements = len(message) * codec.row_elements(columns)
            numel = len(message) * columns
        sent.add(elements, message.numel() * message.element_size())
        sent.add_whole(numel, numel * x.element_size())
