"""The Newton-Schulz iteration of Muon: roughly the nearest semi-orthogonal matrix, by products
alone."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
GRAM_ASPECT = 1.5
"""From this ratio of the sides on, iterating on the Gram matrix takes fewer operations."""
BLOCKS = {"cpu": 4}
"""Rows of blocks into which symmetric products are cut, to compute one triangle of them. Not
measured on other devices."""
SMALLEST = 128
"""Rows of a block."""


def newton_schulz(x: Tensor) -> Tensor:
    """Return U S' V^T for x = U S V^T, with singular values S' near 1; x is used up.

    S' is 0.68 to 1.21 wherever S > 0.002 |x|. Five steps of x <- a x + b (x x^T) x + c (x x^T)^2 x
    from x / |x| have coefficients that make small singular values grow fastest; they do not
    converge
    to 1, which does not harm Muon. A matrix of norm below 1e-7 counts as zero.

    Shapes: [k, rows, cols], k matrices of one shape -> the same.
    Source: Jordan et al., github.com/KellerJordan/Muon, with its coefficients and number of steps.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # row by row first: a float32 sum over millions of elements would be off by 1e-3
    norms = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=2, dtype=wide), dim=1)
    x.div_(norms.clamp_(min=EPS).to(x.dtype).view(-1, 1, 1))
    rows, cols = x.shape[1:]
    return _iterate(x) if rows <= cols else _iterate(x.mT).mT


def newton_schulz_cost(rows: int, cols: int) -> int:
    """Return the multiplications that one float32 matrix takes, in full products."""
    short, long = sorted((rows, cols))
    if long >= GRAM_ASPECT * short:
        return 2 * short * short * long + (4 * STEPS - 3) * short**3
    return STEPS * (2 * short * short * long + short**3)


def _iterate(x: Tensor) -> Tensor:
    """Take the five steps, on matrices at least as wide as high."""
    a, b, c = COEFFICIENTS
    # squaring halves the digits of small singular values: enough are left in float32 (wrong by 1e-3
    # at worst, where bfloat16 is by 0.3), too few in bfloat16
    if x.shape[2] >= GRAM_ASPECT * x.shape[1] and x.dtype != torch.bfloat16:
        return _gram_polynomial(_symmetric(x, x.mT)) @ x
    for _ in range(STEPS):
        gram = _symmetric(x, x.mT)
        x = torch.baddbmm(x, _symmetric(gram, gram, b, c), x, beta=a)
    return x


def _symmetric(x: Tensor, y: Tensor, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return alpha x y + beta x, which must be symmetric, as products of polynomials of one
    symmetric matrix are."""
    size = x.shape[1]
    step = max(SMALLEST, -(-size // BLOCKS.get(x.device.type, 1)))
    out = x.new_empty(x.shape[0], size, size)
    for i in range(0, size, step):
        j = min(i + step, size)
        rows = out[:, i:j, :j]
        torch.baddbmm(
            x[:, i:j, :j] if beta else rows,
            x[:, i:j],
            y[:, :, :j],
            beta=beta,
            alpha=alpha,
            out=rows,
        )
        out[:, :i, i:j] = rows[:, :, :i].mT
    return out


def _gram_polynomial(gram: Tensor) -> Tensor:
    """Return the product P of all steps' polynomials of x x^T, so that the result is P x.

    x itself is multiplied only twice.
    """
    a, b, c = COEFFICIENTS
    product: Tensor | None = None
    for step in range(STEPS):
        factor = _symmetric(gram, gram, b, c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else _symmetric(product, factor)
        if step < STEPS - 1:
            gram = _symmetric(factor, _symmetric(gram, factor))
    assert product is not None
    return product
