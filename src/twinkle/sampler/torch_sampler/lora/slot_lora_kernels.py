"""LoRA on a few rows of many versions as CUDA kernels (Triton): first h = x A.T, then y += h B.T.

Rows are cut into tiles, each of one version. A grid has about as many programs as the device runs at the same time.
Where there are more tiles, a program computes several that follow each other; often they are of one version, so that B
is in the cache already. Few rows mean few tiles, each of which has to read a wide matrix, so the first product is also
split along its inner dimension into parts that run in parallel. The kernels that read h add the fp32 sums of the parts
in a fixed order.

Linear layers that have the same input form a set, whose products with A are one launch.

Shapes: T rows, P parts, S linear layers of a set, R the largest rank, G groups (versions), N tiles. A is (rank, inputs)
and B is (outputs, rank), both row-major and found by their address; address 0 means no adapter.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 128
TILE_ROWS = 16  # the smallest tile that tensor cores accept
_INNER = 256  # inputs that a program multiplies at a time
_OUTER = 128  # outputs of a program
RANKS_AT_ONCE = 32
_MOST_PARTS = 16
_PROGRAMS = 528  # four for each multiprocessor of a large device
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """The rows of a pass in tiles of one version each. Together they cover all rows, with or without adapter."""

    table_N4: Tensor  # int32: group, first row, end of the group's rows, rank
    count_1: Tensor  # how many tiles are in use; int32, on the device
    most: int  # the largest number of tiles in usual passes; there may be more

    def programs(self, others: int) -> int:
        """Return how many programs share the tiles in a grid whose other dimensions have ``others`` programs."""
        return max(1, min(self.most, _PROGRAMS // others))


@dataclass(frozen=True)
class Projected:
    """x A.T for a set of linear layers, as sums over parts of the inputs."""

    sums_PTSR: Tensor  # fp32; undefined where a row has no adapter
    addresses_S2G: Tensor


def usual_tiles(rows: int) -> int:
    """Return the largest number of tiles in usual passes: full ones, and a few that are not full."""
    return min(rows, triton.cdiv(rows, TILE_ROWS) + 16)


def operand(dtype: torch.dtype) -> tl.dtype:
    return _OPERANDS[dtype]


def project(x_TI: Tensor, addresses_S2G: Tensor, tiles: Tiles) -> Projected:
    """Compute x A.T for the linear layers of a set."""
    rows, inputs = x_TI.shape
    # Every program that reads h reads all of its parts, so with more rows, which more programs read, there are fewer.
    at_least = _INNER * (1 if rows <= 32 else 4 if rows <= 128 else 8)
    part = max(at_least, triton.cdiv(triton.cdiv(inputs, _MOST_PARTS), _INNER) * _INNER)
    parts, layers = triton.cdiv(inputs, part), len(addresses_S2G)
    sums_PTSR = x_TI.new_empty(parts, rows, layers, MAX_RANK, dtype=torch.float32)
    _times_a[(parts, tiles.programs(parts * layers), layers)](
        sums_PTSR,
        x_TI,
        addresses_S2G,
        tiles.table_N4,
        tiles.count_1,
        inputs,
        x_TI.stride(0),
        addresses_S2G.stride(0),
        sums_PTSR.stride(0),
        sums_PTSR.stride(1),
        ROWS=TILE_ROWS,
        PART=part,
        INNER=_INNER,
        MAX_RANK=MAX_RANK,
        RANKS=RANKS_AT_ONCE,
        num_warps=4,
        num_stages=4,
    )
    return Projected(sums_PTSR, addresses_S2G)


def add_lora(x_TI: Tensor, y_TO: Tensor, addresses_12G: Tensor, tiles: Tiles) -> None:
    """Compute ``y[t] += x[t] @ A.T @ B.T`` with the A and B of the group of row t, for one linear layer."""
    add_projected(y_TO, project(x_TI, addresses_12G, tiles), tiles, x_TI.dtype)


def add_projected(y_TO: Tensor, projected: Projected, tiles: Tiles, dtype: torch.dtype) -> None:
    """Add h B.T to y, for a set of one linear layer. ``dtype`` is that of B; y may have a wider one."""
    sums_PTSR = projected.sums_PTSR
    outputs = y_TO.shape[1]
    blocks = triton.cdiv(outputs, _OUTER)
    _add_times_b[(blocks, tiles.programs(blocks))](
        y_TO,
        sums_PTSR,
        projected.addresses_S2G[0, 1],
        tiles.table_N4,
        tiles.count_1,
        outputs,
        y_TO.stride(0),
        sums_PTSR.stride(0),
        sums_PTSR.stride(1),
        OPERAND=operand(dtype),
        ROWS=TILE_ROWS,
        OUTER=_OUTER,
        RANKS=RANKS_AT_ONCE,
        PARTS=len(sums_PTSR),
        num_warps=4,
        num_stages=1,  # the loop over ranks is short, and its loads come from the cache of the device
    )


@triton.jit
def own_tiles(count):
    """Return the first of the tiles that a program computes, and the one after the last."""
    share = tl.cdiv(count, tl.num_programs(1))
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, count)


@triton.jit
def _times_a(
    sums,
    x,
    addresses,
    tiles,
    count,
    inputs,
    x_row,
    address_layer,
    sums_part,
    sums_row,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    INNER: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    part, layer = tl.program_id(0), tl.program_id(2)
    begin, stop = own_tiles(tl.load(count))
    for index in range(begin, stop):
        tile = tiles + 4 * index
        address = tl.load(addresses + layer * address_layer + tl.load(tile))
        if address != 0:
            first, end = tl.load(tile + 1), tl.load(tile + 2)
            rank = tl.load(tile + 3) // 8 * 8  # ranks are multiples of 8; this tells the compiler so
            a = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
            t = first + tl.arange(0, ROWS)
            row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
            for start in range(0, rank, RANKS):
                r = start + tl.arange(0, RANKS)
                inside_r = (r < rank)[None, :]
                total = tl.zeros([ROWS, RANKS], tl.float32)
                for step in range(0, PART, INNER):
                    k = part * PART + step + tl.arange(0, INNER)
                    inside_k = k < inputs
                    values = tl.load(x + row * x_row + k[None, :], mask=inside_t & inside_k[None, :], other=0.0)
                    weights = tl.load(
                        a + r[None, :] * inputs + k[:, None], mask=inside_k[:, None] & inside_r, other=0.0
                    )
                    total = tl.dot(values, weights, total)
                place = sums + part * sums_part + row * sums_row + layer * MAX_RANK + r[None, :]
                tl.store(place, total, mask=inside_t & inside_r)


@triton.jit
def times_b(
    sums,
    b,
    row,
    inside_t,
    n,
    inside_n,
    rank,
    sums_part,
    sums_row,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return h B.T, (ROWS, OUTER), where ``sums`` points to the layer's part of h. row and inside_t are (ROWS, 1)."""
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r = r < rank
        weights = tl.load(b + n[None, :] * rank + r[:, None], mask=inside_r[:, None] & inside_n[None, :], other=0.0)
        h = tl.zeros([ROWS, RANKS], tl.float32)
        for part in tl.static_range(PARTS):  # unrolled, so that all loads are under way at the same time
            place = sums + part * sums_part + row * sums_row + r[None, :]
            h += tl.load(place, mask=inside_t & inside_r[None, :], other=0.0)
        total = tl.dot(h.to(OPERAND), weights, total)
    return total


@triton.jit
def times_b_twice(
    sums,
    other_sums,
    b,
    other_b,
    row,
    inside_t,
    n,
    other_n,
    inside_n,
    rank,
    sums_part,
    sums_row,
    SAME: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute two products like :func:`times_b`; the loads of both overlap. SAME: both have the same h."""
    total = tl.zeros([ROWS, OUTER], tl.float32)
    other_total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r = r < rank
        inside_w = inside_r[:, None] & inside_n[None, :]
        weights = tl.load(b + n[None, :] * rank + r[:, None], mask=inside_w, other=0.0)
        other_weights = tl.load(other_b + other_n[None, :] * rank + r[:, None], mask=inside_w, other=0.0)
        inside_h = inside_t & inside_r[None, :]
        h = tl.zeros([ROWS, RANKS], tl.float32)
        other_h = tl.zeros([ROWS, RANKS], tl.float32)
        for part in tl.static_range(PARTS):
            place = part * sums_part + row * sums_row + r[None, :]
            h += tl.load(sums + place, mask=inside_h, other=0.0)
            if not SAME:
                other_h += tl.load(other_sums + place, mask=inside_h, other=0.0)
        if SAME:
            other_h = h
        total = tl.dot(h.to(OPERAND), weights, total)
        other_total = tl.dot(other_h.to(OPERAND), other_weights, other_total)
    return total, other_total


@triton.jit
def _add_times_b(
    y,
    sums,
    addresses,
    tiles,
    count,
    outputs,
    y_row,
    sums_part,
    sums_row,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    inside_n = n < outputs
    begin, stop = own_tiles(tl.load(count))
    for index in range(begin, stop):
        tile = tiles + 4 * index
        address = tl.load(addresses + tl.load(tile))
        if address != 0:
            first, end = tl.load(tile + 1), tl.load(tile + 2)
            rank = tl.load(tile + 3) // 8 * 8
            b = tl.multiple_of(address.to(tl.pointer_type(OPERAND)), 16)
            t = first + tl.arange(0, ROWS)
            row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
            place = y + row * y_row + n[None, :]
            inside = inside_t & inside_n[None, :]
            old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            new = old + times_b(
                sums, b, row, inside_t, n, inside_n, rank, sums_part, sums_row, OPERAND, ROWS, OUTER, RANKS, PARTS
            )
            tl.store(place, new.to(y.dtype.element_ty), mask=inside)
