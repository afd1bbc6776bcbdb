"""Claim: in one process, hybridpar's training step is faster than that of Hugging Face
transformers' GPT-2.

    python -m benchmarks.single
    python -m benchmarks.single --device cuda --name gpu_single    # 345M and 1.3B in bf16, on one GPU
    python -m benchmarks.single --shapes 345M_1 --threads 1 --compile --peers gelu_new    # 14 s a step in fp32
    python -m benchmarks.single --dropout 0.1 --name single_dropout    # after embeddings and before residual additions
    python -m benchmarks.single --device cuda --shapes 1.3B --peers none    # hybridpar alone
    python -m benchmarks.single --device cuda --shapes 1.3B --microbatches 16    # so many for an update
    python -m benchmarks.single --device cuda --shapes 1.3B --fp8 --peers none    # hidden matrices in 8 bits
    python -m benchmarks.single --device cuda --shapes bert_large --graphs    # against ourselves without CUDA graphs

The peer is GPT2LMHeadModel with sdpa attention, untied head, no dropout of attention, AdamW(fused),
on the same weights, tokens, threads: with its default activation (`gelu_new`, the tanh form spelled
out in torch operations) and with torch's fused one (`gelu_pytorch_tanh`, the same function). What
'bf16' means:

    ours            bf16 weights and activations; fp32 master weights, gradient sums and optimizer
                    state
    autocast        fp32 weights, cast for each matrix product by torch.autocast: the same numerics,
                    nearly
    pure            everything in bf16, optimizer state included: less work and less memory, but
                    updates are rounded to 8 bits, which training does not survive for long

Both clip the global norm of the gradient to 1, as transformers' own Trainer does. With --compile
also the model under torch.compile, which is the default on a GPU. MFU: operations to train on a
token, as hybridpar.models.cost.training_flops_per_token counts them, over the data sheet's peak, or
on a CPU over the measured rate of matrix products.

A case is written as soon as it is measured. The kernels of one of our steps, which --profile lists,
are added then.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Shape,
    Step,
    case,
    engine_config,
    race,
)
from benchmarks.plain import adamw, clip, cross_entropy, full_weights
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.models.cost import training_flops_per_token
from hybridpar.train.reporting.peak import peak_flops

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of the losses: sums in another order; bf16 has 8 bits, its rounding
differs by side."""
TOLERANCE_DROPOUT = 1e-2
"""Tolerance where each side draws masks of its own: up to 4e-3 apart in single_dropout_zen5.json."""

REPEAT = {"small": 4, "345M": 4, "gpt_tiny": 8}
"""Steps of a round, where one is short."""

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

    def __init__(
        self,
        shape: Shape,
        activation: str,
        precision: str,
        device: str,
        *,
        compiled: bool,
        dropout: float,
        num_microbatches: int,
    ):
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import GPT2Config, GPT2LMHeadModel

        with torch.device(device):
            self.model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=shape.vocab,
                    n_positions=shape.seq_length,
                    n_embd=shape.hidden,
                    n_layer=shape.num_layers,
                    n_head=shape.num_heads,
                    resid_pdrop=dropout,
                    embd_pdrop=dropout,
                    attn_pdrop=0.0,
                    activation_function=activation,
                    tie_word_embeddings=False,
                    use_cache=False,
                    bos_token_id=0,
                    eos_token_id=0,
                    attn_implementation="sdpa",
                )
            )
        self.model.load_state_dict(hugging_face_weights(shape))
        self.model.train().to(device)
        if precision == "pure":
            self.model.bfloat16()
        self.device = device
        self.autocast = precision == "autocast"
        self.optimizer = adamw(self.model.parameters())
        self.loader = FixedLoader(shape, num_microbatches, device=device)
        self.step = 0
        self.forward = torch.compile(self.loss) if compiled else self.loss

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(input_ids=tokens, use_cache=False).logits, labels)

    def __call__(self) -> float:
        pairs = self.loader.pairs(self.step)
        self.step += 1
        total = torch.zeros((), device=self.device)
        for tokens, labels in pairs:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
                loss = self.forward(tokens, labels) / len(pairs)
            loss.backward()
            total += loss.detach()
        clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()


def hugging_face_weights(shape: Shape) -> dict[str, Tensor]:
    """hybridpar's starting weights by transformers' names: matrices transposed, qkv rows as [(q, k,
    v), head, dim]."""
    weights: dict[str, Tensor] = {}
    names = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    top = {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    for name, weight in full_weights(shape).items():
        if not name.startswith("layers."):
            module, kind = name.split(".")
            weights[f"{top[module]}.{kind}"] = weight
            continue
        _, number, module, kind = name.split(".")
        if module == "qkv":
            weight = weight.unflatten(0, (shape.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        weights[f"transformer.h.{int(number) - 1}.{names[module]}.{kind}"] = (
            weight.t() if weight.dim() == 2 else weight
        )
    return weights


def measure(
    shape_name: str, dtype: str, threads: int, args: argparse.Namespace
) -> tuple[dict[str, Any], Step]:
    """Race hybridpar and the peers of `dtype` on one shape; returns the case, and a step of
    hybridpar's."""
    torch.set_num_threads(threads)
    # the peers' code is one function, which would be run uncompiled after eight of its forms
    torch.compiler.reset()
    shape = SHAPES[shape_name]
    device = args.device
    peers = PEERS[dtype] if shape.kind == "gpt" else {}
    if device == "cuda" and importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: hybridpar runs alone")
        peers = {}
    config = engine_config(shape, dtype=dtype, device=device, num_microbatches=args.microbatches)
    config = replace(
        config,
        model=replace(config.model, dropout=args.dropout),
        train=replace(config.train, fp8=args.fp8),
    )
    make: dict[str, Callable[[], Step]] = {OURS: lambda: OurStep(config, shape, ProcessGrid())}
    if args.graphs:
        plain = replace(config, train=replace(config.train, cuda_graphs=False))
        make["without CUDA graphs"] = lambda: OurStep(plain, shape, ProcessGrid())
    for compiled in (False, True) if args.compile else (False,):
        for name, (activation, precision) in peers.items():
            if is_chosen(side := f"{name}{' compiled' * compiled}", args.peers):
                make[side] = partial(
                    HuggingFaceStep,
                    shape,
                    activation,
                    precision,
                    device,
                    compiled=compiled,
                    dropout=args.dropout,
                    num_microbatches=args.microbatches,
                )
    sides = {}
    memory = {}
    for name, construct in make.items():
        # CUDA graphs are made in the first batch that has several micro-batches of a kind, else in
        # the second
        sides[name], memory[name] = peak_gib(
            construct, device, num_steps=4 if args.microbatches == 1 else 2
        )
    result = race(
        sides,
        args.rounds,
        tolerance=TOLERANCE_DROPOUT if args.dropout or args.fp8 else TOLERANCE[dtype],
        repeat=REPEAT.get(shape_name, 1),
    )
    case_name = f"{shape_name} {dtype} {threads} thread{'s' * (threads > 1)}"
    entry = case(
        case_name,
        result,
        args.microbatches * shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        threads=threads,
        device=device,
        dropout=args.dropout,
        microbatches=args.microbatches,
        fp8=args.fp8,
    )
    peak, source = peak_flops(config, torch.device(device), Axis("world"))
    per_token = training_flops_per_token(shape.model)
    entry["peak_flops"] = [peak, source]
    entry["mfu"] = {
        side: round(speed * per_token / peak, 4) for side, speed in entry["tokens_per_s"].items()
    }
    if device == "cuda":
        entry["peak_memory_gib"] = memory
        entry["graph_replays"] = {
            name: replays(side) for name, side in sides.items() if isinstance(side, OurStep)
        }
    return entry, sides[OURS]


def replays(side: OurStep) -> int:
    """Return how many micro-batches a side has replayed as CUDA graphs so far."""
    graphs = side.engine.executor.graphs
    return graphs.num_replayed if graphs is not None else 0


def is_chosen(side: str, texts: list[str]) -> bool:
    """Return whether --peers names a side: by a part of its name, all by "", and no side by
    "none"."""
    return any(text in side for text in texts)


def peak_gib(
    construct: Callable[[], Step], device: str, num_steps: int
) -> tuple[Step, float | None]:
    """Construct a side and train some steps, after which its CUDA graphs are made.

    Returns:
        The side, and the GPU memory in GiB that torch reserved for it at most; None on a CPU.
    """
    if device != "cuda":
        return construct(), None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    side = construct()
    for _ in range(num_steps):
        side()
    return side, round((torch.cuda.max_memory_reserved() - before) / 2**30, 2)


def kernels(step: Step, device: str, num_steps: int) -> list[dict[str, Any]]:
    """Return time in ms and launches of each kernel (on a CPU: operator) in one of our steps, the
    longest first."""
    on_gpu = device == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profiled:
        for _ in range(num_steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    rows = []
    for event in profiled.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            rows.append(
                {
                    "kernel": event.key,
                    "ms": round(microseconds / 1e3 / num_steps, 3),
                    "launches": event.count / num_steps,
                }
            )
    rows.sort(key=lambda row: -row["ms"])
    return rows


def show(entry: dict[str, Any]) -> None:
    """Print a line for each side: tokens/s, MFU, peak memory, replayed micro-batches; then the
    ratios to peers."""
    memory = entry.get("peak_memory_gib", {})
    replayed = entry.get("graph_replays", {})
    for side, speed in entry["tokens_per_s"].items():
        peak = f"  {memory[side]:6.2f} GiB" if side in memory else ""
        graphs = f"  {replayed[side]} replays" if side in replayed else ""
        mfu = entry["mfu"][side]
        print(
            f"{entry['case']:<34} {side:<40} {speed:10,.0f} tokens/s  MFU {mfu:.3f}{peak}{graphs}",
            flush=True,
        )
    common.print_case(entry)


def main() -> None:
    parser = common.arguments(__doc__, rounds=11, shapes=[])
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="peers with such a text in their names; none: hybridpar alone",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="ours with train.fp8")
    parser.add_argument("--graphs", action="store_true", help="also without CUDA graphs")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="peers under torch.compile, too"
    )
    parser.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, help="list the kernels of our step, too"
    )
    args = common.parse(parser)
    known = [
        f"{name}{form}" for peers in PEERS.values() for name in peers for form in ("", " compiled")
    ]
    for text in args.peers:
        if text != "none" and not any(text in side for side in known):
            parser.error(
                f"--peers {text!r}: names no peer. Peers: {', '.join(dict.fromkeys(known))}; or "
                "none"
            )
    gpu = args.device == "cuda"
    args.shapes = args.shapes or (["345M", "1.3B"] if gpu else ["ref", "small", "gpt_tiny"])
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    args.threads = args.threads or ([1] if gpu else [1, 2])
    args.compile = gpu if args.compile is None else args.compile
    args.profile = gpu if args.profile is None else args.profile
    if gpu:
        args.dtypes = ["bf16"]
    entries: list[dict[str, Any]] = []
    for threads, shape, dtype in product(args.threads, args.shapes, args.dtypes):
        entry, ours = measure(shape, dtype, threads, args)
        entries.append(entry)
        show(entry)
        path = common.write_results("single", entries, args)
        if args.profile:
            entry["kernels"] = kernels(
                ours, args.device, num_steps=3 if args.microbatches == 1 else 1
            )
            path = common.write_results("single", entries, args)
        del ours  # its memory is the next shape's
        print(path)
        if args.graphs and entry.get("graph_replays", {}).get(OURS) == 0:
            raise SystemExit("no micro-batch was replayed as a CUDA graph; the log above says why")


if __name__ == "__main__":
    main()
