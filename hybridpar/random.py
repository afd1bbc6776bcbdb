"""Random numbers that depend on what they are for, not on which rank draws them or when.

A Philox4x32-10 counter generator: element `index` of a tensor has the same bits on every grid, for
every micro-batch size, on every backend and thread count, so a shard draws just its part and
nothing has to be saved to draw it again.

    key     (low 32 bits of seed,  site ^ high 32 bits of seed)
    counter (index // 4 low, index // 4 high, step, sample)          four 32-bit words out; index % 4 selects one

Everything here also exists in plain torch (`*_reference`), which defines the bits; the C++ version
returns the same bits.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from hybridpar import native
from hybridpar.errors import config_error

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_MASK = 0xFFFFFFFF
# elements whose temporaries stay in a core's cache; on devices, memory is the limit
_CHUNK = {"cpu": 1 << 15}
_CHUNK_DEVICE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class RandomKey:
    """Determines the random numbers of one micro-batch: the seed, and a counter that changes
    between micro-batches.

    counter: int64 [2], the step and the global index of the first sample, on the device that draws.
    Kernels read it there, so code that was compiled or recorded for one micro-batch serves all.
    """

    seed: int
    counter: Tensor

    @classmethod
    def of(
        cls,
        seed: int,
        step: int,
        sample: int,
        num_samples: int = 1,
        device: str | torch.device = "cpu",
    ) -> RandomKey:
        """Create the key of the samples `sample` to `sample + num_samples`.

        Shapes: counter [2], int64, on `device`.

        Raises:
            ValueError: The step or one of the samples does not fit 32 bits.
        """
        check_counters(step, sample, CounterBlock(0, 0, 0, 0, num_samples))
        return cls(seed, torch.tensor([step, sample], device=device))


@dataclass(frozen=True, slots=True)
class CounterBlock:
    """The counters of a block of elements: element (i, r, c) has sample + i and index = start +
    r * stride + c.

    Attributes:
        rows: Number of rows.
        cols: Number of columns.
        stride: Distance between the indices of two rows.
        start: Index of the first element.
        num_samples: Number of samples.
    """

    rows: int
    cols: int
    stride: int
    start: int
    num_samples: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The block's shape: [num_samples, rows, cols]."""
        return self.num_samples, self.rows, self.cols


def site(name: str) -> int:
    """Return a 32-bit number that stands for `name` in every process, release and machine."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little")


def philox_key(seed: int, site: int) -> tuple[int, int]:
    """Return the two key words of the generator. Raises: ConfigError if the seed does not fit 64
    bits.
    """
    if not 0 <= seed < 1 << 64:
        raise config_error(
            "train.seed", seed, "must be from 0 to 2**64 - 1", str(abs(seed) & (1 << 63) - 1)
        )
    return seed & _MASK, (site & _MASK) ^ seed >> 32


def random_bits(
    seed: int,
    site: int,
    step: int,
    sample: int,
    block: CounterBlock,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Return 32 random bits for each element of a block whose first sample is `sample`.

    Shapes: returns int32 [num_samples, rows, cols].
    """
    check_counters(step, sample, block)
    key = philox_key(seed, site)
    if torch.device(device).type == "cpu" and native.missing() is None:
        return torch.ops.hybridpar.philox_bits(
            *key, step, sample, *block.shape, block.stride, block.start
        )
    return bits_reference(key, step, sample, block, device)


def normal(seed: int, site: int, block: CounterBlock, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers for a block of one sample (step 0, sample 0), on the CPU.

    They are computed in float64. Other types are rounded to float32 first, so they all start from
    the same values. Each number is made from 32 bits, so it lies within 6.4 standard deviations.

    Shapes: returns [rows, cols].
    """
    if native.missing() is None:
        check_counters(0, 0, block)
        return torch.ops.hybridpar.philox_normal(
            *philox_key(seed, site),
            block.rows,
            block.cols,
            block.stride,
            block.start,
            dtype == torch.float64,
        ).to(dtype)
    return normal_reference(seed, site, block, dtype)


def check_counters(step: int, sample: int, block: CounterBlock) -> None:
    """Check that no counter wraps around and repeats numbers.

    Raises:
        ValueError: A counter would.
    """
    last = sample + block.num_samples - 1
    if not (0 <= step <= _MASK and sample >= 0 and last <= _MASK):
        raise ValueError(
            f"step {step} or samples {sample} to {last} are out of range: 0 to 2**32 - 1"
        )
    if min(*block.shape, block.stride, block.start) < 0:
        raise ValueError(f"sizes must not be negative: {block}")


# --- reference: bits


def bits_reference(
    key: tuple[int, int],
    step: int | Tensor,
    sample: int | Tensor,
    block: CounterBlock,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Return the result of `random_bits`, computed in plain torch, for a key from `philox_key`.

    Shapes: returns int32 [num_samples, rows, cols].
    """
    device = torch.device(device)
    out = torch.empty(block.shape, dtype=torch.int32, device=device)
    steps = torch.zeros(1, dtype=torch.int64, device=device) + step
    pieces = _pieces(block.shape, _CHUNK.get(device.type, _CHUNK_DEVICE))
    # A tracer's tensors have no values, and one piece has the same operations as all others.
    for i, r, c in pieces if type(out) is Tensor else islice(pieces, 1):
        samples = torch.arange(i.start, i.stop, device=device).view(-1, 1, 1) + sample
        row = torch.arange(r.start, r.stop, device=device).view(1, -1, 1)
        first = block.start + c.start + block.stride * row
        width = c.stop - c.start
        # 3 more than width, for any alignment
        quads = (first >> 2) + torch.arange((width + 6) // 4, device=device)
        words = torch.stack(
            philox((quads & _MASK, quads >> 32, steps, samples), key), dim=-1
        ).flatten(-2)
        pick = (first & 3) + torch.arange(width, device=device)
        out[i, r, c] = words.gather(-1, pick.expand(words.shape[0], -1, -1)).to(torch.int32)
    return out


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Run Philox4x32-10: return four words of output for each counter.

    Words are int64 in [0, 2**32): the signed product of two of them wraps, but its bits are those
    of the exact product.
    Shapes: the counter's parts broadcast; returns four tensors of their common shape.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _MASK
        c1 = product1 & _MASK
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _MASK
        c3 = product0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _pieces(shape: tuple[int, int, int], limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield boxes of at most `limit` elements that cover `shape`, split along the first axis that
    can be split.
    """
    num_samples, rows, cols = shape
    if 0 in (num_samples, rows, cols):
        return
    width = min(cols, limit)
    height = min(rows, limit // width) if width == cols else 1
    depth = min(num_samples, limit // (width * height)) if height == rows and width == cols else 1
    for i in _slices(num_samples, depth):
        for r in _slices(rows, height):
            for c in _slices(cols, width):
                yield i, r, c


def _slices(size: int, step: int) -> list[slice]:
    return [slice(a, b) for a, b in pairwise((*range(0, size, step), size))]


# --- reference: normal numbers


def normal_reference(
    seed: int, site: int, block: CounterBlock, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the result of `normal`, computed in plain torch. Shapes: returns [rows, cols]."""
    check_counters(0, 0, block)
    key = philox_key(seed, site)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty((block.rows, block.cols), dtype=wide)
    for _, r, c in _pieces(block.shape, _CHUNK["cpu"]):
        start = block.start + r.start * block.stride + c.start
        piece = CounterBlock(r.stop - r.start, c.stop - c.start, block.stride, start)
        out[r, c] = normal_from_bits(bits_reference(key, 0, 0, piece)[0])
    return out.to(dtype)


def normal_from_bits(bits: Tensor) -> Tensor:
    """Return the normal quantile of (bits + 1/2) / 2**32, to about 16 digits.

    Only operations that IEEE 754 rounds exactly are used (+ - * / sqrt, each rounded separately),
    so every implementation returns the same bits. The third range of the original (probabilities
    below 1.4e-11) is never reached with 32 bits.

    Shapes: bits int32, any shape, read as unsigned; returns float64 of that shape.
    Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Appl.
    Statist. 37 (1988).
    """
    q = ((bits.long() & _MASK).double() - (2.0**31 - 0.5)) * 2.0**-32  # probability - 1/2, exact
    out = q * _ratio(0.180625 - q * q, _CENTRE)
    tails = (q.abs() > 0.425).flatten().nonzero().flatten()
    q = q.flatten()[tails]
    # torch.sqrt, by MKL, is not exactly rounded
    root = torch.from_numpy(np.sqrt(_log(0.5 - q.abs()).neg_().numpy()))
    tail = _ratio(root - 1.6, _TAIL)
    out.view(-1)[tails] = torch.where(q < 0, -tail, tail)
    return out


def _ratio(x: Tensor, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    return _polynomial(x, coefficients[0]) / _polynomial(x, coefficients[1])


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial by Horner's rule, highest power first, rounding after each
    multiplication and each addition.
    """
    y = x * coefficients[0]
    for c in coefficients[1:-1]:
        y.add_(c).mul_(x)
    return y.add_(coefficients[-1])


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of normal positive float64 numbers: 2^e m by the bits, log m = 2
    artanh((m - 1)/(m + 1)).
    """
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = (bits & ((1 << 52) - 1) | (1023 << 52)).view(torch.float64)  # in [1, 2)
    high = mantissa > _SQRT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(s * s, _ARTANH)
    return (exponent + high).double() * _LN2 + s * series


_SQRT2 = 1.4142135623730951
_LN2 = 0.6931471805599453
# coefficients of powers of s**2, |s| < 0.172, exact to the last digit
_ARTANH = tuple(2.0 / (2 * k + 1) for k in reversed(range(12)))
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
