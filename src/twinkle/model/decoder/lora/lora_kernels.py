"""LoRA of all stacks of a batch with one CUDA kernel per product (Triton), in bf16 with fp32 accumulators.

A kernel finds the matrices of a group by their addresses, so groups of different ranks and sizes need only one launch.
One dimension of every product is a rank, so the products are bound by memory bandwidth.

A group's A is (rank, wide) and its B is (wide, rank), both row-major. ``wide`` is the number of features of the layer's
input (for A) or output (for B). An address of 0 means that the group has no adapter on this layer. A tile or span whose
numbers are all 0 has no rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.model.decoder.tiles import TILE_ROWS

_FEW_ROWS = 1024  # up to this many rows, several programs share a tile
_LONG_SUM, _SUMS = 4096, 4  # few rows: a sum over this many features or more is computed in so many parts


def lora_down(h: Tensor, rows: Tensor, addresses_G: Tensor, tiles: Tensor, wide: int, rank: int, *, a: bool) -> None:
    """Compute ``h[t] = rows[t] @ (A.T or B of t's group)``: from wide rows to a rank.

    tiles: (n, 4) int32: group, first row, end of the group, rank. A tile has at most TILE_ROWS rows of one group.
    rank: the largest rank of all groups. a: whether the matrices are A (transposed), else B.

    Few rows would occupy few of the GPU's processors, so their tiles are divided, and so is a long sum over ``wide``.
    """
    few = len(h) <= _FEW_ROWS
    part, inner, outer, warps = (16, 256, 32, 2 if a else 4) if few else (TILE_ROWS, 128, 64, 4)
    sums = _SUMS if few and wide >= _LONG_SUM else 1
    out = h if sums == 1 else h.new_empty(sums, *h.shape, dtype=torch.float32)
    _lora_mm[(triton.cdiv(rank, outer), len(tiles), TILE_ROWS // part * sums)](
        out,
        rows,
        addresses_G,
        tiles,
        wide,
        h.stride(0),
        rows.stride(0),
        0,
        len(h) * h.stride(0),
        IS_A=a,
        UP=False,
        ROWS=part,
        INNER=inner,
        OUTER=outer,
        PARTS=TILE_ROWS // part,
        SUMS=sums,
        num_warps=warps,
        num_stages=3,
    )
    if sums > 1:
        count = h.numel()
        _add_up[(triton.cdiv(count, 1024),)](h, out, count, SUMS=sums, BLOCK=1024, num_warps=4)


def lora_up(
    out: Tensor, h: Tensor, addresses_G: Tensor, tiles: Tensor, wide: int, rank: int, *, a: bool, beta: int
) -> None:
    """Compute ``out[t] = beta · out[t] + h[t] @ (A or B.T of t's group)``: from a rank to wide rows.

    beta: 0 (``out`` is not read, and rows of a tile without adapter become 0) or 1. a: whether the matrices are A, else
    B (transposed). Other arguments are as in :func:`lora_down`.
    """
    outer = 128
    _lora_mm[(triton.cdiv(wide, outer), len(tiles), 1)](
        out,
        h,
        addresses_G,
        tiles,
        wide,
        out.stride(0),
        h.stride(0),
        beta,
        0,
        IS_A=a,
        UP=True,
        ROWS=TILE_ROWS,
        INNER=32,
        OUTER=outer,
        PARTS=1,
        SUMS=1,
        num_warps=4,
        num_stages=2,
    )


def add_lora_outer(
    left: Tensor, right: Tensor, addresses_G: Tensor, spans: Tensor, wide: int, rank: int, *, a: bool
) -> None:
    """Add ``left[rows of g].T @ right[rows of g]`` to the fp32 matrix of each group, the gradient of A or of B.

    spans: (G, 4) int32, one entry per group: group, first row, end, rank.
    """
    inner, outer = (rank, wide) if a else (wide, rank)
    _add_lora_outer[(triton.cdiv(outer, 64), triton.cdiv(inner, 64), len(spans))](
        left,
        right,
        addresses_G,
        spans,
        wide,
        left.stride(0),
        right.stride(0),
        IS_A=a,
        ROWS=TILE_ROWS,
        INNER=64,
        OUTER=64,
        num_warps=4,
        num_stages=4,
    )


@triton.jit(do_not_specialize=["beta"])  # one compiled kernel for beta 0 and 1
def _lora_mm(
    out,
    rows,
    addresses,
    tiles,
    wide,
    out_stride,
    rows_stride,
    beta,
    sum_stride,
    IS_A: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    PARTS: tl.constexpr,  # how many programs share the rows of a tile
    SUMS: tl.constexpr,  # how many programs share the sum of a product
):
    tile = tiles + 4 * tl.program_id(1)
    group, end = tl.load(tile), tl.load(tile + 2)
    first = tl.load(tile + 1) + tl.program_id(2) % PARTS * ROWS
    rank = tl.load(tile + 3) // 8 * 8  # changes nothing: it shows the compiler that ranks are multiples of 8
    inner = rank if UP else wide
    outer = wide if UP else rank
    address = tl.load(addresses + group)
    nothing = address == 0
    if UP:
        nothing = nothing & (beta != 0)
    if nothing | (first >= end) | (tl.program_id(0) * OUTER >= outer):
        return
    share = tl.cdiv(inner, SUMS * INNER) * INNER
    begin = tl.program_id(2) // PARTS * share
    stop = tl.where(address == 0, 0, tl.minimum(begin + share, inner))
    out += (tl.program_id(2) // PARTS).to(tl.int64) * sum_stride
    weights = tl.multiple_of(address.to(tl.pointer_type(rows.dtype.element_ty)), 16)
    t = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    row = t.to(tl.int64)[:, None]
    inside_t, inside_n = (t < end)[:, None], (n < outer)[None, :]
    inner_stride = (wide if UP else 1) if IS_A else (1 if UP else rank)
    outer_stride = (1 if UP else wide) if IS_A else (rank if UP else 1)
    total = tl.zeros([ROWS, OUTER], dtype=tl.float32)
    for start in range(begin, stop, INNER):
        k = start + tl.arange(0, INNER)
        x = tl.load(rows + row * rows_stride + k[None, :], mask=inside_t & (k < inner)[None, :], other=0.0)
        place = k[:, None] * inner_stride + n[None, :] * outer_stride
        w = tl.load(weights + place, mask=(k < inner)[:, None] & inside_n, other=0.0)
        total = tl.dot(x, w, total)
    place = out + row * out_stride + n[None, :]
    if beta != 0:
        total += tl.load(place, mask=inside_t & inside_n, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside_t & inside_n)


@triton.jit
def _add_up(out, parts, count, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the partial sums of a product, always in the same order, and store the total."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(SUMS):
        total += tl.load(parts + number * count + place, mask=place < count, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _add_lora_outer(
    left,
    right,
    addresses,
    spans,
    wide,
    left_stride,
    right_stride,
    IS_A: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    span = spans + 4 * tl.program_id(2)
    group, first, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    rank = tl.load(span + 3) // 8 * 8
    inner = rank if IS_A else wide
    outer = wide if IS_A else rank
    address = tl.load(addresses + group)
    if (address == 0) | (tl.program_id(1) * INNER >= inner) | (tl.program_id(0) * OUTER >= outer):
        return
    gradient = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
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
    place = gradient + k[:, None] * outer + n[None, :]
    inside = (k < inner)[:, None] & inside_n
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
