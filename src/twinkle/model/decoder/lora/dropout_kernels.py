"""Dropout on the inputs of adapters as one CUDA kernel (Triton): the arithmetic of :mod:`.dropout`, to the last bit.

With torch's operations, a training step of adapters with dropout takes several times as long as one without: each
operation of the hash reads and writes a matrix of the size of the input.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 8, 512  # of a tile that one program computes


def drop(
    out_TI: Tensor,
    x_TI: Tensor,
    keys_T1: Tensor,
    thresholds_T1: Tensor,
    scales_T1: Tensor,
    module: int,
    *,
    step: int,
    factors: Sequence[int],
    shifts: Sequence[int],
    add: bool,
) -> None:
    """Write x with dropped elements 0 and the others scaled to ``out``, or ``add`` that to it.

    module: the key of the module, a signed 32-bit integer. step, factors, shifts: the constants of the hash. Rows of x
    and out must be contiguous.
    """
    rows, columns = x_TI.shape
    _drop[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        out_TI,
        x_TI,
        keys_T1,
        thresholds_T1,
        scales_T1,
        module,
        rows,
        columns,
        out_TI.stride(0),
        x_TI.stride(0),
        STEP=step,
        FACTOR_1=factors[0],
        FACTOR_2=factors[1],
        SHIFT_1=shifts[0],
        SHIFT_2=shifts[1],
        SHIFT_3=shifts[2],
        ADD=add,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["module", "rows"])  # one compiled kernel for all modules and batches
def _drop(
    out,
    x,
    keys,
    thresholds,
    scales,
    module,
    rows,
    columns,
    out_stride,
    x_stride,
    STEP: tl.constexpr,
    FACTOR_1: tl.constexpr,
    FACTOR_2: tl.constexpr,
    SHIFT_1: tl.constexpr,
    SHIFT_2: tl.constexpr,
    SHIFT_3: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_t = t < rows
    key = tl.load(keys + t, mask=inside_t, other=0).to(tl.uint32, bitcast=True)[:, None]
    threshold = tl.load(thresholds + t, mask=inside_t, other=0)[:, None]
    scale = tl.load(scales + t, mask=inside_t, other=0.0)[:, None]
    value = key ^ (n.to(tl.uint32) * STEP + module.to(tl.uint32))[None, :]
    value = (value ^ (value >> SHIFT_1)) * FACTOR_1
    value = (value ^ (value >> SHIFT_2)) * FACTOR_2
    value = value ^ (value >> SHIFT_3)
    inside = inside_t[:, None] & (n < columns)[None, :]
    row = t.to(tl.int64)[:, None]
    given = tl.load(x + row * x_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(value.to(tl.int32, bitcast=True) < threshold, 0.0, given * scale).to(out.dtype.element_ty)
    place = out + row * out_stride + n[None, :]
    if ADD:
        kept = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + kept.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(place, kept, mask=inside)
