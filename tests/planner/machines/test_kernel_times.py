"""Estimated times of kernels by their shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import ModelConfig
from hybridpar.errors import ConfigError
from hybridpar.models.cost import forward_flops_per_token, layer_matmul_parameters
from hybridpar.planner.machines.hardware import DEVICES
from hybridpar.planner.machines.kernel_times import (
    HALF,
    MEGATRON_2020,
    OURS,
    PLAIN_TORCH,
    Product,
    activation_bytes,
    block_times,
    convolution_products,
    kernels_for,
    product_time,
    work_time,
)
from hybridpar.prediction.work import Op

MODEL = ModelConfig(num_layers=6, hidden_size=1024, num_heads=16, seq_length=512, vocab_size=32000)
V100 = DEVICES["v100-16gb"]
H200 = DEVICES["h200-141gb"]


def rate(device, *sizes):
    product = Product(*sizes)
    return 2 * product.m * product.n * product.k * product.copies / product_time(device, product)


def test_an_endless_product_has_the_rate_of_the_table() -> None:
    for device in DEVICES.values():
        most = device.peak_flops * device.matmul_share
        assert 0.97 * most < rate(device, 32768, 32768, 16384) <= most


def test_waves_that_are_not_full_and_a_short_k_cost_their_part() -> None:
    """80 multiprocessors, tiles of 256 x 128 along one row of blocks: the 81st has a wave of its
    own."""
    one, more = (product_time(V100, Product(256 * tiles, 128, 4096)) for tiles in (80, 81))
    assert 1.1 < more / one <= 2  # smaller tiles, which are slower, fill their last wave better
    assert rate(V100, 8192, 8192, 64) < 0.55 * rate(V100, 8192, 8192, 8192)
    assert rate(V100, 8, 8192, 8192) < 0.1 * rate(V100, 8192, 8192, 8192)


def test_a_product_takes_its_traffic_at_least() -> None:
    product = Product(16, 1024, 1024)
    quick = replace(V100, peak_flops=1e30)
    num_bytes = HALF * (1024 * (16 + 1024) + 16 * 1024)
    assert product_time(quick, product) == pytest.approx(num_bytes / (900e9 * 0.8))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_more_of_anything_takes_no_less(m: int, n: int, k: int) -> None:
    one = product_time(H200, Product(m, n, k))
    for more in (Product(m + 128, n, k), Product(m, n + 128, k), Product(m, n, k, 2)):
        assert one <= product_time(H200, more) * (1 + 1e-12)
    assert 2 * m * n * k / one <= H200.peak_flops * H200.matmul_share


def test_gradients_are_two_products_of_as_many_operations() -> None:
    product = Product(3, 5, 7, 2)
    for one in product.backward:
        assert one.m * one.n * one.k == 3 * 5 * 7
        assert one.copies == 2


@pytest.mark.parametrize("kernels", [OURS, MEGATRON_2020])
def test_blocks_take_their_operations_at_least(kernels) -> None:
    for flops, time in zip(
        forward_flops_per_token(MODEL), block_times(MODEL, 4, V100, 1, kernels), strict=True
    ):
        causal = 4 * 512 * (flops - 2 * 512 * 1024 * (0 < flops < 3e7)) / 125e12
        assert time.forward >= causal
        assert time.backward >= 2 * causal


def test_scores_that_are_never_written_take_no_time() -> None:
    """Eight times the sequence and an eighth of the samples: as many tokens, so only attention
    takes longer."""
    longer = replace(MODEL, seq_length=4096)
    at_once = replace(H200, launch=0.0)
    written, fused = (
        block_times(longer, 1, at_once, 1, kernels)[1].forward
        - block_times(replace(MODEL, seq_length=512), 8, at_once, 1, kernels)[1].forward
        for kernels in (MEGATRON_2020, OURS)
    )
    assert fused < 0.3 * written


def test_attention_in_windows_takes_the_time_of_what_they_show() -> None:
    """A long sequence, so that attention is most of a layer; an endless window changes no bit."""
    plain = replace(MODEL, seq_length=32768)
    shown = {
        name: block_times(replace(plain, **changed), 1, H200)
        for name, changed in {
            "none": {},
            "all": {"window": 32768},
            "alternating": {"window": 1024, "window_pattern": "10"},
            "every": {"window": 1024},
        }.items()
    }
    assert shown["all"] == shown["none"]
    none, every = (shown[n][1] for n in ("none", "every"))
    assert set(shown["alternating"][1:-1:2]) == {every}
    assert set(shown["alternating"][2:-1:2]) == {none}
    pairs = 1 - (1 - 1024 / 32768) ** 2  # of all
    for direction in ("forward", "backward"):
        of_none, of_every = (getattr(time, direction) for time in (none, every))
        most = of_none - of_every
        assert most > 0.5 * of_none
    heads = 1024
    flops = 2 * 32768**2 * heads * (1 - pairs)
    rate = H200.peak_flops * H200.attention_share
    assert none.forward - every.forward > flops / rate


def test_kernels_that_add_gradients_cost_most_with_small_micro_batches() -> None:
    """Half of the micro-batch, twice: gradients are added once more, in fp16, unless the product
    does it itself."""
    saved = {
        kernels: 2 * block_times(MODEL, 16, V100, 1, kernels)[1].backward
        - block_times(MODEL, 32, V100, 1, kernels)[1].backward
        for kernels in (MEGATRON_2020, OURS)
    }
    adding = V100.memory_time(3 * HALF * layer_matmul_parameters(MODEL))
    assert adding < saved[MEGATRON_2020] - saved[OURS] < 1.2 * adding


def test_a_small_layer_waits_for_its_launches() -> None:
    small = replace(MODEL, hidden_size=64, num_heads=4, seq_length=16)
    layer = block_times(small, 1, H200)[1]
    assert layer[:2] == (pytest.approx(16 * H200.launch), pytest.approx(36 * H200.launch))
    assert 16 * 1e-6 < layer.forward - layer.forward_idle < layer.forward / 2, (
        "the kernels' own time, and their gaps"
    )
    assert not block_times(MODEL, 64, H200)[1].forward_idle


def test_each_expert_is_launched() -> None:
    small = replace(MODEL, hidden_size=64, num_heads=4, seq_length=16, dropout=0.0)
    experts = replace(small, num_experts=8, expert_ffn_hidden_size=64, router_topk=2)
    dense, sparse = (block_times(model, 1, H200)[1] for model in (small, experts))
    more = 1 + 2 * 8 - 2  # the router, and two products of each expert in the place of two
    assert sparse.forward - dense.forward == pytest.approx(more * H200.launch)
    assert sparse.backward - dense.backward == pytest.approx(2 * more * H200.launch)


def test_launches_of_a_measured_step() -> None:
    """GPT 345M on an H200 took 76.3 ms without CUDA graphs, and its kernels 41
    (benchmarks/results: gpu_single_before.json, gpu_single.json)."""
    model = replace(MODEL, num_layers=24, seq_length=1024, vocab_size=50304)
    blocks = block_times(model, 8, H200)
    step = sum(block.forward + block.backward for block in blocks)
    idle = sum(block.forward_idle + block.backward_idle for block in blocks)
    update = H200.memory_time(32 * 355e6)
    assert step + update == pytest.approx(0.0763, rel=0.1)
    assert step - idle + update == pytest.approx(0.041, rel=0.1)


def test_cards_without_our_kernels_run_plain_torch() -> None:
    assert kernels_for(V100) is PLAIN_TORCH
    assert kernels_for(H200) is kernels_for(DEVICES["a100-40gb"]) is OURS


@given(st.integers(1, 64), st.sampled_from([2, 4, 8]))
def test_tensor_parallelism_speeds_up_by_no_more_than_its_size(b: int, tp: int) -> None:
    whole = block_times(MODEL, b, V100)[1]
    part = block_times(MODEL, b, V100, tp)[1]
    for one, other in zip(whole[:2], part[:2], strict=True):  # the rest is waiting
        assert 0.95 * one / tp <= other <= 1.05 * one


def test_messages_and_degrees() -> None:
    assert activation_bytes(MODEL, 8) == 2 * 8 * 512 * 1024
    with pytest.raises(ConfigError, match=r"parallel.tp = 0: must be at least 1"):
        block_times(MODEL, 1, V100, 0)


def test_a_convolution_is_a_product_of_windows_and_weights() -> None:
    """8 images of 32 x 32 pixels, 6 channels to 10 by windows of 3 x 5, in two groups."""
    pixels, window = 8 * 32 * 32, 3 * 3 * 5
    flops = 2 * pixels * 10 * window
    there = Op("aten::convolution", ((8, 6, 32, 32), (10, 3, 3, 5)), 0, flops)
    back = ((8, 10, 32, 32), (8, 6, 32, 32), (10, 3, 3, 5))
    forward = Product(pixels, 5, window, 2)
    of_input, of_weights = forward.backward
    assert convolution_products(there) == (forward,)
    both = Op("aten::convolution_backward", back, 0, 2 * flops)
    assert convolution_products(both) == (of_weights, of_input)
    first = Op("aten::convolution_backward", back, 0, flops)
    assert convolution_products(first) == (of_weights,)


def test_thin_convolutions_reach_little_of_the_peak() -> None:
    """Equal work: 1024 channels, and 16 on 4096 times the pixels."""
    device = replace(H200, launch=0.0)

    def time(channels: int, side: int) -> float:
        flops = 2 * side * side * channels * channels * 9
        shapes = ((1, channels, side, side), (channels, channels, 3, 3))
        return work_time([Op("aten::convolution", shapes, 0, flops)], device)[0]

    assert time(16, 64 * 64) > 4 * time(1024, 64)
