"""The peer's model: a plain GPT in torch, written as a PyTorch user would, to be wrapped by
DTensor, DDP or pipelining.

Starts from the same weights as hybridpar's (`full_weights`), under the plain model's own names. The
rows of `qkv` are ordered [head, (query, key, value), head dim], so that an even split of the rows
is a split of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.common import CLIP, LR, SEED, FixedLoader, Shape
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements


class PlainLayer(nn.Module):
    """A pre-norm transformer layer. Shapes: [b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, num_heads: int):
        super().__init__()
        self.head_dim = hidden // num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        # -1: with tensor parallelism, this rank's heads
        q, k, v = self.qkv(x).view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The blocks `blocks` (0 the embedding, num_layers + 1 the head) of a GPT; None: all.

    Shapes: tokens [b, s], or [b, s, h] without the embedding -> logits [b, s, v], or [b, s, h]
        without the head.
    """

    def __init__(
        self, shape: Shape, blocks: Iterable[int] | None = None, *, autocast: bool = False
    ):
        super().__init__()
        numbers = list(range(shape.num_layers + 2) if blocks is None else blocks)
        self.autocast = autocast
        first = 0 in numbers
        last = shape.num_layers + 1 in numbers
        self.tokens = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.positions = nn.Embedding(shape.seq_length, shape.hidden) if first else None
        self.layers = nn.ModuleDict(
            {
                str(n): PlainLayer(shape.hidden, shape.num_heads)
                for n in numbers
                if 0 < n <= shape.num_layers
            }
        )
        self.norm = nn.LayerNorm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None
        self.load_state_dict(
            {n: w for n, w in full_weights(shape).items() if n in self.state_dict()}
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            if self.tokens is not None and self.positions is not None:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for layer in self.layers.values():
                x = layer(x)
            return x if self.head is None or self.norm is None else self.head(self.norm(x))


def full_weights(shape: Shape) -> dict[str, Tensor]:
    """hybridpar's starting weights, whole, by the plain model's names."""
    blocks = build_blocks(shape.model, Axis("tp"), range(shape.num_layers + 2), device="cpu")
    named = list(
        named_placements(
            nn.ModuleDict({"blocks": nn.ModuleDict({str(n): b for n, b in blocks.items()})})
        )
    )
    initialize(named, SEED)
    return {_plain_name(name, shape): parameter.detach() for name, parameter, _ in named}


def _plain_name(name: str, shape: Shape) -> str:
    _, number, rest = name.split(".", 2)
    if int(number) in (0, shape.num_layers + 1):
        return rest.replace("language_model.projection", "head")
    return f"layers.{number}." + rest.replace("attention.", "").replace("mlp.", "")


class ReplicaStep:
    """One optimizer step of a plain GPT that is spread over replicas, `m` micro-batches on each of
    them."""

    def __init__(self, model: nn.Module, shape: Shape, m: int):
        self.model, self.optimizer = model, adamw(model.parameters())
        self.loader = FixedLoader(shape, m, dist.get_rank(), dist.get_world_size())
        self.step = 0

    def __call__(self) -> float:
        pairs = self.loader.pairs(self.step)
        self.step += 1
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(pairs):
            with (
                self.model.no_sync()
                if hasattr(self.model, "no_sync") and i < len(pairs) - 1
                else nullcontext()
            ):
                loss = cross_entropy(self.model(tokens), labels) / len(pairs)
                loss.backward()
            total += loss.detach()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the next token, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW, with hybridpar's settings: no weight decay on vectors."""
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for p in parameters:  # the fused kernel refuses a group that mixes DTensors and tensors
        groups.setdefault((type(p.data).__name__, p.dim() > 1), []).append(p)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": 0.01 if matrix else 0.0}
            for (_, matrix), group in groups.items()
        ],
        lr=LR,
        fused=True,
    )


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, *, across_ranks: bool = False) -> None:
    """Clips the norm of all gradients, as torch.nn.utils.clip_grad_norm_ does, also where DTensors
    and tensors mix.

    `across_ranks`: the ranks hold different parameters (pipeline stages). Collectives: then one
    all-reduce of a number; one more for each group of DTensors.
    """
    squares = torch.zeros((), device=optimizer.param_groups[0]["params"][0].device)
    for group in optimizer.param_groups:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in group["params"] if p.grad is not None]
        )
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if across_ranks:
        dist.all_reduce(squares)
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grads_with_norm_(group["params"], CLIP, squares.sqrt())
