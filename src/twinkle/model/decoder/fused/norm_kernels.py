"""RMS norms and their gradients, in one CUDA kernel each (Triton).

With s = 1 / √(mean(x²) + eps) and v = offset + weight, the norm is x·s·v. For the gradient d of the result it has the
gradient s·(g - x·s²·mean(g·x)) with g = d·v. A gated norm is the norm times SiLU(gate). Numbers in between are fp32.

A row is the last dimension of a tensor, whose others may be any. Tensors are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096  # of a program: it has several rows if they are short


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return the norm of each row, times SiLU(gate) if there is a gate."""
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    _rms_norm[(triton.cdiv(rows, tile),)](
        y,
        x,
        x if gate is None else gate,
        weight,
        rows,
        width,
        eps,
        offset,
        GATED=gate is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=warps,
    )
    return y


def rms_norm_gradient(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the gate."""
    dx = torch.empty_like(x)
    dgate = None if gate is None else torch.empty_like(gate)
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile, warps = _tile(width)
    _rms_norm_gradient[(triton.cdiv(rows, tile),)](
        dx,
        dx if dgate is None else dgate,
        dy,
        x,
        x if gate is None else gate,
        weight,
        rows,
        width,
        eps,
        offset,
        GATED=gate is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=warps,
    )
    return dx, dgate


def _tile(width: int) -> tuple[int, int, int]:
    """Return the features and rows of a program, as powers of two, and its warps."""
    block: int = triton.next_power_of_2(width)
    tile = max(1, _NUMBERS // block)
    return block, tile, 4 if block <= _NUMBERS else 8


@triton.jit(do_not_specialize=["rows", "eps", "offset"])
def _rms_norm(
    y,
    x,
    gate,
    weight,
    rows,
    width,
    eps,
    offset,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (n < rows)[:, None] & (h < width)[None, :]
    place = n[:, None] * width + h[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + h, mask=h < width, other=0.0).to(tl.float32) + offset
    scale = _scale(values, width, eps, ROWS)
    result = values * scale * factors[None, :]
    if GATED:
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        result *= g * tl.sigmoid(g)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scale(values, width, eps, ROWS: tl.constexpr):
    """Return 1 / √(mean(x²) + eps) of each row as a column; the root and the division are correctly rounded."""
    root = tl.sqrt_rn(tl.sum(values * values, 1) / width + eps)
    return tl.div_rn(tl.full([ROWS], 1.0, tl.float32), root)[:, None]


@triton.jit(do_not_specialize=["rows", "eps", "offset"])
def _rms_norm_gradient(
    dx,
    dgate,
    dy,
    x,
    gate,
    weight,
    rows,
    width,
    eps,
    offset,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (n < rows)[:, None] & (h < width)[None, :]
    place = n[:, None] * width + h[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    slopes = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + h, mask=h < width, other=0.0).to(tl.float32) + offset
    scale = _scale(values, width, eps, ROWS)
    if GATED:
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        slope_of_gate = slopes * values * scale * factors[None, :] * sigmoid * (1.0 + g * (1.0 - sigmoid))
        tl.store(dgate + place, slope_of_gate.to(dgate.dtype.element_ty), mask=inside)
        slopes *= g * sigmoid
    slopes *= factors[None, :]
    mean = (tl.sum(slopes * values, 1) / width)[:, None]
    result = scale * (slopes - values * scale * scale * mean)
    tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
