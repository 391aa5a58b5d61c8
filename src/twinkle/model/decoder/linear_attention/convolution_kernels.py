"""SiLU of a causal depthwise convolution over packed sequences, and its gradient, in one CUDA kernel each (Triton).

Sums and products are in fp32. The gradient is computed from the convolution before SiLU, which is rounded as x is.

Shapes: T rows, F features, W width of the window.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _FEATURES = 32, 128  # of a program


def silu_of_convolution(
    x_TF: Tensor, weight_FW: Tensor, position_T: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return SiLU(y), and with ``keep`` also y, which its gradient needs.

    ``position_T``: the number of each row in its sequence, as int32. All are contiguous.
    """
    rows, features = x_TF.shape
    out_TF = torch.empty_like(x_TF)
    y_TF = torch.empty_like(x_TF) if keep else None
    _convolve[(triton.cdiv(rows, _ROWS), triton.cdiv(features, _FEATURES))](
        out_TF,
        out_TF if y_TF is None else y_TF,
        x_TF,
        weight_FW,
        position_T,
        rows,
        features,
        KEEP=keep,
        WIDTH=weight_FW.shape[1],
        ROWS=_ROWS,
        FEATURES=_FEATURES,
        num_warps=4,
    )
    return out_TF, y_TF


def gradient_of_rows(dout_TF: Tensor, y_TF: Tensor, weight_FW: Tensor, position_T: Tensor) -> Tensor:
    """Return the gradient of x from that of SiLU(y)."""
    rows, features = y_TF.shape
    dx_TF = torch.empty_like(y_TF)
    _convolve_back[(triton.cdiv(rows, _ROWS), triton.cdiv(features, _FEATURES))](
        dx_TF,
        dout_TF,
        y_TF,
        weight_FW,
        position_T,
        rows,
        features,
        WIDTH=weight_FW.shape[1],
        ROWS=_ROWS,
        FEATURES=_FEATURES,
        num_warps=4,
    )
    return dx_TF


@triton.jit(do_not_specialize=["rows"])
def _convolve(
    out,
    y,
    x,
    weight,
    position,
    rows,
    features,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    number = tl.load(position + t, mask=t < rows, other=-1)  # -1: no row
    place = t[:, None] * features + f[None, :]
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for back in tl.static_range(WIDTH):
        inside = (number >= back)[:, None] & (f < features)[None, :]
        values = tl.load(x + place - back * features, mask=inside, other=0.0).to(tl.float32)
        tap = tl.load(weight + f * WIDTH + (WIDTH - 1 - back), mask=f < features, other=0.0).to(tl.float32)
        total += values * tap[None, :]
    inside = (t < rows)[:, None] & (f < features)[None, :]
    if KEEP:
        tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
    tl.store(out + place, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _convolve_back(
    dx,
    dout,
    y,
    weight,
    position,
    rows,
    features,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    place = t[:, None] * features + f[None, :]
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for ahead in tl.static_range(WIDTH):
        number = tl.load(position + t + ahead, mask=t + ahead < rows, other=-1)
        inside = (number >= ahead)[:, None] & (f < features)[None, :]  # row t + ahead is of the same sequence
        slopes = tl.load(dout + place + ahead * features, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(y + place + ahead * features, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(values)
        tap = tl.load(weight + f * WIDTH + (WIDTH - 1 - ahead), mask=f < features, other=0.0).to(tl.float32)
        total += slopes * sigmoid * (1.0 + values * (1.0 - sigmoid)) * tap[None, :]
    inside = (t < rows)[:, None] & (f < features)[None, :]
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=inside)
