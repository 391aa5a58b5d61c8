"""LoRA on the rows of a prompt pass as two CUDA kernels (Triton): first h = x A.T, then y += h B.T.

The grid depends only on the number of tiles and features, and programs of unused tiles return at once. In a pass of few
rows there are few tiles, so the first product is split along its inner dimension into parts that run in parallel; the
second kernel adds their fp32 sums in a fixed order.

Shapes: T rows, P parts, R the largest rank, n tiles, G versions. A is (rank, inputs) and B is (outputs, rank), both
row-major and found by their address; address 0 means that a version has no LoRA on this layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 128
_PROGRAMS = 128  # Triton programs to aim for in the first product
_SHORTEST_PART = 256
_INNER = 128
_RANKS_AT_ONCE = 32
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def add_lora(x_TI: Tensor, y_TO: Tensor, weights_G4: Tensor, tiles_n4: Tensor, tile_rows: int) -> None:
    """Compute ``y[t] += x[t] @ A.T @ B.T`` with the A and B of row t's version. y may have a wider dtype than x.

    weights_G4: the addresses of A and B, the rank, and an unused number, which makes rows of 32 bytes. tiles_n4: see
    :class:`~.tables.Bucket`.
    """
    inputs, outputs = x_TI.shape[1], y_TO.shape[1]
    parts = max(1, min(_PROGRAMS * tile_rows // len(x_TI), triton.cdiv(inputs, _SHORTEST_PART)))
    length = triton.cdiv(inputs, parts * _INNER) * _INNER
    parts = triton.cdiv(inputs, length)
    h_PTR = x_TI.new_empty(parts, len(x_TI), MAX_RANK, dtype=torch.float32)
    precision = "ieee" if x_TI.dtype == torch.float32 else "tf32"
    _times_a[(parts, len(tiles_n4))](
        h_PTR,
        x_TI,
        weights_G4,
        tiles_n4,
        inputs,
        length,
        weights_G4.stride(0),
        x_TI.stride(0),
        h_PTR.stride(0),
        h_PTR.stride(1),
        ROWS=tile_rows,
        INNER=_INNER,
        RANKS=_RANKS_AT_ONCE,
        PRECISION=precision,
        num_warps=4,
        num_stages=3,
    )
    _add_times_b[(triton.cdiv(outputs, 128), len(tiles_n4))](
        y_TO,
        h_PTR,
        weights_G4,
        tiles_n4,
        outputs,
        parts,
        weights_G4.stride(0),
        y_TO.stride(0),
        h_PTR.stride(0),
        h_PTR.stride(1),
        OPERAND=_TYPES[x_TI.dtype],
        ROWS=tile_rows,
        OUTER=128,
        RANKS=_RANKS_AT_ONCE,
        PRECISION=precision,
        num_warps=4,
    )


@triton.jit
def _times_a(
    h,
    x,
    weights,
    tiles,
    inputs,
    length,
    version_stride,
    x_row,
    h_part,
    h_row,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(1)
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    if first >= end:
        return
    version = weights + tl.load(tile) * version_stride
    address = tl.load(version)
    if address == 0:
        return
    rank = tl.load(version + 2).to(tl.int32) // 8 * 8  # ranks are multiples of 8; this tells the compiler so
    a = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    t = first + tl.arange(0, ROWS)
    row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
    start = tl.program_id(0) * length
    stop = tl.minimum(start + length, inputs)
    for low in range(0, rank, RANKS):
        r = low + tl.arange(0, RANKS)
        inside_r = (r < rank)[None, :]
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for at in range(start, stop, INNER):
            k = at + tl.arange(0, INNER)
            values = tl.load(x + row * x_row + k[None, :], mask=inside_t & (k < stop)[None, :], other=0.0)
            factors = tl.load(a + r[None, :] * inputs + k[:, None], mask=(k < stop)[:, None] & inside_r, other=0.0)
            sums = tl.dot(values, factors, sums, input_precision=PRECISION)
        tl.store(h + tl.program_id(0) * h_part + row * h_row + r[None, :], sums, mask=inside_t & inside_r)


@triton.jit(do_not_specialize=["parts"])  # one compiled kernel for any number of parts
def _add_times_b(
    y,
    h,
    weights,
    tiles,
    outputs,
    parts,
    version_stride,
    y_row,
    h_part,
    h_row,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(1)
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    if first >= end:
        return
    version = weights + tl.load(tile) * version_stride
    address = tl.load(version + 1)
    if address == 0:
        return
    rank = tl.load(version + 2).to(tl.int32) // 8 * 8
    b = tl.multiple_of(address.to(tl.pointer_type(OPERAND)), 16)
    t = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    row, inside_t, inside_n = t.to(tl.int64)[:, None], (t < end)[:, None], (n < outputs)[None, :]
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for low in range(0, rank, RANKS):
        r = low + tl.arange(0, RANKS)
        inside_r = r < rank
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for part in range(parts):
            place = h + part * h_part + row * h_row + r[None, :]
            sums += tl.load(place, mask=inside_t & inside_r[None, :], other=0.0)
        factors = tl.load(b + n[None, :] * rank + r[:, None], mask=inside_r[:, None] & inside_n, other=0.0)
        total = tl.dot(sums.to(OPERAND), factors, total, input_precision=PRECISION)
    place = y + row * y_row + n[None, :]
    inside = inside_t & inside_n
    total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=inside)
