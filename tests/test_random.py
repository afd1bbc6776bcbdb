import hashlib
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpar import native, random
from hybridpar.errors import ConfigError
from hybridpar.random import CounterBlock

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
MASK = 0xFFFFFFFF

# Random123's kat_vectors for philox 4x32 with 10 rounds: counter, key, output.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter, key):
    """Ten rounds in Python's unbounded integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a = 0xD2511F53 * c[0]
        b = 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b & MASK, a >> 32 ^ c[3] ^ k1, a & MASK]
        k0 = k0 + 0x9E3779B9 & MASK
        k1 = k1 + 0xBB67AE85 & MASK
    return c


@pytest.mark.parametrize(("counter", "key", "out"), KNOWN)
def test_known_answers(counter, key, out):
    got = random.philox(tuple(torch.tensor(word) for word in words(counter)), tuple(words(key)))
    assert [int(word) for word in got] == words(out) == philox_by_hand(words(counter), words(key))


def draw_reference(seed, site, step, sample, block):
    return random.bits_reference(random.philox_key(seed, site), step, sample, block)


@pytest.mark.parametrize("draw", [random.random_bits, draw_reference])
def test_every_part_of_the_counter_counts(draw):
    seed = 2**63 + 12345
    site = 0xCAFEBABE
    step = 2**32 - 1
    sample = 2**32 - 3
    start = 2**36 - 2
    stride = 2**33 + 3
    block = CounterBlock(rows=2, cols=5, stride=stride, start=start, num_samples=3)
    bits = draw(seed, site, step, sample, block)
    for i, r, c in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(5)).tolist():
        index = start + r * stride + c
        counter = (index // 4 & MASK, index // 4 >> 32, step, sample + i)
        out = philox_by_hand(counter, (seed & MASK, site ^ seed >> 32))
        assert int(bits[i, r, c]) & MASK == out[index % 4], (i, r, c)


@given(
    num_samples=st.integers(0, 4),
    rows=st.integers(0, 5),
    cols=st.integers(0, 70),
    gap=st.integers(0, 9),
    start=st.integers(0, 2**40),
    first=st.integers(0, 3),
)
def test_a_part_is_a_slice_of_the_whole(num_samples, rows, cols, gap, start, first):
    stride = cols + gap
    whole = random.random_bits(
        1,
        2,
        3,
        40,
        CounterBlock(1, rows * stride + gap, 0, start, num_samples=1 + first + num_samples),
    )
    part = random.random_bits(
        1,
        2,
        3,
        40 + first,
        CounterBlock(rows, cols, stride, start + gap, num_samples),
    )
    assert part.dtype == torch.int32
    assert part.shape == (num_samples, rows, cols)
    for i in range(num_samples):
        expected = (
            whole[first + i, 0, gap:].view(rows, stride)[:, :cols] if rows * stride else part[i]
        )
        assert torch.equal(part[i], expected)


@needs_native
@given(
    num_samples=st.integers(0, 3),
    rows=st.integers(0, 6),
    cols=st.integers(0, 1500),
    stride=st.integers(0, 3000),
    start=st.integers(0, 2**45),
    seed=st.integers(0, 2**64 - 1),
)
def test_cpp_gives_the_bits_of_the_reference(num_samples, rows, cols, stride, start, seed):
    block = CounterBlock(rows, cols, stride, start, num_samples)
    expected = random.bits_reference(random.philox_key(seed, 7), 8, 9, block)
    assert torch.equal(random.random_bits(seed, 7, 8, 9, block), expected)


def test_reference_is_the_same_in_pieces(monkeypatch):
    block = CounterBlock(rows=4, cols=37, stride=41, start=5, num_samples=3)
    expected = random.bits_reference((1, 2), 3, 4, block)
    for limit in (1, 10, 37, 100, 150, 300):
        monkeypatch.setattr(random, "_CHUNK", {"cpu": limit})
        assert torch.equal(random.bits_reference((1, 2), 3, 4, block), expected), limit


@needs_native
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cpp_gives_the_normal_numbers_of_the_reference(dtype):
    block = CounterBlock(3, 33333, stride=33343, start=11)  # pieces begin within rows
    assert torch.equal(
        random.normal(2**40 + 1, 77, block, dtype),
        random.normal_reference(2**40 + 1, 77, block, dtype),
    )


@needs_native
def test_cpp_does_not_depend_on_the_number_of_threads():
    block = CounterBlock(3, 100_003, stride=100_003, start=1)
    bits = CounterBlock(5, 30_011, stride=40_000, start=2, num_samples=2)
    alone = random.normal(1, 2, block, torch.float64), random.random_bits(1, 2, 3, 4, bits)
    torch.set_num_threads(3)
    try:
        together = random.normal(1, 2, block, torch.float64), random.random_bits(1, 2, 3, 4, bits)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, alone, together))


def test_normal_numbers_never_change():
    """A new release must start from the same parameters; this is the hash of some of them."""
    site = random.site("blocks.0.attention.qkv.weight")
    block = CounterBlock(rows=3, cols=5000, stride=7000, start=3)
    values = random.normal(1234, site, block, torch.float64)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "572e6ed6c3432dc8"


def test_normal_from_bits_is_the_quantile():
    bits = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(1))
    special = [
        0,
        1,
        2,
        2**31 - 1,
        -(2**31),
        -(2**31) + 1,
        -1,
        -2,
        int(0.075 * 2**32),
        int(0.925 * 2**32) - 2**32,
    ]
    bits = torch.cat([bits, torch.tensor(special)]).int()
    quantile = statistics.NormalDist().inv_cdf
    exact = torch.tensor(
        [quantile(((b & MASK) + 0.5) / 2**32) for b in bits.tolist()], dtype=torch.float64
    )
    got = random.normal_from_bits(bits)
    assert (got - exact).abs().max() < 1e-14
    assert torch.equal(random.normal_from_bits(~bits), -got)  # ~b mirrors the probability
    assert got.abs().max() < 6.4


def test_normal_numbers_are_normal():
    n = 1_000_000
    z = random.normal(3, 4, CounterBlock(1, n, stride=0, start=0), torch.float64)[0]
    # Within five standard errors of the moments 0, 1, 0, 3; and Kolmogorov-Smirnov at a level of
    # about 1e-5.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 5 * (variance / n) ** 0.5, power
    distribution = torch.special.ndtr(z.sort().values)
    assert (distribution - (torch.arange(n) + 0.5) / n).abs().max() < 2.5 / n**0.5
    assert abs(float((z[1:] * z[:-1]).mean())) < 5 / n**0.5  # neighbours


def test_other_types_round_the_float32_values():
    block = CounterBlock(2, 300, stride=300, start=0)
    single = random.normal(1, 2, block, torch.float32)
    assert torch.equal(random.normal(1, 2, block, torch.float64).float(), single)
    assert torch.equal(random.normal(1, 2, block, torch.bfloat16), single.bfloat16())


def test_site_is_stable():
    assert random.site("blocks.3.attention.qkv.weight") == 0xC2807CE8
    assert random.site("a") != random.site("b")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed):
    with pytest.raises(ConfigError, match=r"train\.seed"):
        random.philox_key(seed, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"step": -1}, "step -1 or samples 0 to 1 are out of range"),
        ({"step": 2**32}, "step 4294967296 or samples 0 to 1 are out of range"),
        ({"sample": -1}, "samples -1 to 0 are out of range"),
        ({"sample": 2**32 - 1}, "samples 4294967295 to 4294967296 are out of range"),
        ({"start": -1}, "must not be negative: .* start=-1"),
        ({"rows": -1}, "must not be negative: .*rows=-1"),
        ({"stride": -2}, "must not be negative: .* stride=-2"),
    ],
)
def test_counters_out_of_range(bad, message):
    good = {"step": 0, "sample": 0, "num_samples": 2, "rows": 1, "cols": 1, "stride": 1, "start": 0}
    sizes = {**good, **bad}
    step = sizes.pop("step")
    sample = sizes.pop("sample")
    with pytest.raises(ValueError, match=message):
        random.random_bits(0, 0, step, sample, CounterBlock(**sizes))
