"""LoRA on a few rows of many versions as CUDA kernels (Triton): first h = x A.T, then y += h B.T.

Rows are cut into tiles, each of one version. A grid has at most ``_PROGRAMS`` programs; where there are more tiles, a
program computes several. Few rows mean few tiles, each of which has to read a wide matrix, so the first product is also
split along its inner dimension into parts that run in parallel. The program whose part is done last adds the fp32 sums
of all parts, always in the same order.

Linear layers that have the same input form a set, whose products with A are one launch.

A program waits for memory most of its time, so loads depend on as few others as possible: what describes a tile, and
the addresses of its A and B, are found by the number of the tile and loaded early, then everything else at once.

Where there are many rows, tiles of the second product have 32 rows, so that B is read less often.

Shapes: T rows, P parts, S linear layers of a set, R the largest rank, N tiles, E pieces of memory. A is (rank, inputs)
and B is (outputs, rank), both row-major and found by their address; address 0 means no adapter.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.sampler.torch_sampler.early_start_kernels import launch_options, let_next_start, wait_for_previous

MAX_RANK = 128
RANKS_AT_ONCE = 32
TILE_ROWS_OF_A = 16  # rows; the smallest tile that tensor cores accept
_MANY_ROWS = 128
_OUTER = 64  # outputs of a program
_MOST_LAYERS = 4  # of a set
_PROGRAMS = 2112  # 16 for each multiprocessor of a large device
_PROGRAMS_OF_A = 396  # 3 for each: so many of the first product run at once
_COPIED_AT_ONCE, _PROGRAMS_OF_A_PIECE = 4096, 16  # elements, and programs that share them
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """The rows of a pass in tiles of one version each. Together they cover all rows, with or without adapter.

    There can be as many tiles as rows, so the table has at least one entry for each row of the pass.
    """

    rows: int  # of a full tile
    table_N4: Tensor  # int32: first row, end of the version's rows, rank, first column of h
    count_1: Tensor  # how many tiles are in use; int32, on the device
    most: int  # the largest number of tiles in usual passes; there may be more

    def programs(self, others: int) -> int:
        """Return how many programs share the tiles in a grid whose other dimensions have ``others`` programs."""
        return max(1, min(self.most, _PROGRAMS // others))


@dataclass(frozen=True)
class Tiling:
    """The tiles of both products of a pass. Addresses of A are in the order of ``of_a``, those of B of ``of_b``.

    Two launches of one tiling must not run at the same time, because they count in the same place.
    """

    of_a: Tiles
    of_b: Tiles
    done_NS: Tensor  # how many parts of x A.T are done, by tile and layer of a set; int32. Zero between launches


@dataclass(frozen=True)
class Projected:
    """x A.T for a set of linear layers."""

    # Of the type of x. The numbers of a row begin at the first column of its tile; other columns, and rows without
    # adapter, are undefined.
    h_TSR: Tensor
    addresses_S2N: Tensor
    tiles: Tiles  # of the second product


def tile_rows_of_b(rows: int) -> int:
    """Return the rows of a tile of the second product, in a pass of so many rows."""
    return 16 if rows <= _MANY_ROWS else 32


def usual_tiles(rows: int, tile_rows: int) -> int:
    """Return the largest number of tiles in usual passes: full ones, and a few that are not full."""
    return min(rows, triton.cdiv(rows, tile_rows) + 16)


def new_counters(tiles: int) -> Tensor:
    """Return zeros for :attr:`Tiling.done_NS`, on the host."""
    return torch.zeros(tiles, _MOST_LAYERS, dtype=torch.int32)


def operand(dtype: torch.dtype) -> tl.dtype:
    return _OPERANDS[dtype]


def project(x_TI: Tensor, addresses_S2N: Tensor, tiling: Tiling) -> Projected:
    """Compute x A.T for the linear layers of a set."""
    (rows, inputs), layers, tiles = x_TI.shape, len(addresses_S2N), tiling.of_a
    assert layers <= _MOST_LAYERS, layers
    most_parts, inner = (16, 128) if rows <= _MANY_ROWS else (8, 256)  # the fastest on an H200
    at_once = _PROGRAMS_OF_A // (triton.cdiv(rows, tiles.rows) * layers)
    part = triton.cdiv(triton.cdiv(inputs, min(most_parts, max(1, at_once))), inner) * inner
    parts = triton.cdiv(inputs, part)
    h_TSR = x_TI.new_empty(rows, layers, MAX_RANK)
    sums_PTSR = x_TI.new_empty(parts if parts > 1 else 0, rows, layers, MAX_RANK, dtype=torch.float32)
    _times_a[(parts, tiles.programs(parts * layers), layers)](
        h_TSR,
        sums_PTSR,
        tiling.done_NS,
        x_TI,
        addresses_S2N,
        tiles.table_N4,
        tiles.count_1,
        inputs,
        x_TI.stride(0),
        addresses_S2N.stride(0),
        h_TSR.stride(0),
        sums_PTSR.stride(0),
        tiling.done_NS.stride(0),
        ROWS=tiles.rows,
        PARTS=parts,
        PART=part,
        INNER=inner,
        MAX_RANK=MAX_RANK,
        RANKS=RANKS_AT_ONCE,
        num_warps=4,
        num_stages=4,
    )
    return Projected(h_TSR, addresses_S2N, tiling.of_b)


def add_lora(x_TI: Tensor, y_TO: Tensor, addresses_12N: Tensor, tiling: Tiling) -> None:
    """Compute ``y[t] += x[t] @ A.T @ B.T`` with the A and B of the tile of row t, for one linear layer."""
    add_projected(y_TO, project(x_TI, addresses_12N, tiling))


def add_projected(y_TO: Tensor, projected: Projected, early: bool = False) -> None:
    """Add h B.T to y, for a set of one linear layer. y may have a wider type than h and B.

    early: start this kernel early (see ``early_start_kernels``).
    """
    tiles = projected.tiles
    h_TSR = projected.h_TSR
    outputs = y_TO.shape[1]
    blocks = triton.cdiv(outputs, _OUTER)
    _add_times_b[(blocks, tiles.programs(blocks))](
        y_TO,
        h_TSR,
        projected.addresses_S2N[0, 1],
        tiles.table_N4,
        tiles.count_1,
        outputs,
        y_TO.stride(0),
        h_TSR.stride(0),
        ROWS=tiles.rows,
        OUTER=_OUTER,
        RANKS=RANKS_AT_ONCE,
        num_warps=4,
        num_stages=1,  # the loop over ranks is short, and its loads come from the cache of the device
        **launch_options(early),
    )


def copy_pieces(table_E3: Tensor, like: Tensor) -> None:
    """Copy pieces of memory, whose elements have the type of ``like``.

    table: the address of a piece, the address of its copy, and the number of elements, a multiple of 8; int64, on the
    device. The addresses are multiples of 16.
    """
    _copy[(len(table_E3), _PROGRAMS_OF_A_PIECE)](table_E3, like, BLOCK=_COPIED_AT_ONCE, num_warps=4)


@triton.jit
def load_tile(tiles, index):
    """Return the first row of a tile, the end of its version's rows, the rank, and the first column of h."""
    place = tiles + 4 * index
    # Ranks and columns are multiples of 8; the divisions tell the compiler so.
    return tl.load(place), tl.load(place + 1), tl.load(place + 2) // 8 * 8, tl.load(place + 3) // 8 * 8


@triton.jit
def _times_a(
    h,
    sums,
    done,
    x,
    addresses,
    tiles,
    count,
    inputs,
    x_row,
    address_layer,
    h_row,
    sums_part,
    done_tile,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    INNER: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    part, layer = tl.program_id(0), tl.program_id(2)
    all_tiles = tl.load(count)
    addresses += layer * address_layer
    next_address = tl.load(addresses + tl.program_id(1))
    next_first, next_end, next_rank, next_column = load_tile(tiles, tl.program_id(1))
    for index in range(tl.program_id(1), all_tiles, tl.num_programs(1)):
        address, first, end, rank, column = next_address, next_first, next_end, next_rank, next_column
        following = tl.minimum(index + tl.num_programs(1), all_tiles - 1)
        next_address = tl.load(addresses + following)
        next_first, next_end, next_rank, next_column = load_tile(tiles, following)
        if address != 0:
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
                place = row * h_row + layer * MAX_RANK + column + r[None, :]
                if PARTS == 1:
                    tl.store(h + place, total.to(h.dtype.element_ty), mask=inside_t & inside_r)
                else:
                    tl.store(sums + part * sums_part + place, total, mask=inside_t & inside_r)
            if PARTS > 1:
                counter = done + index * done_tile + layer
                tl.debug_barrier()  # all threads have stored their sums before one of them says so
                if tl.atomic_add(counter, 1) == PARTS - 1:
                    for start in range(0, rank, RANKS):
                        r = start + tl.arange(0, RANKS)
                        inside = inside_t & (r < rank)[None, :]
                        place = row * h_row + layer * MAX_RANK + column + r[None, :]
                        total = tl.zeros([ROWS, RANKS], tl.float32)
                        for other in tl.static_range(PARTS):  # unrolled: all loads are under way at the same time
                            # Not from the cache of this multiprocessor, which does not see what others store.
                            total += tl.load(
                                sums + other * sums_part + place, mask=inside, other=0.0, cache_modifier=".cg"
                            )
                        tl.store(h + place, total.to(h.dtype.element_ty), mask=inside)
                    tl.store(counter, 0)


@triton.jit
def _times_b(
    h,
    b,
    row,
    inside_t,
    n,
    inside_n,
    rank,
    h_row,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return h B.T, (ROWS, OUTER). row and inside_t are (ROWS, 1)."""
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r = r < rank
        weights = tl.load(b + n[None, :] * rank + r[:, None], mask=inside_r[:, None] & inside_n[None, :], other=0.0)
        h_part = tl.load(h + row * h_row + r[None, :], mask=inside_t & inside_r[None, :], other=0.0)
        total = tl.dot(h_part, weights, total)
    return total


@triton.jit
def times_b_twice(
    h,
    other_h,
    address,
    other_address,
    row,
    inside_t,
    n,
    other_n,
    inside_n,
    rank,
    h_row,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return two products h B.T, (ROWS, OUTER) each, whose loads overlap. Without adapter a product is 0.

    ``h`` and ``other_h`` point to the layers' parts of h; row and inside_t are (ROWS, 1).
    """
    b = tl.multiple_of(address.to(tl.pointer_type(h.dtype.element_ty)), 16)
    other_b = tl.multiple_of(other_address.to(tl.pointer_type(h.dtype.element_ty)), 16)
    total = tl.zeros([ROWS, OUTER], tl.float32)
    other_total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        inside_r, other_inside_r = (r < rank) & (address != 0), (r < rank) & (other_address != 0)
        at, other_at = n[None, :] * rank + r[:, None], other_n[None, :] * rank + r[:, None]
        weights = tl.load(b + at, mask=inside_r[:, None] & inside_n[None, :], other=0.0)
        other_weights = tl.load(other_b + other_at, mask=other_inside_r[:, None] & inside_n[None, :], other=0.0)
        place = row * h_row + r[None, :]
        h_part = tl.load(h + place, mask=inside_t & inside_r[None, :], other=0.0)
        other_h_part = tl.load(other_h + place, mask=inside_t & other_inside_r[None, :], other=0.0)
        total = tl.dot(h_part, weights, total)
        other_total = tl.dot(other_h_part, other_weights, other_total)
    return total, other_total


@triton.jit
def _add_times_b(
    y,
    h,
    addresses,
    tiles,
    count,
    outputs,
    y_row,
    h_row,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    inside_n = n < outputs
    all_tiles = tl.load(count)
    next_address = tl.load(addresses + tl.program_id(1))
    next_first, next_end, next_rank, next_column = load_tile(tiles, tl.program_id(1))
    wait_for_previous(EARLY)
    for index in range(tl.program_id(1), all_tiles, tl.num_programs(1)):
        address, first, end, rank, column = next_address, next_first, next_end, next_rank, next_column
        following = tl.minimum(index + tl.num_programs(1), all_tiles - 1)
        next_address = tl.load(addresses + following)
        next_first, next_end, next_rank, next_column = load_tile(tiles, following)
        if address != 0:
            b = tl.multiple_of(address.to(tl.pointer_type(h.dtype.element_ty)), 16)
            t = first + tl.arange(0, ROWS)
            row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
            place = y + row * y_row + n[None, :]
            inside = inside_t & inside_n[None, :]
            old = tl.load(place, mask=inside, other=0.0)
            new = old + _times_b(h + column, b, row, inside_t, n, inside_n, rank, h_row, ROWS, OUTER, RANKS)
            tl.store(place, new.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _copy(table, like, BLOCK: tl.constexpr):
    place = table + 3 * tl.program_id(0)
    pointer = tl.pointer_type(like.dtype.element_ty)
    source = tl.multiple_of(tl.load(place).to(pointer), 16)
    target = tl.multiple_of(tl.load(place + 1).to(pointer), 16)
    count = tl.load(place + 2) // 8 * 8  # the division tells the compiler that it is such a multiple
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < count
        tl.store(target + k, tl.load(source + k, mask=inside), mask=inside)
