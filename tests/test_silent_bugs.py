"""Silent numerical bugs that were found in frameworks like this one, each as a configuration that
would show it here.

The oracle is one process in float64 (hybridpar.verify), so a loss, gradient, norm or weight that is
off by a factor, a replica or a shard fails. Issue numbers are those of NVIDIA/Megatron-LM unless
said otherwise. Elsewhere: ranks of cp whose labels are all ignored (#1764), verify/test_context; sums
of the losses of packed documents (functionary #265), verify/test_packing; loads that count twice
where forwards run again, verify/test_ep. Not applicable here: multi-token prediction, LLaVA.
"""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.config import from_mapping
from hybridpar.grid import Axis
from hybridpar.job.stage_split import stage_split
from hybridpar.models.build import build_blocks
from hybridpar.verify.run import verify

EXPERTS = {"num_experts": 4, "router_balance_loss": 0.3, "router_bias_rate": 0.01}
CLIPPED = {"optim": {"clip_grad": 0.01}}
BUGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    # 7452 (1): label smoothing over a split vocabulary: another loss on every rank, wrong gradients
    "label smoothing with tp": ({"tp": 3}, {"model": {"label_smoothing": 0.1}}),
    "label smoothing in chunks": (
        {"tp": 2, "pp": 2},
        {"model": {"label_smoothing": 0.1, "logits_chunk": 5}},
    ),
    # 7452 (3): a mean of means where replicas count different numbers of labels
    "unequal valid tokens over dp": (
        {"tp": 2, "dp": 3},
        {"model": {"kind": "bert"}, "train": {"micro_batch_size": 1}},
    ),
    "unequal valid tokens over micro-batches": (
        {"pp": 2},
        {"model": {"kind": "bert"}, "train": {"micro_batch_size": 1}},
    ),
    # 7452 (8): a parameter split by heads that is left out of the clipping norm; TransformerEngine
    # #715: one that is counted tp times. Here keys and values are held by several ranks, norms by
    # all; clipping makes the norm matter
    "grad norm counts everything once": (
        {"tp": 4},
        {"model": {"num_kv_heads": 2}, "optim": {"clip_grad": 0.01}},
    ),
    # 1736, 1754: padding of the vocabulary takes part in the softmax, so the loss depends on tp
    "odd vocabulary": ({"tp": 4}, {"model": {"vocab_size": 53}}),
    # torchtitan #1409: a tied embedding whose two copies drift apart across stages
    "tied embeddings over stages": ({"pp": 3, "dp": 2}, {"optim": {"clip_grad": 0.01}}),
    # msr-fiddle/pipedream #64: clipping, loss scale and tied gradients switched off without a word
    # under 2bw
    "2bw keeps clipping and ties": (
        {"pp": 2, "dp": 2},
        {"pipeline": {"schedule": "2bw"}, "optim": {"clip_grad": 0.01}},
    ),
    # 1256: dropout not in the right random context: masks that differ between ranks, or repeat
    "dropout masks with tp": (
        {"tp": 2, "dp": 2},
        {"model": {"dropout": 0.3, "attention_dropout": 0.3}},
    ),
    # 1446: gradients of norms that are not summed over ranks with their own rows
    "norms with sequence parallelism": (
        {"tp": 3},
        {"model": {"num_heads": 3, "hidden_size": 33}, "parallel": {"sequence": True}, **CLIPPED},
    ),
    # 673, 906: a loss, and so gradients, that are cp times too small or too large
    "loss scale with cp": ({"cp": 2, "dp": 2}, CLIPPED),
    # 1464, diffusers #14265: a ring's backward with the probabilities of a rank's keys alone
    "backward of a ring": ({"cp": 3}, {"parallel": {"cp_comm": "ring"}}),
    # prime-rl #2681: a ring without the softmax's scale
    "softmax scale of a ring": (
        {"cp": 2},
        {"model": {"attention_scale": 0.7}, "parallel": {"cp_comm": "ring"}},
    ),
    # EasyContext #47: tokens that the ranks of cp do not divide
    "tokens that do not divide over cp": ({"cp": 4}, {"model": {"seq_length": 13}}),
    # trl #6843, 5243: the mask of packed documents, and rotary positions, lost under cp
    "packed documents with cp": (
        {"cp": 2, "dp": 2},
        {"model": {"position": "rotary"}, "data": {"packing": "stream"}},
    ),
    # 5635: NaN from packed documents with tp and several samples in a micro-batch
    "packed documents with tp": ({"tp": 2}, {"data": {"packing": "stream"}}),
    # torchtitan #3777: boundaries of documents that do not go through the pipeline
    "packed documents through stages": (
        {"pp": 2},
        {"data": {"packing": "stream"}, "pipeline": {"recompute": "all"}},
    ),
    # 5916: experts that are left out of the clipping norm
    "grad norm counts experts": (
        {"tp": 2, "dp": 2},
        {"model": EXPERTS, "optim": {"clip_grad": 0.01}},
    ),
    # pytorch #160285, DeepSpeed #5259: gradients of experts that are ep times too large, or too small
    "gradients of experts with ep": (
        {"dp": 4, "ep": 2},
        {"model": EXPERTS, "optim": {"clip_grad": 0.01}},
    ),
    # 5047: a balance loss that grows with tp; torchtitan #4154: biases that differ between tp
    # ranks; torchtitan #4054: gradients of the router that are not summed over them
    "balance of experts with tp": (
        {"tp": 4},
        {"model": EXPERTS, "parallel": {"sequence": True}},
    ),
    # the same sums over ranks that share a sequence, and that share its experts
    "balance of experts with cp": ({"cp": 2, "ep": 2}, {"model": EXPERTS}),
    # NeMo Automodel #3359, torchtitan #3000: a balance loss that depends on micro-batches or stages
    "balance of experts over micro-batches and stages": (
        {"pp": 2, "dp": 2},
        {"model": EXPERTS, "train": {"micro_batch_size": 1}, "pipeline": {"num_microbatches": 3}},
    ),
    # torchtitan #4148, 6114: padding that counts as load. BERT's samples end early
    "padding is no load": ({"dp": 2}, {"model": EXPERTS | {"kind": "bert"}}),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize("name", BUGS)
def test_bug(name: str) -> None:
    grid, changes = BUGS[name]
    base = from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 4,
                "seq_length": 12,
                "vocab_size": 61,
            },
            "train": {"micro_batch_size": 2, "num_steps": 5},
            "optim": {"lr": 1e-2},
        }
    )
    report = verify(from_mapping(changes, base), grid, 3)
    assert report.ok, report.first_divergence


def test_no_layer_is_lost_when_stages_do_not_divide_them() -> None:
    """1304: 30 layers over 4 stages silently became 28."""
    config = from_mapping(
        {"model": {"num_layers": 30, "hidden_size": 32, "num_heads": 4}, "parallel": {"pp": 4}}
    )
    built = [
        number
        for blocks in stage_split(config)
        for number in build_blocks(config.model, Axis("tp"), blocks)
    ]
    assert built == list(range(32))
