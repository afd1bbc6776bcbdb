"""Codecs of messages: what arrives depends on a row alone, and a packed activation passes its
gradient to its leaf."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridpar.config import from_mapping
from hybridpar.config.compression_methods import MESSAGES
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.prediction.fake_neighbours import silent_group
from hybridpar.runtime.codecs import Codecs, through
from hybridpar.runtime.stage_transport import Packed, StageTransport
from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.methods.dct import FixedIndices, TopK
from hybridpar.state.compression.registry import message_codec

NAMES = list(MESSAGES)
DCT = {"messages": "dct", "messages_kept": 0.1}
STEP = {"bf16": 2**-8, "int8": 1 / 100, "int4": 1 / 3, "dct": 1.0}
"""Largest error over the largest number of a row: half a step, and a scale that is rounded up."""


def codec_of(name: str, dtype: str = "fp32") -> Codec:
    codec = message_codec(name, from_mapping({"train": {"dtype": dtype}}))
    assert codec is not None
    return codec


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_rows_are_near_and_depend_on_the_row_alone(name: str, dtype: torch.dtype) -> None:
    names = {kind: name for name, kind in DTYPES.items()}
    codec = codec_of(name, names[dtype])
    x = numbers(3, 5, 70).to(dtype)
    arrived = through(codec, x)
    assert (arrived.shape, arrived.dtype) == (x.shape, dtype)
    assert ((arrived - x).abs().amax(-1) <= STEP[name] * x.abs().amax(-1)).all()
    assert torch.equal(through(codec, x[1:2, 2:4]), arrived[1:2, 2:4])
    message = codec.encode(x.view(-1, 70))
    assert (message.dtype, message.shape) == (torch.uint8, (15, codec.row_bytes(70)))
    assert torch.equal(through(codec, x.transpose(0, 1)), arrived.transpose(0, 1)), (
        "strides do not matter"
    )
    assert through(codec, x[:, :0]).shape == (3, 0, 70), (
        "a rank of sequence parallelism may have no row"
    )


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_rows_are_the_bytes_of_the_whole(name: str) -> None:
    codec = codec_of(name)
    x = numbers(2, 7, 33)
    whole = StageTransport(
        Axis("pp"), Axis("pp_reverse"), (2, 7, 33), torch.float32, torch.device("cpu"), Axis("tp")
    )
    parts = []
    for rank in range(4):
        lane = replace(whole, slicing=Axis("tp", rank, tuple(range(4)), silent_group(rank, 4)))
        parts.append(lane.cut(x, codec))
        assert lane.room(codec).shape == parts[-1].shape
    assert [len(part) for part in parts] == [4, 4, 3, 3]
    assert torch.equal(torch.cat(parts), whole.cut(x, codec))
    assert whole.message(codec).shape == whole.room(codec).shape == whole.cut(x, codec).shape
    assert torch.equal(whole.join(torch.cat(parts), codec), through(codec, x))


def test_a_packed_activation_takes_its_gradient_and_hardly_any_memory() -> None:
    codec = codec_of("int4")
    x = numbers(2, 7, 70)
    lane = StageTransport(
        Axis("pp"), Axis("pp_reverse"), (2, 7, 70), torch.float32, torch.device("cpu")
    )
    packed = Packed(lane, lane.cut(x, codec), codec)
    assert packed.leaf.untyped_storage().nbytes() == 4
    for _ in range(2):
        assert torch.equal(packed(), through(codec, x))
    (packed() * 3 * x).sum().backward()
    assert packed.leaf.grad is not None
    assert torch.equal(packed.leaf.grad, 3 * x)


def test_a_head_alone_gets_exact_activations() -> None:
    codecs = Codecs.of(
        JobPlan(from_mapping({"compression": {"messages": "int8", "messages_backward": "bf16"}}))
    )
    assert codecs.on(1, 3) == codec_of("int8")
    assert codecs.on(-1, 3) == codec_of("bf16")
    (head,) = codecs.exact
    assert codecs.on(1, head) is codecs.on(-1, head) is None


def test_gradients_are_those_of_the_features_that_were_sent() -> None:
    """A tenth of 33 features: 3 of a token; of the 14 tokens, tp rank 1 of 3 has 5."""
    codecs = Codecs.of(JobPlan(from_mapping({"model": {"hidden_size": 64}, "compression": DCT})))
    forward = codecs.on(1, 3)
    backward = codecs.on(-1, 3)
    assert isinstance(forward, TopK)
    assert isinstance(backward, FixedIndices)
    assert (forward.row_bytes(33), backward.row_bytes(33)) == (3 * 4 + 5, 3 * 4)
    x = numbers(2, 7, 33)
    dy = numbers(7, 2, 33).view(2, 7, 33)
    lane = StageTransport(
        Axis("pp"), Axis("pp_reverse"), (2, 7, 33), torch.float32, torch.device("cpu")
    )
    lane = replace(lane, slicing=Axis("tp", 1, tuple(range(3)), silent_group(1, 3)))
    message = lane.cut(x, forward)
    sent = lane.cut(dy, backward.at(forward.places(message, 33)))
    assert sent.shape == lane.room(backward).shape == (5, 12)
    rows = torch.empty(5, 33)
    backward.at(forward.places(message, 33)).decode_(rows, sent)
    mask = through(forward, x).view(-1, 33)[5:10] != 0
    assert mask.sum(1).tolist() == [3] * 5
    assert torch.equal(rows, dy.view(-1, 33)[5:10] * mask)
