"""Products over ragged groups of rows as one CUDA kernel each (Triton), in bf16 with fp32 accumulators.

One dimension of each is a LoRA rank, so they are bound by memory: what counts is that every row is read once, that
nothing is copied, and that there is one launch whatever the number of groups.

Shapes: T rows in all, G groups, K inner and N outer features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.model.grouped import TILE_ROWS, Groups

_INNER = 64  # of the dimension summed over, a step
_NARROW, _WIDE = 64, 128  # columns of a tile
# Ranks, and widths of the matrix that holds x A.T, for which Triton makes kernels of their own: it asks of each size
# whether 16 divides it.
_RANK_CLASSES = ((8, 8), (8, 32), (32, 32), (128, 128))


def ragged_mm(out_TN: Tensor, rows_TK: Tensor, weights_GKN: Tensor, tiles: Tensor, *, add: bool) -> None:
    """``out[t] (+)= rows[t] @ weights[group of t]``."""
    inner, outer = weights_GKN.shape[1:]
    block = _NARROW if outer <= _NARROW else _WIDE
    _ragged_mm[(triton.cdiv(outer, block), len(tiles))](
        out_TN,
        rows_TK,
        weights_GKN,
        tiles,
        inner,
        outer,
        out_TN.stride(0),
        rows_TK.stride(0),
        *weights_GKN.stride(),
        ADD=add,
        ROWS=TILE_ROWS,
        INNER=_INNER,
        OUTER=block,
        num_warps=4,
        num_stages=4,
    )


def add_ragged_outer(out_GKN: Tensor, left_TK: Tensor, right_TN: Tensor, bounds: Tensor) -> None:
    """``out[g] += left[rows of g].T @ right[rows of g]``."""
    groups, inner, outer = out_GKN.shape
    _add_ragged_outer[(triton.cdiv(outer, _NARROW), triton.cdiv(inner, _NARROW), groups)](
        out_GKN,
        left_TK,
        right_TN,
        bounds,
        inner,
        outer,
        out_GKN.stride(0),
        out_GKN.stride(1),
        left_TK.stride(0),
        right_TN.stride(0),
        ROWS=TILE_ROWS,
        INNER=_NARROW,
        OUTER=_NARROW,
        num_warps=4,
        num_stages=4,
    )


def compile_kernels(device: torch.device) -> None:
    """Compile all that adapters may need now, not in a tenant's request; Triton keeps them on disk."""
    groups, wide = Groups((16, 32), device), 256
    x_TI = torch.zeros(48, wide, dtype=torch.bfloat16, device=device)
    for rank, width in _RANK_CLASSES:
        h = torch.zeros(48, width, dtype=x_TI.dtype, device=device)[:, :rank]
        a_GRI, b_GOR = (
            torch.zeros(2, *shape, dtype=x_TI.dtype, device=device) for shape in ((rank, wide), (wide, rank))
        )
        ragged_mm(h, x_TI, a_GRI.transpose(1, 2), groups.tiles, add=False)
        ragged_mm(h, x_TI, b_GOR, groups.tiles, add=False)
        ragged_mm(x_TI, h, b_GOR.transpose(1, 2), groups.tiles, add=True)
        ragged_mm(x_TI, h, a_GRI, groups.tiles, add=True)
        add_ragged_outer(a_GRI.float(), h, x_TI, groups.bounds)
        add_ragged_outer(b_GOR.float(), x_TI, h, groups.bounds)


@triton.jit
def _ragged_mm(
    out,
    rows,
    weights,
    tiles,
    inner,
    outer,
    out_stride,
    rows_stride,
    group_stride,
    inner_stride,
    outer_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(1)
    group, first, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    t = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    row = t.to(tl.int64)[:, None]
    inside_t, inside_n = (t < end)[:, None], (n < outer)[None, :]
    weights += group * group_stride
    total = tl.zeros([ROWS, OUTER], dtype=tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        x = tl.load(rows + row * rows_stride + k[None, :], mask=inside_t & (k < inner)[None, :], other=0.0)
        w = tl.load(
            weights + k[:, None] * inner_stride + n[None, :] * outer_stride,
            mask=(k < inner)[:, None] & inside_n,
            other=0.0,
        )
        total = tl.dot(x, w, total)
    place = out + row * out_stride + n[None, :]
    if ADD:
        total += tl.load(place, mask=inside_t & inside_n, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside_t & inside_n)


@triton.jit
def _add_ragged_outer(
    out,
    left,
    right,
    bounds,
    inner,
    outer,
    group_stride,
    out_stride,
    left_stride,
    right_stride,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    first, end = tl.load(bounds + group), tl.load(bounds + group + 1)
    k = tl.program_id(1) * INNER + tl.arange(0, INNER)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    inside_k, inside_n = (k < inner)[None, :], (n < outer)[None, :]
    total = tl.zeros([INNER, OUTER], dtype=tl.float32)
    for start in range(first, end, ROWS):
        t = start + tl.arange(0, ROWS)
        row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
        x = tl.load(left + row * left_stride + k[None, :], mask=inside_t & inside_k, other=0.0)
        y = tl.load(right + row * right_stride + n[None, :], mask=inside_t & inside_n, other=0.0)
        total = tl.dot(tl.trans(x), y, total)
    place = out + group * group_stride + k.to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = (k < inner)[:, None] & inside_n
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
