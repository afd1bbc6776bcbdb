"""Claim: in one process, hybridpar's training step is faster than that of Hugging Face transformers' GPT-2.

    python -m benchmarks.single

The peer is GPT2LMHeadModel with sdpa attention, untied head, no dropout, AdamW(fused), on the same weights, tokens,
threads: with its default activation (`gelu_new`, the tanh form spelled out in torch operations) and with torch's fused
one (`gelu_pytorch_tanh`, the same function). What 'bf16' means:

    ours            bf16 weights and activations; fp32 master weights, gradient sums and optimizer state
    autocast        fp32 weights, cast for each matrix product by torch.autocast: the same numerics, nearly
    pure            everything in bf16, optimizer state included: less work and less memory, but updates are rounded
                    to 8 bits, which training does not survive for long

Both clip the global norm of the gradient to 1, as transformers' own Trainer does.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Shape,
    Step,
    arguments,
    case,
    engine_config,
    parse,
    print_case,
    race,
    write_results,
)
from benchmarks.plain import adamw, clip, cross_entropy, full_weights
from hybridpar.grid import ProcessGrid

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of the losses: sums in another order; bf16 has 8 bits, its rounding differs by side."""

PEERS = {
    "fp32": {"HF gelu_new": ("gelu_new", ""), "HF gelu_pytorch_tanh": ("gelu_pytorch_tanh", "")},
    "bf16": {
        "HF autocast gelu_new": ("gelu_new", "autocast"),
        "HF autocast gelu_pytorch_tanh": ("gelu_pytorch_tanh", "autocast"),
        "HF pure gelu_pytorch_tanh": ("gelu_pytorch_tanh", "pure"),
    },
}


class HuggingFaceStep:
    """One optimizer step of GPT2LMHeadModel a call."""

    def __init__(self, shape: Shape, activation: str, precision: str):
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(
            vocab_size=shape.vocab, n_positions=shape.seq_length, n_embd=shape.hidden, n_layer=shape.num_layers,
            n_head=shape.num_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function=activation,
            tie_word_embeddings=False, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa"))
        self.model.load_state_dict(hugging_face_weights(shape))
        self.model.train()
        if precision == "pure":
            self.model.bfloat16()
        self.autocast = precision == "autocast"
        self.optimizer = adamw(self.model.parameters())
        self.loader, self.step = FixedLoader(shape, 1), 0

    def __call__(self) -> float:
        ((tokens, labels),) = self.loader.pairs(self.step)
        self.step += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = cross_entropy(self.model(input_ids=tokens, use_cache=False).logits, labels)
        loss.backward()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def hugging_face_weights(shape: Shape) -> dict[str, Tensor]:
    """hybridpar's starting weights by transformers' names: matrices transposed, qkv rows as [(q, k, v), head, dim]."""
    weights: dict[str, Tensor] = {}
    names = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj",
             "up": "mlp.c_fc", "down": "mlp.c_proj"}
    top = {"tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    for name, weight in full_weights(shape).items():
        if not name.startswith("layers."):
            module, kind = name.split(".")
            weights[f"{top[module]}.{kind}"] = weight
            continue
        _, number, module, kind = name.split(".")
        if module == "qkv":
            weight = weight.unflatten(0, (shape.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        weights[f"transformer.h.{int(number) - 1}.{names[module]}.{kind}"] = weight.t() if weight.dim() == 2 else weight
    return weights


def measure(shape_name: str, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    """Races hybridpar and the peers of `dtype` on one shape."""
    torch.set_num_threads(threads)
    shape = SHAPES[shape_name]
    sides: dict[str, Step] = {OURS: OurStep(engine_config(shape, dtype=dtype), shape, ProcessGrid())}
    for name, (activation, precision) in PEERS[dtype].items():
        sides[name] = HuggingFaceStep(shape, activation, precision)
    result = race(sides, rounds, tolerance=TOLERANCE[dtype], repeat=4 if shape_name == "small" else 1)
    return case(f"{shape_name} {dtype} {threads} thread{'s' * (threads > 1)}", result, shape.microbatch_tokens,
                shape=shape_name, dtype=dtype, threads=threads)


def main() -> None:
    parser = arguments(__doc__, rounds=11, shapes=["ref", "small"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args = parse(parser)
    cases = []
    for threads in args.threads:
        for shape in args.shapes:
            for dtype in args.dtypes:
                cases.append(measure(shape, dtype, threads, args.rounds))
                print_case(cases[-1])
    print(write_results("single", cases, args))


if __name__ == "__main__":
    main()
