"""Question: how much of the energy of messages between stages would learned directions carry, in
the bytes of a codec?

    python -m benchmarks.message_energy

The model of benchmarks.messages trains in one process with exact messages. What goes over its links
in a few batches is kept, and then projected and encoded. Lost: |x - what arrives|^2 / |x|^2 of all
tokens of a batch. Directions are 15 of 128 features, 60 bytes of 512: those of the largest second
moments of the same batch, of the one some steps before, or fixed ones. Nothing is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, parse, report
from benchmarks.messages import STUDY, alone, settings
from hybridpar.config import Config
from hybridpar.pipeline.run.codecs import through
from hybridpar.pipeline.run.stage_split import stage_split
from hybridpar.state.compression.codec import BlockQuantized
from hybridpar.state.compression.methods.dct import TopK
from hybridpar.state.compression.methods.subspace import Subspace

SHARE = 0.12
Kept = dict[tuple[str, int, int], Tensor]
"""Messages that went over a link: by way ('forth', 'back'), number of the link and steps made
before."""


def record(config: Config, at: set[int]) -> Kept:
    """Trains, and keeps the messages of the batches `at`, [tokens, features] each."""
    engine, loader, _ = alone(config)
    kept: Kept = {}
    done: list[Any] = []

    def tap(link: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(module: nn.Module, inputs: Any, out: Tensor) -> None:
            if len(done) in at and torch.is_grad_enabled():
                step = len(done)
                kept["forth", link, step] = out.detach().flatten(0, -2).clone()
                out.register_hook(
                    lambda dy: kept.update({("back", link, step): dy.flatten(0, -2).clone()})
                )

        return note

    for link, (before, _) in enumerate(pairwise(stage_split(config))):
        engine.stage.blocks[str(before.stop - 1)].register_forward_hook(tap(link))
    engine.train(loader, config.train.num_steps, done.append)
    return kept


def directions(x: Tensor) -> Tensor:
    """Directions of the largest second moments. Shapes: [tokens, h] -> [h, share * h]."""
    rank = Subspace(SHARE, x.dtype).rank(x.shape[1])
    return torch.linalg.eigh(x.double().t() @ x.double()).eigenvectors[:, -rank:].to(x.dtype)


def lost(x: Tensor, arrived: Tensor) -> float:
    """Share of the energy that does not arrive: |x - arrived|^2 / |x|^2."""
    return round(float((x - arrived).square().sum() / x.square().sum()), 4)


def cases(kept: Kept, at: list[int], before: int) -> Iterator[dict[str, Any]]:
    """Entries of the result file."""
    codecs = {
        "fixed directions": Subspace(SHARE, torch.float32),
        "dct 0.1": TopK(0.1, torch.float32),
        "int4": BlockQuantized(4, rotate=True),
    }
    for (way, link, step), x in kept.items():
        if step in at:
            found = {
                name: lost(x, x @ u @ u.t())
                for name, u in (
                    ("learned from it", directions(x)),
                    ("learned before", directions(kept[way, link, step - before])),
                )
            }
            found |= {name: lost(x, through(codec, x)) for name, codec in codecs.items()}
            yield {
                "case": f"{way}, link {link}, after {step} steps",
                "lost": found,
                "settings": {"shape": "study", "way": way, "link": link, "step": step},
            }


def main() -> None:
    parser = arguments(__doc__, rounds=1, shapes=["study"], choices=["study"])
    parser.add_argument(
        "--at", nargs="+", type=int, default=[30, 60, 150, 299], help="batches that are looked at"
    )
    parser.add_argument(
        "--before", type=int, default=30, help="steps since directions were learned"
    )
    args = parse(parser)
    with tempfile.TemporaryDirectory() as cache:
        config = settings("1f1b", "none", 4, 1234, max(args.at) + 1, cache)
        kept = record(config, {step - back for step in args.at for back in (0, args.before)})
    report(
        "message_energy",
        cases(kept, args.at, args.before),
        args,
        shapes={"study": STUDY},
        show=lambda case: print(case["case"], case["lost"], flush=True),
        meaning="lost: share of the energy of a batch's messages that does not arrive",
    )


if __name__ == "__main__":
    main()
