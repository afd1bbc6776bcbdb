"""A mixture of experts: a router sends each token to a few of many small MLPs.

    x [T, h]           logits = x W^T [T, E], in at least fp32
    scores [T, E]      softmax or sigmoid of the logits
    experts [T, k]     the k largest scores + biases of each token; of equal ones the first wins
    gates [T, k]       their scores, normalised if asked for, times a scale
    rows [T k, h]      copies of the tokens, sorted by expert; each expert takes its contiguous rows
    y [T, h]           sum over k of gate * output of the expert, plus the shared expert

No expert has a capacity, so no token is dropped, and an expert without tokens multiplies no rows.

Over ep (nn/expert_exchange.py) each rank holds some experts, and rows travel to them and back.
Over tp every expert is split like an MLP. All tp ranks route all tokens alike, because they compute
with equal bits: a decision of one rank is the decision of all. With sequence parallelism a rank
computes the logits of its own rows, and the logits of all rows are gathered.

Loss-free balancing: the bias of an expert that got more tokens of a batch than the mean falls by a
fixed step at the batch's update, the bias of one that got fewer rises. To the training state a bias
is a parameter whose gradient is E * load - sum of loads, with a rule of its own
(Placement.sign_step). So it belongs to a version of the weights, a recomputed forward reads the
bias of the first, loads are summed over micro-batches and replicas as gradients are, a skipped step
leaves it, and checkpoints have it. The gradient is a whole number: exact, in any order of sums, up
to 2^24 in fp32.

Auxiliary losses add gradients and nothing else: they are no part of the loss that is reported, and
an evaluation has none. They are sums over sequences, each with a share that depends on the whole
batch alone, so neither micro-batches nor the grid change them.

Legend: T tokens, E experts, k experts of a token, h hidden.
Sources: top-k routing, arXiv 1701.06538; no capacity: arXiv 2211.15841; sequence-wise balance loss:
DeepSeek-V3, arXiv 2412.19437, section 2.1.2; loss-free balancing: arXiv 2408.15664; z-loss: arXiv
2202.08906; shared expert: arXiv 2401.06066.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from hybridpar.autograd import apply, once_differentiable, recomputed
from hybridpar.comm import (
    all_reduce,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from_,
    scatter_sequence,
)
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.errors import config_error
from hybridpar.grid import EXPERT_AXES, EXPERTS, Axis
from hybridpar.nn.expert_exchange import RowExchange, order_by_round, own_experts, plan_rounds
from hybridpar.nn.grouped import grouped_linear
from hybridpar.nn.linear import Device
from hybridpar.nn.matmul import nothing
from hybridpar.nn.mlp import Activation, ParallelMLP
from hybridpar.nn.placement import Init, ParallelModule, Placement, split_sizes
from hybridpar.nn.recomputable import HiddenStates, recomputable, value_of

Score = Literal["softmax", "sigmoid"]
Watch = Callable[[Tensor, Tensor], None]
Replay = Callable[[], Tensor]
_TINY = 1e-20
"""Added to a sum of scores before it divides them."""


@dataclass(frozen=True)
class RouterOptions:
    """The rules by which a router chooses experts.

    Attributes:
        topk: Number of experts of each token.
        score: Function of the logits.
        normalize: Whether the gates of a token sum to `scale`.
        scale: Factor of the gates.
        balance_loss: Coefficient of the balance loss.
        z_loss: Coefficient of the z-loss.
        bias_rate: Step of the biases in an update. 0: there are no biases.
    """

    topk: int = 2
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0


@dataclass(frozen=True)
class ExpertOptions:
    """The settings of a layer of experts.

    Attributes:
        hidden: Features of a token.
        num_experts: Number of routed experts.
        ffn: Hidden size of each routed expert.
        shared_ffn: Hidden size of the shared expert. 0: there is none.
        router: The rules by which experts are chosen.
        activation: Activation of the experts.
        init_std: Standard deviation of the weights at the start.
        out_init_std: Standard deviation of `down` at the start. None: init_std.
        kernels: Backends of the experts' operators.
        load_bound: Largest load that a rank of ep computes at once and keeps for the backward pass,
            over the balanced one. 0: all rows that come.
    """

    hidden: int
    num_experts: int
    ffn: int
    shared_ffn: int = 0
    router: RouterOptions = RouterOptions()
    activation: Activation = "swiglu"
    init_std: float = 0.02
    out_init_std: float | None = None
    kernels: KernelsConfig = AUTO
    load_bound: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.router.topk <= self.num_experts:
            rule = f"must be from 1 to num_experts = {self.num_experts}"
            raise config_error("router_topk", self.router.topk, rule, str(self.num_experts))


@dataclass(frozen=True)
class SequenceShares:
    """The tokens that auxiliary losses count, and how much each sequence counts.

    Attributes:
        sequence: Number of the sequence that each token belongs to. Shapes: [T], int64.
        counts: Whether a token counts; padding does not. Shapes: [T], bool.
        length: Number of tokens that count, by sequence. Shapes: [sequences].
        share: Share of each sequence in the loss of the whole batch. Shapes: [sequences].
        cp: The ranks that share each sequence, of which this one has T tokens. All have equal
            numbers of sequences, lengths and shares.
    """

    sequence: Tensor
    counts: Tensor
    length: Tensor
    share: Tensor
    cp: Axis = field(default_factory=lambda: Axis("cp"))


@dataclass(frozen=True)
class Routing:
    """Decisions about some tokens.

    Attributes:
        experts: Experts of each token, from the largest score on. Shapes: [T, k], int64.
        gates: Factors of their outputs. Shapes: [T, k].
    """

    experts: Tensor
    gates: Tensor


class Router(ParallelModule):
    """Logits of the experts for each token; every tp rank holds the unsharded weight.

    Shapes: [.., h] -> [.., E] in fp32, or in fp64 for fp64 inputs.
    Collectives: with `sizes` (this rank's rows of each sample) one all-gather forward.
    """

    weight: Tensor

    def __init__(
        self,
        axis: Axis,
        experts: ExpertOptions,
        *,
        sequence: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis, sequence)
        self.add_parameter(
            "weight",
            Placement((experts.num_experts, experts.hidden), Init("normal", experts.init_std)),
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        logits: Tensor = apply(_Logits, x, self.weight)
        return logits if sizes is None else gather_from(logits, self.axis, 1, sizes)


class MixtureOfExperts(ParallelModule):
    """Routed experts, and optionally a shared expert that every token visits; none has biases.

    Args:
        axis: The tp axis, over which every expert is split.
        experts: Number and sizes of the experts, and the rules by which they are chosen.
        ep: The ep axis, whose ranks share the experts and have tokens of their own. None: this rank
            has all experts.
        sequence: Whether calls have `sizes`.

    Shapes: [b, s, h] -> the same, replicated over tp; with `sizes` this rank's rows of either.
    Collectives: forward one all-reduce of the output, backward one of the gradient of the input and
    one of the gates'. With `sizes` all-gathers and reduce-scatters replace the all-reduces of input
    and output, and the logits are gathered. Over ep an all-to-all of loads (an all-gather with a
    bound), and two of rows forward and backward; a round beyond a bound has all three, and in the
    backward pass one more. Over cp, with a balance loss, one all-reduce of the sequences' loads.
    """

    bias: Tensor | None

    def __init__(
        self,
        axis: Axis,
        experts: ExpertOptions,
        *,
        ep: Axis | None = None,
        sequence: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis)  # every rank counts the loads of all rows, also with `sizes`
        self.num_experts = experts.num_experts
        self.options = experts.router
        self.ep = Axis(EXPERTS) if ep is None else ep
        self.load_bound = experts.load_bound
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = Router(axis, experts, sequence=sequence, **factory)

        def expert(size: int) -> ParallelMLP:
            return ParallelMLP(
                experts.hidden,
                size,
                axis,
                activation=experts.activation,
                bias=False,
                init_std=experts.init_std,
                out_init_std=experts.out_init_std,
                kernels=experts.kernels,
                **factory,
            )

        self.experts = nn.ModuleList()
        for number in own_experts(experts.num_experts, self.ep):
            one = expert(experts.ffn)
            if self.ep.size > 1:
                _set_apart(one)
            self.experts.add_module(str(number), one)  # names are global
        self.shared = expert(experts.shared_ffn) if experts.shared_ffn else None
        self._watch: Watch | None = None
        self._replay: Replay | None = None
        self._loads: Tensor | None = None
        self.register_parameter("bias", None)
        if experts.router.bias_rate:
            placement = Placement(
                (experts.num_experts,),
                Init("zeros"),
                weight_decay=0.0,
                sign_step=experts.router.bias_rate,
            )
            self.add_parameter("bias", placement, **factory)

    def watch_choices(self, watch: Watch) -> None:
        """Have `watch` called in every backward pass, from now on, with the experts of the tokens
        [T, k], and with the margins by which they were chosen [T]."""
        self._watch = watch

    def replay_choices(self, replay: Replay) -> None:
        """Visit the experts that `replay` returns in every forward pass, from now on, instead of the
        ones that the router chooses. Shapes: [T, k]."""
        self._replay = replay

    def add_load(self, load: Tensor) -> None:
        """Add a micro-batch's load to what `take_loads` returns. Shapes: [E]."""
        self._loads = load if self._loads is None else self._loads + load

    def take_loads(self) -> Tensor | None:
        """Return how many tokens that count each expert got in the backward passes since the last
        call, on this rank; None if there were none. Shapes: [E]."""
        taken = self._loads
        self._loads = None
        return taken

    def recompute(self) -> None:
        """Compute the inputs of every `down` again in the backward pass from now on, instead of
        keeping them."""
        for expert, _ in self.parts(0):
            expert.recompute()

    def parts(self, tokens: int) -> list[tuple[ParallelMLP, int]]:
        """Return the experts of this rank, with the number of tokens that each gets at balanced
        load, if all ranks of ep have as many tokens."""
        rows = split_sizes(tokens * self.options.topk, self.num_experts)
        own = [self.ep.size * rows[expert] for expert in own_experts(self.num_experts, self.ep)]
        found: list[Any] = list(zip(self.experts, own, strict=True))
        return found if self.shared is None else [*found, (self.shared, tokens)]

    def forward(
        self,
        x: HiddenStates,
        sizes: Sequence[int] | None = None,
        shares: SequenceShares | None = None,
    ) -> Tensor:
        """Return the output of the experts.

        Args:
            x: Input.
            sizes: Rows of every tp rank, if x is this rank's part of the sequence.
            shares: The tokens that count for auxiliary losses and biases. None: none do, as in
                evaluations.
        """
        x = value_of(x)
        logits = self.router(x, sizes).flatten(0, -2)
        scores = score(logits, self.options.score)
        if self._replay is None:
            routing = choose(scores, self.options, self.bias)
        else:
            routing = weigh(scores, self._replay(), self.options)
        if self._watch is not None and torch.is_grad_enabled():
            margins = margins_of(_wanted(scores, self.bias), self.options.topk)
            gates = _Watched.apply(routing.gates, routing.experts, margins, self._watch)
            routing = Routing(routing.experts, gates)
        if shares is not None and torch.is_grad_enabled():
            load = counted_loads(routing.experts, shares, self.num_experts, logits.dtype)
            gates = _CountLoads.apply(routing.gates, self.bias, load, self)
            routing = Routing(routing.experts, gates)
        # from here on each rank computes a summand of the output, from its features of the experts
        everything = (
            copy_to(x, self.axis) if sizes is None else gather_sequence(x, self.axis, sizes)
        )
        tokens = everything.flatten(0, -2)
        y = self._summand(tokens, Routing(routing.experts, copy_to(routing.gates, self.axis)))
        if sizes is None:
            y = reduce_from_(y, self.axis).view(x.shape)
        else:
            y = scatter_sequence(y.view(everything.shape), self.axis, sizes)
        has_losses = self.options.balance_loss > 0 or self.options.z_loss > 0
        if shares is None or not has_losses or not torch.is_grad_enabled():
            return y
        loss = auxiliary_loss(logits, scores, routing.experts, shares, self.options)
        return _AddLoss.apply(y, loss)

    def _summand(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return this rank's summand of the output of all experts. Shapes: [T, h] -> the same."""
        order = torch.argsort(routing.experts.flatten(), stable=True)
        counts = loads(routing.experts, self.num_experts)
        rounds = None
        if self.ep.size > 1:
            rounds = plan_rounds(counts, self.ep, tokens, self.load_bound)
            if len(rounds) > 1:
                order = order[order_by_round(rounds, self.ep.rank).to(order.device)]
        place = torch.argsort(order)  # place of each (token, k) among the sorted rows
        rows = apply(_Dispatch, tokens, order, place, self.options.topk)
        shared = None
        if rounds is None:
            outputs = self._run_experts(rows, counts)
        else:
            outputs, shared = self._exchange(rows, rounds, tokens)
        y: Tensor = apply(_Combine, outputs, routing.gates, order, place)
        if self.shared is not None and shared is None:
            shared = self.shared.partial_sum(self.shared.inner(tokens))
        return y if shared is None else y + shared

    def _exchange(
        self, rows: Tensor, rounds: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the experts of all ranks for this rank's rows, and the shared
        expert's summand for its tokens, computed while the rows of the first round move.

        The backward pass runs further rounds again.
        """
        first, *others = (RowExchange.of(one, self.ep, rows.device) for one in rounds)
        if not others:
            return self._move_and_run(rows, first, tokens)
        parts = rows.split([sum(exchange.sent) for exchange in (first, *others)])
        outputs, shared = self._move_and_run(parts[0], first, tokens)
        more = [
            recomputed(self._further_round, part, exchange)
            for part, exchange in zip(parts[1:], others, strict=True)
        ]
        return torch.cat([outputs, *more]), shared

    def _further_round(self, rows: Tensor, exchange: RowExchange) -> Tensor:
        return self._move_and_run(rows, exchange)[0]

    def _move_and_run(
        self, rows: Tensor, exchange: RowExchange, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of a round's rows, and for `tokens` the shared expert's summand."""
        there = exchange.to_experts()
        back = exchange.from_experts()
        inner = summand = None
        ticket = there.start(rows)
        if self.shared is not None and tokens is not None:
            inner = self.shared.inner(tokens)
        outputs = self._run_experts(there.arrive(ticket), exchange.loads)
        ticket = back.start(outputs)
        if self.shared is not None and inner is not None:
            summand = self.shared.partial_sum(inner)
        return back.arrive(ticket), summand

    def _run_experts(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of this rank's experts for rows that are sorted by expert, of which
        each gets as many as `counts` says."""
        experts: list[Any] = list(self.experts)
        u = grouped_linear(rows, counts, [expert.up for expert in experts])
        activate = partial(experts[0].activation, u, None)
        y = recomputable(activate(), activate) if experts[0].recomputes else activate()
        return grouped_linear(y, counts, [expert.down for expert in experts])


def _set_apart(module: nn.Module) -> None:
    """Place all parameters of a module on this rank of ep alone."""
    for part in module.modules():
        if isinstance(part, ParallelModule):
            part.placements = {
                name: replace(placement, apart=EXPERT_AXES)
                for name, placement in part.placements.items()
            }


def score(logits: Tensor, kind: Score) -> Tensor:
    """Return the scores of the experts. Shapes: [T, E] -> the same."""
    return torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1)


def choose(scores: Tensor, options: RouterOptions, bias: Tensor | None = None) -> Routing:
    """Return the experts with the largest scores + biases, and their gates, which biases do not
    change. Shapes: scores [T, E], bias [E] -> [T, k].

    A stable sort decides between equal scores, so that every rank and every recomputation agrees.
    """
    ranking = torch.sort(_wanted(scores, bias), dim=-1, descending=True, stable=True).indices
    return weigh(scores, ranking[:, : options.topk].contiguous(), options)


def weigh(scores: Tensor, experts: Tensor, options: RouterOptions) -> Routing:
    """Return the gates of these experts. Shapes: scores [T, E], experts [T, k] -> [T, k]."""
    gates = scores.gather(1, experts)
    if options.normalize:
        gates = gates / (gates.sum(-1, keepdim=True) + _TINY)
    return Routing(experts, gates if options.scale == 1 else gates * options.scale)


def margins_of(wanted: Tensor, topk: int) -> Tensor:
    """Return by how much the score of each token's last expert exceeds the next one; infinite if
    there is no other. Shapes: [T, E] -> [T]."""
    if topk == wanted.shape[1]:
        return torch.full_like(wanted[:, 0], torch.inf)
    ranked = wanted.sort(dim=-1, descending=True).values
    return ranked[:, topk - 1] - ranked[:, topk]


def _wanted(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Return the numbers by which experts are chosen. Shapes: scores [T, E], bias [E] -> [T, E]."""
    if bias is None:
        return scores.detach()
    return scores.detach() + bias.detach().to(scores.dtype)


def loads(experts: Tensor, num_experts: int) -> list[int]:
    """Return how many rows each expert gets. Shapes: [T, k] -> E numbers, whose sum is T k.

    Tensors without values (meta, or the ghosts that memory is predicted with) count as balanced.
    """
    if experts.is_meta or not getattr(experts, "has_values", True):
        return list(split_sizes(experts.numel(), num_experts))
    counted: list[int] = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    return counted


def counted_loads(
    experts: Tensor, shares: SequenceShares, num_experts: int, dtype: torch.dtype
) -> Tensor:
    """Return how many tokens that count each expert gets. Shapes: [T, k] -> [E]."""
    counts = shares.counts.to(dtype).repeat_interleave(experts.shape[1])
    none = torch.zeros(num_experts, dtype=dtype, device=experts.device)
    return none.index_add(0, experts.flatten(), counts)


def auxiliary_loss(
    logits: Tensor,
    scores: Tensor,
    experts: Tensor,
    shares: SequenceShares,
    options: RouterOptions,
) -> Tensor:
    """Return the weighted balance loss and z-loss of a micro-batch, as its part of the batch's.

    A sequence of T tokens that count has the balance loss E / (k T) sum_e n_e P_e, where n_e of its
    tokens have expert e, and P_e is the mean of the tokens' scores of it, normalised to sum to 1.
    It is 1 if all experts are chosen equally often. The z-loss is the mean of logsumexp(logits)^2.

    Shapes: logits, scores [T, E], experts [T, k] -> 0-d: the summands of these tokens.
    Collectives: with a balance loss an all-reduce of the sequences' loads over cp.
    """
    sequence = shares.sequence
    counts = shares.counts.to(scores.dtype)
    length = shares.length.to(scores.dtype).clamp(min=1)[sequence]
    weight = shares.share.to(scores.dtype)[sequence] * counts / length
    loss = scores.new_zeros(())
    if options.balance_loss:
        chosen = torch.zeros_like(scores).scatter_(1, experts, 1.0) * counts[:, None]
        load = scores.new_zeros(len(shares.length), scores.shape[1])
        load = all_reduce(load.index_add(0, sequence, chosen.detach()), shares.cp)[sequence]
        share = scores
        if options.score == "sigmoid":
            share = scores / (scores.sum(-1, keepdim=True) + _TINY)
        factor = options.balance_loss * scores.shape[1] / options.topk
        loss = loss + (share * load * (factor * weight / length)[:, None]).sum()
    if options.z_loss:
        loss = loss + options.z_loss * (torch.logsumexp(logits, -1).square() * weight).sum()
    return loss


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Logits(Function):
    """x W^T in at least fp32; keeps x in its own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        dtype = _accumulation_dtype(x)
        return nn.functional.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.flatten(0, -2).to(grad.dtype)
            dw = (grad.flatten(0, -2).t() @ rows).to(weight.dtype)
        return dx, dw


class Overload(NamedTuple):
    """A part of the gradient of biases. Shapes: [E]."""

    overload: Tensor

    def add_to(self, gradient: Tensor, overwrite: bool) -> None:
        """See `GradientPart`."""
        gradient.copy_(self.overload) if overwrite else gradient.add_(self.overload)


class _CountLoads(Function):
    """Returns the gates; the backward, which runs once also where forwards are computed again,
    reports the load and gives biases their loads as a gradient."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, bias: Tensor | None, load: Tensor, layer: MixtureOfExperts
    ) -> Tensor:
        ctx.save_for_backward(load)
        ctx.leaf = bias
        ctx.consumer = layer.binding("bias").consumer
        ctx.add_load = layer.add_load
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (load,) = ctx.saved_tensors
        ctx.add_load(load)
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        overload = len(load) * load - load.sum()
        if ctx.consumer is None:
            return grad, overload.to(ctx.leaf.dtype), None, None
        ctx.consumer.add(Overload(overload))
        return grad, nothing(ctx.leaf), None, None


class _Watched(Function):
    """Returns the gates; the backward, which runs once also where forwards are computed again,
    reports the choices."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, experts: Tensor, margins: Tensor, watch: Watch) -> Tensor:
        ctx.save_for_backward(experts, margins)
        ctx.watch = watch
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.watch(*ctx.saved_tensors)
        return grad, None, None, None


class _Dispatch(Function):
    """Copies tokens to the rows of their experts. The backward sums the k rows of a token in one
    order, which an index_add on a GPU would not.

    Shapes: x [T, h], order and place [T k] -> [T k, h].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        rows = grad.index_select(0, place).view(-1, ctx.k, grad.shape[1])
        return rows.sum(1), None, None, None


class _Combine(Function):
    """Sums the outputs of each token's experts, times their gates, in the type of the gates.

    Shapes: rows [T k, h], gates [T, k], order and place [T k] -> [T, h].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates, order, place)
        return _gated(rows, gates, place).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, order, place = ctx.saved_tensors
        k = gates.shape[1]
        d_rows = d_gates = None
        if ctx.needs_input_grad[0]:
            factors = gates.flatten().index_select(0, order)[:, None]
            d_rows = grad.index_select(0, order // k)
            d_rows = d_rows.mul_(factors) if d_rows.dtype == gates.dtype else d_rows * factors
            d_rows = d_rows.to(rows.dtype)
        if ctx.needs_input_grad[1]:
            grad = grad.to(gates.dtype)
            products = [(_outputs(rows, place, k, i) * grad).sum(-1) for i in range(k)]
            d_gates = torch.stack(products, 1)
        return d_rows, d_gates, None, None


def _gated(rows: Tensor, gates: Tensor, place: Tensor) -> Tensor:
    """Return the sum of a token's outputs times their gates, from its first expert on."""
    k = gates.shape[1]
    y = _outputs(rows, place, k, 0) * gates[:, :1]
    for i in range(1, k):
        y.addcmul_(_outputs(rows, place, k, i), gates[:, i : i + 1])
    return y


def _outputs(rows: Tensor, place: Tensor, k: int, i: int) -> Tensor:
    """Return the outputs of each token's expert number i. Shapes: rows [T k, h] -> [T, h]."""
    return rows.index_select(0, place[i::k])


class _AddLoss(Function):
    """Returns y; the backward also starts from `loss`, as if it were added to the training loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad.new_ones((), dtype=ctx.dtype)
