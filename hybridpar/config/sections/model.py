"""The section [model]."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from hybridpar.config.capabilities import Adapters, RoutedExperts
from hybridpar.config.names import meant
from hybridpar.config.sections.architecture import (
    EXPERT_FIELDS,
    attention_conflicts,
    expert_conflicts,
    norm_conflicts,
)
from hybridpar.config.spec import ModelSpec
from hybridpar.config.typed import Count, NotNegative, Positive, Share, Within
from hybridpar.errors import ConfigError, Problem

_LORA_ALPHA = 16.0
_LORA_TARGETS = ("*.attention.*", "*.mlp.*")


@dataclass(frozen=True)
class ModelConfig(ModelSpec):
    """GPT or BERT, whose blocks are built in models/."""

    counts: ClassVar[str] = "tokens"  # type: ignore[misc]  # which others say for themselves
    sequence_parallel: ClassVar[bool] = True  # type: ignore[misc]
    cuda_graph_safe: ClassVar[bool] = True  # type: ignore[misc]
    every_block_has_parameters: ClassVar[bool] = True  # type: ignore[misc]
    kind: Literal["gpt", "bert"] = "gpt"
    """Model family. gpt: causal, predicts the next token. bert: bidirectional, predicts masked
    tokens."""
    num_layers: Annotated[int, Within(1, 10_000)] = 4
    """Number of transformer layers."""
    hidden_size: Annotated[int, Within(1, 2**20)] = 256
    """Number of features per token between layers."""
    num_heads: Annotated[int, Within(1, 2**16)] = 8
    """Number of attention heads; must divide hidden_size unless head_dim is given."""
    num_kv_heads: Annotated[int, Within(0, 2**16)] = 0
    """Number of key and value heads (grouped-query attention). 0: num_heads."""
    head_dim: Annotated[int, Within(0, 2**16)] = 0
    """Features of an attention head. 0: hidden_size / num_heads."""
    ffn_hidden_size: Annotated[int, Within(0, 2**24)] = 0
    """Hidden size of the MLP. 0: 4 * hidden_size."""
    seq_length: Annotated[int, Within(1, 2**24)] = 128
    """Tokens per sample."""
    max_positions: Annotated[int, Within(0, 2**24)] = 0
    """Rows of the learned position table, of which the first seq_length are used; a rotary model
    only exports the number. 0: seq_length."""
    vocab_size: Annotated[int, Within(1, 2**28)] = 8192
    """Vocabulary size: rows of the embedding, and of a tokenizer trained on the corpus."""
    tie_embeddings: bool = True
    """Share the weights of the token embedding with the output layer."""
    position: Literal["learned", "rotary"] = "learned"
    """Position encoding: a learned table, or rotary embeddings of queries and keys."""
    rotary_base: Positive = 10000.0
    """Base of the rotary wavelengths (theta)."""
    rotary_fraction: Annotated[float, Within(above=0, most=1)] = 1.0
    """Share of each head's features that rotary embeddings rotate, from the first on."""
    rotary_pattern: str = "1"
    """Layers with rotary embeddings: a digit per layer, repeated to num_layers. 1: with, 0:
    without, such as "1110" for every fourth layer without."""
    rotary_scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    """Change of the rotary frequencies for longer texts than the model was first trained on. linear
    divides them by rotary_factor; llama3 only those with long waves; yarn and longrope scale each
    pair of features differently, and multiply queries and keys (rotary_magnitude)."""
    rotary_factor: Positive = 1.0
    """Factor by which rotary_scaling extends the texts."""
    rotary_original_positions: Annotated[int, Within(0, 2**24)] = 0
    """Longest text before the extension; llama3, yarn and longrope need it. longrope divides the
    frequencies by rotary_short_factors up to this length, and by rotary_long_factors beyond."""
    rotary_low_factor: Positive = 1.0
    """llama3: waves longer than rotary_original_positions / this are divided by rotary_factor."""
    rotary_high_factor: Positive = 4.0
    """llama3: waves shorter than rotary_original_positions / this are unchanged; between the two
    limits the change is gradual."""
    rotary_beta_fast: Positive = 32.0
    """yarn: features that turn at least this often in rotary_original_positions are unchanged."""
    rotary_beta_slow: Positive = 1.0
    """yarn: features that turn at most this often are divided by rotary_factor."""
    rotary_truncate: bool = True
    """yarn: round the ends of the gradual change to whole features, outwards."""
    rotary_magnitude: NotNegative = 0.0
    """yarn, longrope: factor of the rotated queries and keys. 0: 0.1 ln(rotary_factor) + 1 for
    yarn, sqrt(1 + ln(rotary_factor) / ln(rotary_original_positions)) for longrope."""
    rotary_short_factors: Annotated[tuple[float, ...], Within(above=0)] = ()
    """longrope: divisor of each frequency, for texts up to rotary_original_positions."""
    rotary_long_factors: Annotated[tuple[float, ...], Within(above=0)] = ()
    """longrope: divisor of each frequency, for longer texts."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys, before rotary embeddings. head: over each head's features, with
    one weight for all heads, as in Qwen3. full: over all features of the projection, as in OLMo
    2."""
    window: Annotated[int, Within(0, 2**24)] = 0
    """Most positions that a token attends to, its own included (sliding window). 0: all earlier
    ones."""
    window_pattern: str = "1"
    """Layers with a window: a digit per layer, repeated to num_layers. 1: with, 0: without, such as
    "10" for every other layer, from the first on."""
    window_rotary_base: NotNegative = 0.0
    """rotary_base of layers with a window, which then have no rotary_scaling, as in Gemma 3. 0: as
    in other layers."""
    attention_scale: NotNegative = 0.0
    """Factor of the products of queries and keys. 0: 1 / sqrt(head_dim)."""
    attention_softcap: NotNegative = 0.0
    """Attention scores become cap * tanh(score / cap), as in Gemma 2. 0: no cap."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Normalization layer."""
    norm_eps: NotNegative = 0.0
    """Added to the variance for stability. 0: 1e-5 for layer_norm, 1e-6 for rms_norm."""
    norm_zero_centered: bool = False
    """rms_norm multiplies by 1 + weight, and weights start from 0, as in Gemma."""
    norm_position: Literal["auto", "pre", "post", "output", "sandwich"] = "auto"
    """Place of the norm: before each sublayer (pre), after its residual addition (post), on its
    output before the addition (output, as in OLMo 2), or before it and on its output (sandwich, as
    in Gemma 2). auto: pre-norm for GPT, post-norm for BERT."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input, as in GPT-NeoX. false: the MLP reads the
    output of attention."""
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP. gelu: the tanh approximation. gelu_exact: with the error function,
    as published BERT weights use it. swiglu and geglu: a gate, by SiLU or by gelu's tanh
    approximation, times a second projection."""
    num_experts: Annotated[int, Within(0, 2**16)] = 0
    """Number of experts, small MLPs of which each token visits router_topk, in the layers that
    moe_layers names. Experts have no biases. 0: every layer has one MLP."""
    router_topk: Annotated[int, Within(1, 2**16)] = 2
    """Number of experts that each token visits; no token is dropped."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Score of the experts for a token, from the router's logits in at least fp32. softmax: over all
    experts. sigmoid: of each expert by itself, as in DeepSeek-V3."""
    router_normalize: bool = True
    """Divide the scores of a token's experts by their sum before they multiply the experts'
    outputs."""
    router_scale: Positive = 1.0
    """Factor of the routed experts' outputs."""
    router_balance_loss: NotNegative = 0.01
    """Coefficient of the balance loss in training, which keeps experts equally loaded: computed in
    each sequence (each document, if packed), weighted by its labels, and added for each layer with
    experts. 0: none."""
    router_z_loss: NotNegative = 0.0
    """Coefficient of the z-loss in training, the mean square of the logarithm of the sum of the
    router's exponentiated logits, weighted as router_balance_loss. 0: none."""
    router_bias_rate: NotNegative = 0.0
    """Step by which each update raises or lowers a bias of every expert, which is added to the
    scores when experts are chosen: loss-free balancing, such as 0.001. 0: no biases."""
    expert_ffn_hidden_size: Annotated[int, Within(0, 2**24)] = 0
    """Hidden size of each expert. 0: as ffn_hidden_size."""
    shared_expert_ffn_hidden_size: Annotated[int, Within(0, 2**24)] = 0
    """Hidden size of a shared expert that every token visits besides its own. 0: none."""
    moe_layers: str = "1"
    """Layers with experts: a digit per layer, repeated to num_layers. 1: experts, 0: one MLP, such
    as "01" for every other layer, or a digit for every layer to make only the first ones dense."""
    bias: bool = True
    """Linear layers and layer_norm have a bias."""
    qkv_bias: Literal["auto", "on", "off"] = "auto"
    """The projections to queries, keys and values have a bias. auto: as bias."""
    out_bias: Literal["auto", "on", "off"] = "auto"
    """Attention's output projection has a bias. auto: as bias."""
    embedding_scale: Positive = 1.0
    """Factor of the token embeddings; sqrt(hidden_size) in Gemma."""
    logit_scale: Positive = 1.0
    """Factor of the logits."""
    logit_softcap: NotNegative = 0.0
    """Logits become cap * tanh(logit / cap), after logit_scale, as in Gemma 2. 0: no cap."""
    dropout: Share = 0.0
    """Share of hidden activations that dropout zeroes in training."""
    attention_dropout: Share = 0.0
    """Share of attention weights that dropout zeroes in training."""
    init_std: NotNegative = 0.02
    """Standard deviation of initial weights."""
    label_smoothing: Share = 0.0
    """Label smoothing of the training loss; evaluations use none."""
    logits_chunk: Count = 0
    """Tokens per chunk of logits. Chunks are computed twice, which takes time and saves memory.
    0: all logits at once."""
    sentence_head: Literal["nsp", "sop", "none"] = "sop"
    """BERT only: next-sentence prediction, sentence-order prediction, or neither."""
    lora_rank: Annotated[int, Within(0, 2**16)] = 0
    """Rank of the adapters (LoRA) that are trained instead of the weights, which are frozen. 0:
    no adapters."""
    lora_alpha: Positive = _LORA_ALPHA
    """Scale of the adapters: their product counts lora_alpha / lora_rank times."""
    lora_targets: tuple[str, ...] = _LORA_TARGETS
    """Patterns of the global names of weights that get adapters, such as "*.attention.qkv.weight"
    (as in optim.groups): weights of attention and MLP."""

    def __new__(cls, *values: Any, **settings: Any) -> ModelConfig:
        known = [field.name for field in dataclasses.fields(cls)]
        problems = []
        for name in settings:
            if name not in known:
                near = [
                    one.removeprefix("model.")
                    for one in meant(f"model.{name}", [f"model.{one}" for one in known])
                ]
                rule = (
                    "unknown setting of ModelConfig"
                    if near
                    else f"unknown setting of ModelConfig. Settings: {', '.join(known)}"
                )
                problems.append(
                    Problem(name, settings[name], rule, " or ".join(near), is_guess=True)
                )
        if problems:
            raise ConfigError(*problems)
        return super().__new__(cls)

    @property
    def spec(self) -> str:
        """Empty: `kind` names the model."""
        return ""

    @property
    def cost_model(self) -> ModelConfig:
        return self

    @property
    def text_format(self) -> ModelConfig:
        return self

    @property
    def shown_as(self) -> tuple[str, str]:
        return "model.kind", self.kind

    def as_transformer(self) -> ModelConfig:
        return self

    @property
    def layers_field(self) -> str:  # type: ignore[override]
        """Empty if some layers alone have experts, or if adapters may differ between layers, because
        a pattern may name one of them."""
        names_layers = any(set(pattern) & set("0123456789[?") for pattern in self.lora_targets)
        return "" if self.has_mixed_layers or (self.lora_rank and names_layers) else "num_layers"

    @property
    def lora_adapters(self) -> Adapters | None:  # type: ignore[override]
        if not self.lora_rank:
            return None
        return Adapters(self.lora_rank, self.lora_alpha, self.lora_targets)

    @property
    def may_freeze(self) -> bool:  # type: ignore[override]
        """Whether the model has adapters, beside which everything else is frozen."""
        return self.lora_rank > 0

    @property
    def routed_experts(self) -> RoutedExperts | None:  # type: ignore[override]
        if not self.num_experts:
            return None
        return RoutedExperts(
            self.num_experts,
            self.router_bias_rate,
            has_losses=self.router_balance_loss > 0 or self.router_z_loss > 0,
            blocks=tuple(n + 1 for n in range(self.num_layers) if self.layer_has_experts(n)),
        )

    @property
    def without_adapters(self) -> ModelConfig:
        """The model that is left when adapters are merged into its weights."""
        return dataclasses.replace(
            self, lora_rank=0, lora_alpha=_LORA_ALPHA, lora_targets=_LORA_TARGETS
        )

    @property
    def can_generate(self) -> bool:  # type: ignore[override]
        return self.kind == "gpt"

    @property
    def position_rows(self) -> int:  # type: ignore[override]
        return self.num_positions if self.position == "learned" else 0

    @property
    def tensor_sizes(self) -> dict[str, int]:
        names = ["hidden_size", "num_heads", "kv_heads", "head_size", "vocab_size"]
        if self.num_experts:
            names += ["num_experts", "expert_ffn_size", "shared_expert_ffn_hidden_size"]
        if not self.num_experts or "0" in self.moe_layers:
            names.append("ffn_size")
        return {name: getattr(self, name) for name in names}

    def canonical(self) -> ModelConfig:
        """An equal model whose max_positions is the size of its position table, and which says
        nothing of adapters or experts that it does not have."""
        model = self if self.lora_rank else self.without_adapters
        if not self.num_experts:
            fields = dataclasses.fields(self)
            unused: dict[str, Any] = {f.name: f.default for f in fields if f.name in EXPERT_FIELDS}
            model = dataclasses.replace(model, **unused)
        return dataclasses.replace(model, max_positions=self.position_rows)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Features of an attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotary_features(self) -> int:
        """Features of a head that rotary embeddings rotate."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias == "auto" else self.qkv_bias == "on"

    @property
    def has_out_bias(self) -> bool:
        return self.bias if self.out_bias == "auto" else self.out_bias == "on"

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return self.activation in ("swiglu", "geglu")

    def layer_rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has rotary embeddings."""
        pattern = self.rotary_pattern or "1"
        return self.position == "rotary" and pattern[layer % len(pattern)] == "1"

    def with_length(self, tokens: int) -> ModelSpec:
        return dataclasses.replace(self, seq_length=tokens)

    def layer_window(self, layer: int) -> int:
        """Return the window of a layer, counted from 0; 0: it has none."""
        pattern = self.window_pattern or "1"  # a rule refuses an empty one
        return self.window if pattern[layer % len(pattern)] == "1" else 0

    def layer_has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of one MLP."""
        pattern = self.moe_layers or "1"
        return self.num_experts > 0 and pattern[layer % len(pattern)] == "1"

    @property
    def has_mixed_layers(self) -> bool:
        """Whether some layers have experts, and others do not."""
        return len({self.layer_has_experts(layer) for layer in range(self.num_layers)}) > 1

    @property
    def expert_ffn_size(self) -> int:
        """Hidden size of a routed expert."""
        return self.expert_ffn_hidden_size or self.ffn_size

    def active_ffn_size(self, layer: int) -> int:
        """Return the hidden features that a layer, counted from 0, computes for a token."""
        if not self.layer_has_experts(layer):
            return self.ffn_size
        return self.router_topk * self.expert_ffn_size + self.shared_expert_ffn_hidden_size

    def stored_ffn_size(self, layer: int) -> int:
        """Return the hidden features that a layer, counted from 0, has weights of."""
        if not self.layer_has_experts(layer):
            return self.ffn_size
        return self.num_experts * self.expert_ffn_size + self.shared_expert_ffn_hidden_size

    @property
    def layers_are_alike(self) -> bool:  # type: ignore[override]
        """Whether no layer differs from another by its window, rotary embeddings or experts."""
        features = {
            (self.layer_window(n), self.layer_rotates(n), self.layer_has_experts(n))
            for n in range(self.num_layers)
        }
        return len(features) == 1

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table; of a rotary model what export writes down."""
        return max(self.max_positions, self.seq_length)

    @property
    def post_norm(self) -> bool:
        return self.norm_position == "post" or (
            self.norm_position == "auto" and self.kind == "bert"
        )

    @property
    def norm_epsilon(self) -> float:
        return self.norm_eps or {"layer_norm": 1e-5, "rms_norm": 1e-6}[self.norm]

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def num_blocks(self) -> int:
        """Units that a split into stages can separate: the embedding, each layer, the head."""
        return self.num_layers + 2

    @property
    def losses(self) -> tuple[str, ...]:  # type: ignore[override]  # of the class, where it is always the same
        """The partial losses that the head returns, in order."""
        if self.kind == "gpt":
            return ("lm",)
        return ("mlm",) if self.sentence_head == "none" else ("mlm", self.sentence_head)

    @property
    def context_parallel(self) -> bool:  # type: ignore[override]
        """Whether ranks can share the tokens of a sample: attention must be causal."""
        return self.kind == "gpt"

    @property
    def context_parallel_rule(self) -> str:
        """The rule about sharing the tokens of a sample that the model breaks, in words."""
        if not self.context_parallel:
            return f"requires causal attention; model.kind = {self.kind} has none"
        return ""

    @property
    def max_tp(self) -> int:  # type: ignore[override]
        """Number of attention heads: every tp rank needs one."""
        return self.num_heads

    @property
    def max_tp_rule(self) -> str:
        """The rule about the largest number of tp ranks, in words."""
        return f"model.num_heads = {self.num_heads}"

    @property
    def tokens_per_sample(self) -> int:  # type: ignore[override]
        return self.seq_length

    def activation_shape(self, number: int) -> tuple[int, ...]:
        """Shapes: [s, h] of one sample, after every block but the head."""
        return self.seq_length, self.hidden_size

    def num_targets(self, sample: dict[str, Any]) -> int:
        """Labels that are not -100."""
        return int((sample["labels"] != -100).sum())

    def sample(self, number: int, seed: int, *, padding: bool = True) -> dict[str, Any]:
        """Return a random sample; with `padding` it ends early, at random.

        Shapes: tokens, labels, token_types, padding_mask [s]; sentence_labels [].
        """
        import numpy as np  # here, so that reading a configuration needs none

        random = np.random.default_rng([seed, number])
        s = self.seq_length
        tokens = random.integers(0, self.vocab_size, s + 1)
        length = int(random.integers(max(1, s // 2), s + 1)) if padding else s
        real = np.arange(s) < length
        if self.kind == "gpt":
            return {"tokens": tokens[:-1], "labels": np.where(real, tokens[1:], -100)}
        masked = real & (random.random(s) < 0.15)
        masked[0] = True
        return {
            "tokens": np.where(real, tokens[:-1], 0),
            "labels": np.where(masked, tokens[1:], -100),
            "token_types": (np.arange(s) >= length // 2).astype(np.int64),
            "padding_mask": real,
            "sentence_labels": np.asarray(random.integers(0, 2)),
        }

    def conflicts(self) -> Iterator[Problem]:
        """Settings that do not go together."""
        yield from attention_conflicts(self)
        yield from norm_conflicts(self)
        yield from expert_conflicts(self)
        if self.position == "learned" and 0 < self.max_positions < self.seq_length:
            short = self.kind == "bert" and self.max_positions < 8
            yield Problem(
                "model.seq_length",
                self.seq_length,
                "must be at most model.max_positions = "
                f"{self.max_positions}, the number of rows of the position table",
                f"model.max_positions = {max(self.seq_length, 8)}"
                if short
                else str(self.max_positions),
            )
        if self.lora_rank and not (self.lora_targets and all(self.lora_targets)):
            rule = "must have at least one pattern with model.lora_rank > 0, and no empty one"
            works = '["*.attention.*", "*.mlp.*"]'
            yield Problem("model.lora_targets", list(self.lora_targets), rule, works)
        if self.kind == "bert" and self.seq_length < 8:
            rule = "must be at least 8: a sample holds [CLS], two segments and two [SEP]"
            yield Problem("model.seq_length", self.seq_length, rule, "8")
