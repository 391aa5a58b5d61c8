"""LoRA on a few rows of many versions as two CUDA kernels (Triton): first h = x A.T, then y += h B.T.

Few rows mean few tiles, and each tile has to read a wide matrix. To use the whole device, the first product is split
along its inner dimension into parts that run in parallel. The second kernel adds their fp32 sums in a fixed order.

Shapes: T rows, P parts, R the largest rank. A is (rank, inputs) and B is (outputs, rank), both row-major and found by
their address; address 0 means no adapter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16  # the smallest tile that tensor cores accept
MAX_RANK = 128
_PART = 256  # length of one part of the inner dimension of x A.T
_RANKS_AT_ONCE = 32


def add_lora(x_TI: Tensor, y_TO: Tensor, a_G: Tensor, b_G: Tensor, tiles: Tensor) -> None:
    """Compute ``y[t] += x[t] @ A.T @ B.T`` with the A and B of the group of row t.

    tiles: (n, 4) int32; a tile covers at most TILE_ROWS rows and has the columns group, first row, end of the group,
    rank.
    """
    inputs, outputs = x_TI.shape[1], y_TO.shape[1]
    parts = triton.cdiv(inputs, _PART)
    h_PTR = x_TI.new_empty(parts, len(x_TI), MAX_RANK, dtype=torch.float32)
    _times_a[(parts, len(tiles))](
        h_PTR,
        x_TI,
        a_G,
        tiles,
        inputs,
        x_TI.stride(0),
        h_PTR.stride(0),
        h_PTR.stride(1),
        ROWS=TILE_ROWS,
        PART=_PART,
        RANKS=_RANKS_AT_ONCE,
        num_warps=4,
    )
    _add_times_b[(triton.cdiv(outputs, 128), len(tiles))](
        y_TO,
        h_PTR,
        b_G,
        tiles,
        outputs,
        parts,
        y_TO.stride(0),
        h_PTR.stride(0),
        h_PTR.stride(1),
        OPERAND=tl.bfloat16 if x_TI.dtype == torch.bfloat16 else tl.float32,
        ROWS=TILE_ROWS,
        OUTER=128,
        RANKS=_RANKS_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _times_a(
    h,
    x,
    addresses,
    tiles,
    inputs,
    x_row,
    h_part,
    h_row,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    RANKS: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(1)
    address = tl.load(addresses + tl.load(tile))
    if address == 0:
        return
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(tile + 3) // 8 * 8  # ranks are multiples of 8; this tells the compiler so
    a = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    t = first + tl.arange(0, ROWS)
    k = tl.program_id(0) * PART + tl.arange(0, PART)
    row, inside_t, inside_k = t.to(tl.int64)[:, None], (t < end)[:, None], k < inputs
    values = tl.load(x + row * x_row + k[None, :], mask=inside_t & inside_k[None, :], other=0.0)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r = (r < rank)[None, :]
        weights = tl.load(a + r[None, :] * inputs + k[:, None], mask=inside_k[:, None] & inside_r, other=0.0)
        sums = tl.dot(values, weights)
        tl.store(h + tl.program_id(0) * h_part + row * h_row + r[None, :], sums, mask=inside_t & inside_r)


@triton.jit
def _add_times_b(
    y,
    h,
    addresses,
    tiles,
    outputs,
    parts,
    y_row,
    h_part,
    h_row,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(1)
    address = tl.load(addresses + tl.load(tile))
    if address == 0:
        return
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(tile + 3) // 8 * 8
    b = tl.multiple_of(address.to(tl.pointer_type(OPERAND)), 16)
    t = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    row, inside_t, inside_n = t.to(tl.int64)[:, None], (t < end)[:, None], (n < outputs)[None, :]
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r = r < rank
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for part in range(parts):
            place = h + part * h_part + row * h_row + r[None, :]
            sums += tl.load(place, mask=inside_t & inside_r[None, :], other=0.0)
        weights = tl.load(b + n[None, :] * rank + r[:, None], mask=inside_r[:, None] & inside_n, other=0.0)
        total = tl.dot(sums.to(OPERAND), weights, total)
    place = y + row * y_row + n[None, :]
    inside = inside_t & inside_n
    total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=inside)
