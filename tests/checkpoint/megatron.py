"""Writes the weights of a model of transformers as Megatron-LM would have: by rank, under its older
and newer names.

Written from the layouts' description alone; nothing of hybridpar takes part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
CORE = {
    "layers": "decoder.layers",
    "norm1": "input_layernorm",
    "norm2": "pre_mlp_layernorm",
    "qkv": "self_attention.linear_qkv",
    "out": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "final": "decoder.final_layernorm",
}
FUSED = CORE | {
    "norm1": "self_attention.linear_qkv.layer_norm_",
    "norm2": "mlp.linear_fc1.layer_norm_",
}
LEGACY = {
    "layers": "layers",
    "norm1": "input_norm",
    "norm2": "post_attention_norm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
    "final": "final_norm",
}
OLDEST = LEGACY | {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "final": "final_layernorm",
}
STYLES = {"core": CORE, "fused": FUSED, "legacy": LEGACY, "oldest": OLDEST}


@dataclass(frozen=True)
class Model:
    """Weights in neutral words: everything [out, in]. Keys of a layer: norm1 q k v out norm2 fc1
    (or gate, up) fc2."""

    kind: str
    layers: list[dict[str, Tensors]]
    words: Tensor
    positions: Tensor | None
    final: Tensors
    output: Tensor | None
    heads: int
    groups: int
    args: dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written. `version`: of the order of queries, keys and values; `chunks` of
    each rank."""

    style: str = "core"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    version: float = 3.0
    padded_to: int = 104
    safetensors: bool = False
    is_zip: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


def gpt2(t: Tensors, config: Any) -> Model:
    def at(name: str, transposed: bool = False) -> Tensors:
        return {
            leaf: (t[f"{name}.{leaf}"].t() if transposed else t[f"{name}.{leaf}"])
            for leaf in ("weight", "bias")
        }

    layers = []
    for i in range(config.n_layer):
        h = f"transformer.h.{i}"
        whole = at(f"{h}.attn.c_attn", True)
        q, k, v = ({leaf: x.chunk(3)[j] for leaf, x in whole.items()} for j in range(3))
        layers.append(
            {
                "norm1": at(f"{h}.ln_1"),
                "q": q,
                "k": k,
                "v": v,
                "out": at(f"{h}.attn.c_proj", True),
                "norm2": at(f"{h}.ln_2"),
                "fc1": at(f"{h}.mlp.c_fc", True),
                "fc2": at(f"{h}.mlp.c_proj", True),
            }
        )
    args = {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "ffn_hidden_size": config.n_inner,
        "max_position_embeddings": config.n_positions,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "bias_gelu_fusion": True,
    }
    return Model(
        "gpt2",
        layers,
        t["transformer.wte.weight"],
        t["transformer.wpe.weight"],
        at("transformer.ln_f"),
        t.get("lm_head.weight"),
        config.n_head,
        config.n_head,
        args,
    )


def llama(t: Tensors, config: Any) -> Model:
    layers = []
    for i in range(config.num_hidden_layers):

        def at(name: str, prefix: str = f"model.layers.{i}") -> Tensors:
            return {
                leaf: t[key]
                for leaf in ("weight", "bias")
                if (key := f"{prefix}.{name}.{leaf}") in t
            }

        layers.append(
            {
                "norm1": at("input_layernorm"),
                **{p: at(f"self_attn.{p}_proj") for p in "qkv"},
                "out": at("self_attn.o_proj"),
                "norm2": at("post_attention_layernorm"),
                "gate": at("mlp.gate_proj"),
                "up": at("mlp.up_proj"),
                "fc2": at("mlp.down_proj"),
            }
        )
    args = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "group_query_attention": True,
        "ffn_hidden_size": config.intermediate_size,
        "swiglu": True,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "add_bias_linear": config.mlp_bias,
        "bias_gelu_fusion": False,
        "kv_channels": config.hidden_size // config.num_attention_heads,
    }
    return Model(
        "llama",
        layers,
        t["model.embed_tokens.weight"],
        None,
        {"weight": t["model.norm.weight"]},
        t.get("lm_head.weight"),
        config.num_attention_heads,
        config.num_key_value_heads,
        args,
    )


def order(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, version: float) -> Tensor:
    """A rank's queries, keys and values as one tensor."""
    dim = len(q) // heads
    if version >= 2:
        rows = zip(q.split(heads // groups * dim), k.split(dim), v.split(dim), strict=True)
        return torch.cat([part for group in rows for part in group])
    by_head = [torch.stack(x.split(dim)) for x in (q, k, v)]  # [heads, dim, ..]
    return torch.stack(by_head, 0 if version == 0 else 2).reshape(3 * len(q), *q.shape[1:])


def shard(model: Model, layer: dict[str, Tensors], rank: int, layout: Layout) -> dict[str, Tensors]:
    """A tensor rank's part of a layer, in neutral words."""
    tp = layout.tp

    def rows(x: Tensor) -> Tensor:
        return x.chunk(tp)[rank]

    qkv = {
        leaf: order(
            *(rows(layer[p][leaf]) for p in "qkv"),
            model.heads // tp,
            model.groups // tp,
            layout.version,
        )
        for leaf in layer["q"]
    }
    first = [layer["gate"], layer["up"]] if "gate" in layer else [layer["fc1"]]
    fc1 = {leaf: torch.cat([rows(part[leaf]) for part in first]) for leaf in first[0]}
    columns = {
        name: {
            leaf: (x.chunk(tp, 1)[rank] if leaf == "weight" else x)
            for leaf, x in layer[name].items()
        }
        for name in ("out", "fc2")
    }
    return {"norm1": layer["norm1"], "qkv": qkv, "norm2": layer["norm2"], "fc1": fc1, **columns}


def chunk_of(model: Model, numbers: range, tp_rank: int, layout: Layout) -> Tensors:
    """The tensors of one rank's stage that has the layers of these numbers; flat, with core's
    prefixes."""
    names = STYLES[layout.style]
    padding = model.words.new_full((layout.padded_to - len(model.words), model.words.shape[1]), 7.0)

    def vocabulary(x: Tensor) -> Tensor:
        return torch.cat([x, padding]).chunk(layout.tp)[tp_rank]

    found: Tensors = {}
    if numbers.start == 0:
        found["embedding.word_embeddings.weight"] = vocabulary(model.words)
        if model.positions is not None:
            found["embedding.position_embeddings.weight"] = model.positions
    for local, number in enumerate(numbers):
        for name, leaves in shard(model, model.layers[number], tp_rank, layout).items():
            theirs = names[name] if names[name].endswith("_") else f"{names[name]}."
            found |= {f"{names['layers']}.{local}.{theirs}{leaf}": x for leaf, x in leaves.items()}
    if numbers.stop == len(model.layers):
        found |= {f"{names['final']}.{leaf}": x for leaf, x in model.final.items()}
        if model.output is not None:
            found["output_layer.weight"] = vocabulary(model.output)
        elif numbers.start > 0:  # the last stage's own copy
            found["output_layer.weight"] = vocabulary(model.words)
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def nested(flat: Tensors, style: str, *, tied: bool) -> dict[str, Any]:
    """The form of older versions: mappings of the parts of the language model."""
    encoder = "encoder" if style == "legacy" else "transformer"
    parts: dict[str, Any] = {}
    whole: dict[str, Any] = {"language_model": parts}
    for name, tensor in flat.items():
        if name.startswith("embedding."):
            _, part, leaf = name.split(".")
            parts.setdefault("embedding", {}).setdefault(part, {})[leaf] = tensor
        elif name.startswith("output_layer"):
            (
                whole.setdefault("word_embeddings_for_head", {})
                if tied
                else parts.setdefault("output_layer", {})
            )["weight"] = tensor
        else:
            parts.setdefault(encoder, {})[name] = tensor
    return whole


def arguments(model: Model, layout: Layout) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    return (
        model.args
        | sizes
        | {
            "untie_embeddings_and_output_weights": model.output is not None,
            "padded_vocab_size": layout.padded_to,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float32,
            "lr": 1e-4,
            "data_path": ["x"],
            **layout.more,
        }
    )


def write(root: Path, model: Model, layout: Layout, **extra: Any) -> Path:
    """A folder as users have it: iter_0000100 and the name of that in a file."""
    bounds = [
        len(model.layers) * i // (layout.pp * layout.chunks)
        for i in range(layout.pp * layout.chunks + 1)
    ]
    args = arguments(model, layout)
    for pp_rank in range(layout.pp):
        for tp_rank in range(layout.tp):
            suffix = f"_{pp_rank:03d}" if layout.pp > 1 else ""
            folder = root / "iter_0000100" / f"mp_rank_{tp_rank:02d}{suffix}"
            folder.mkdir(parents=True)
            chunks = [
                chunk_of(model, range(bounds[i], bounds[i + 1]), tp_rank, layout)
                for i in range(pp_rank, layout.pp * layout.chunks, layout.pp)
            ]
            if layout.safetensors:
                save_file(chunks[0], folder / "model.safetensors")
                plain = {
                    key: value for key, value in args.items() if not isinstance(value, torch.dtype)
                }
                (root / "iter_0000100" / "args.json").write_text(json.dumps(plain))
                continue
            if layout.style in ("legacy", "oldest"):
                chunks = [nested(flat, layout.style, tied=model.output is None) for flat in chunks]
            keys = ["model"] if layout.chunks == 1 else [f"model{i}" for i in range(layout.chunks)]
            whole = {
                "args": argparse.Namespace(**args),
                "checkpoint_version": layout.version,
                "iteration": 100,
                "optimizer": {"state": torch.ones(3)},
                **dict(zip(keys, chunks, strict=True)),
                **extra,
            }
            if layout.version == 0:
                del whole["checkpoint_version"]
            torch.save(
                whole, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=layout.is_zip
            )
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root
