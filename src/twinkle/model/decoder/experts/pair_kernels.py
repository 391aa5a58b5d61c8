"""The LoRA of experts as CUDA kernels (Triton), for any mix of experts, requests and ranks, without the host.

Items are the rows of a batch, or its pairs of a row and an expert. Each has a key: ``expert · (G + 1) + group``, where
group G has no adapter. For rows, the expert is 0. Items of equal keys are a run; a run has one A and one B. The kernels
find the runs themselves: a program reads the keys of a tile of items and computes one run of it after the other. So
nothing about the routes has to be known on the host, and the sizes of the grids depend on the number of items alone.

A matrix is found by the address of its group, to which the place of its expert is added; an address of 0 means that the
group has no adapter here. A is (rank, wide) and B is (wide, rank), both row-major, one behind the other for all
experts. Each number of a result is computed by one program in a fixed order, so results are bit-equal in every replay.

Shapes: N items, G groups, R the largest rank, T rows, K experts of a row, S pairs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 8192  # up to this many items, tiles are small
# Up to so many items, runs may begin with so many items of a tile in one program. Of few items nearly each is a run of
# its own; of more, most programs would find that their items belong to a run that began earlier.
_STEPS = ((512, 1), (4096, 4), (_FEW, 16))
_ROWS_OF_A_PART = 512  # up to this many items, a long sum is divided among programs
_MOST_GROUPS = 32  # of an expert, that one program goes through
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Items:
    """Rows or pairs, ordered so that those of one group and expert are one run.

    ``row_N``: the row of each pair; None for rows. ``starts`` and ``ends``, by key: where a run begins and ends among
    the items, as int32; only the gradients of A and B need them.
    """

    key_N: Tensor  # int32
    groups: int  # G
    experts: int
    row_N: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None


@dataclass(frozen=True)
class Matrices:
    """The A or the B of all groups, or the fp32 matrices that collect their gradients."""

    addresses_G: Tensor  # int64, (G + 1,)
    ranks_G: Tensor  # int64, (G + 1,); multiples of 8
    rank: int  # the largest
    is_a: bool


def to_rank(items: Items, x: Tensor, matrices: Matrices, *, by_row: bool = False, parts: int = 1) -> Tensor:
    """Return ``x[n] @ (A.T or B)`` for each item, (N, R); 0 where there is no adapter, and beyond an adapter's rank.

    by_row: x has the rows of the items, instead of one row for each item. parts: divide the sums into so many; then the
    result is (parts, N, R) in fp32.
    """
    count, wide = len(items.key_N), x.shape[1]
    width = max(16, matrices.rank)
    rows, step, warps = _tile(count)
    inner, ranks = (256, 32) if rows == 16 else (128, min(64, triton.next_power_of_2(width)))
    ranks = min(ranks, triton.next_power_of_2(width))
    shape = (count, width) if parts == 1 else (parts, count, width)
    out = x.new_empty(shape, dtype=x.dtype if parts == 1 else torch.float32)
    _to_rank[(triton.cdiv(count, step), triton.cdiv(width, ranks), parts)](
        out,
        x,
        items.key_N,
        _rows_of(items, by_row),
        matrices.addresses_G,
        matrices.ranks_G,
        count,
        items.groups + 1,
        wide,
        width,
        triton.cdiv(wide, parts * inner) * inner,
        x.stride(0),
        x.stride(1),
        IS_A=matrices.is_a,
        BY_ROW=by_row,
        ROWS=rows,
        STEP=step,
        INNER=inner,
        RANKS=ranks,
        PRECISION=_precision(x),
        num_warps=warps,
        num_stages=3,
    )
    return out


def add_from_rank(items: Items, y: Tensor, h: Tensor, matrices: Matrices, *, by_row: bool = False) -> None:
    """Compute ``y[n] += h[n] @ (A or B.T)`` in place, for each item.

    h: (N, R), or (parts, N, R) whose sum it is. by_row: h has the rows of the items, instead of one row for each item.
    """
    count, wide = y.shape
    parts, part_stride = (1, 0) if h.dim() == 2 else (len(h), h.stride(0))
    rows, step, warps = _tile(count)
    outer = 128
    _add_from_rank[(triton.cdiv(count, step), triton.cdiv(wide, outer))](
        y,
        h,
        items.key_N,
        _rows_of(items, by_row),
        matrices.addresses_G,
        matrices.ranks_G,
        count,
        items.groups + 1,
        wide,
        y.stride(0),
        y.stride(1),
        h.stride(-2),
        part_stride,
        IS_A=matrices.is_a,
        BY_ROW=by_row,
        OPERAND=_TYPES[y.dtype],
        PARTS=parts,
        ROWS=rows,
        STEP=step,
        OUTER=outer,
        RANKS=min(32, triton.next_power_of_2(max(16, matrices.rank))),
        PRECISION=_precision(y),
        num_warps=warps,
        num_stages=2,
    )


def add_outer(
    items: Items,
    h: Tensor,
    wide_rows: Tensor,
    matrices: Matrices,
    *,
    h_by_row: bool = False,
    wide_by_row: bool = False,
    weights_N: Tensor | None = None,
) -> None:
    """Add the sum of ``h[n].T @ wide_rows[n]`` to A's gradient, or of its transpose to B's, for each run.

    weights_N: factors of the items. h_by_row, wide_by_row: as in :func:`to_rank`.
    """
    assert items.starts is not None and items.ends is not None, "made for training"
    wide = wide_rows.shape[1]
    ranks = min(64, triton.next_power_of_2(max(16, matrices.rank)))
    # Rows are many for each group. Of the pairs of an expert, a group has few or, in a captured pass, mostly none.
    step = 1 if items.row_N is None else min(_MOST_GROUPS, triton.next_power_of_2(max(1, items.groups)))
    grid = (items.experts * triton.cdiv(items.groups, step), triton.cdiv(wide, 64), triton.cdiv(matrices.rank, ranks))
    _add_outer[grid](
        h,
        wide_rows,
        _rows_of(items, h_by_row or wide_by_row),
        items.key_N if weights_N is None else weights_N,
        items.starts,
        items.ends,
        matrices.addresses_G,
        matrices.ranks_G,
        items.groups,
        wide,
        h.stride(0),
        wide_rows.stride(0),
        wide_rows.stride(1),
        IS_A=matrices.is_a,
        H_BY_ROW=h_by_row,
        WIDE_BY_ROW=wide_by_row,
        WEIGHTED=weights_N is not None,
        STEP=step,
        ROWS=32 if h.dtype == torch.float32 else 64,
        WIDE=64,
        RANKS=ranks,
        PRECISION=_precision(h),
        num_warps=4,
        num_stages=3,
    )


def add_up(pairs_SN: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return the sum of each row's pairs (T, N), each times its weight if there are any. The sums are in fp32."""
    rows, choices = place_TK.shape
    features = pairs_SN.shape[1]
    out_TN = pairs_SN.new_empty(rows, features)
    block = min(1024, triton.next_power_of_2(features))
    _add_up[(rows, triton.cdiv(features, block))](
        out_TN,
        pairs_SN,
        place_TK,
        place_TK if weights_TK is None else weights_TK,
        features,
        pairs_SN.stride(0),
        CHOICES=choices,
        WEIGHTED=weights_TK is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out_TN


def find_places(order_S: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Return the row of each ordered pair (S,), and the place of each (row, choice) among them (T, K), as int32."""
    count = len(order_S)
    row_S = torch.empty(count, dtype=torch.int32, device=order_S.device)
    place_TK = torch.empty(count // choices, choices, dtype=torch.int32, device=order_S.device)
    _find_places[(triton.cdiv(count, 512),)](row_S, place_TK, order_S, count, CHOICES=choices, BLOCK=512, num_warps=4)
    return row_S, place_TK


def _tile(count: int) -> tuple[int, int, int]:
    """Return the items of a tile, those with which a program's runs may begin, and the warps of a program."""
    if count > _FEW:
        return 64, 64, 4
    return 16, next(step for most, step in _STEPS if count <= most), 2


def parts_for(count: int, wide: int) -> int:
    """Return how many parts of a sum over ``wide`` features keep the device busy where there are few items."""
    return max(1, min(8, wide // 256)) if count <= _ROWS_OF_A_PART else 1


def _rows_of(items: Items, by_row: bool) -> Tensor:
    if not by_row:
        return items.key_N  # not read
    assert items.row_N is not None, "only pairs have rows"
    return items.row_N


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@triton.jit
def _first_run(keys, key_n, n, block, tile, ROWS: tl.constexpr):
    """Return where the first run begins at or behind ``block``; a run that began earlier in the tile is another's."""
    before = tl.load(keys + block - 1, mask=block > tile, other=-2)
    return tl.min(tl.where((n >= block) & (key_n != before), n, tile + ROWS))


@triton.jit(do_not_specialize=["count", "keys_of_expert"])
def _to_rank(
    out,
    x,
    keys,
    row_of,
    addresses,
    ranks,
    count,
    keys_of_expert,
    wide,
    width,
    share,
    x_row,
    x_column,
    IS_A: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0) * STEP
    tile = block // ROWS * ROWS
    n = tile + tl.arange(0, ROWS)
    key_n = tl.load(keys + n, mask=n < count, other=-1)
    source = n.to(tl.int64)
    if BY_ROW:
        source = tl.load(row_of + n, mask=n < count, other=0).to(tl.int64)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    begin = tl.program_id(2) * share
    out += tl.program_id(2).to(tl.int64) * count * width
    stop = tl.minimum(block + STEP, count)
    at = _first_run(keys, key_n, n, block, tile, ROWS)
    while at < stop:
        key = tl.load(keys + at)
        end = tl.min(tl.where((n > at) & (key_n != key), n, tile + ROWS))
        inside = ((n >= at) & (n < end))[:, None]
        expert = key // keys_of_expert
        group = key - expert * keys_of_expert
        address = tl.load(addresses + group)
        rank = tl.load(ranks + group).to(tl.int32) // 8 * 8  # ranks are multiples of 8; this tells the compiler so
        nothing = (address == 0) | (tl.program_id(1) * RANKS >= rank)
        last = tl.where(nothing, begin, tl.minimum(begin + share, wide))
        weights = (
            tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16) + expert.to(tl.int64) * rank * wide
        )
        total = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(begin, last, INNER):
            k = start + tl.arange(0, INNER)
            place = x + source[:, None] * x_row + k[None, :] * x_column
            values = tl.load(place, mask=inside & (k < last)[None, :], other=0.0)
            place = k[:, None] + r[None, :] * wide if IS_A else k[:, None] * rank + r[None, :]
            factors = tl.load(weights + place, mask=(k < last)[:, None] & (r < rank)[None, :], other=0.0)
            total = tl.dot(values, factors, total, input_precision=PRECISION)
        place = out + n.to(tl.int64)[:, None] * width + r[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside & (r < width)[None, :])
        at = end


@triton.jit(do_not_specialize=["count", "keys_of_expert"])
def _add_from_rank(
    y,
    h,
    keys,
    row_of,
    addresses,
    ranks,
    count,
    keys_of_expert,
    wide,
    y_row,
    y_column,
    h_row,
    h_part,
    IS_A: tl.constexpr,
    BY_ROW: tl.constexpr,
    OPERAND: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0) * STEP
    tile = block // ROWS * ROWS
    n = tile + tl.arange(0, ROWS)
    key_n = tl.load(keys + n, mask=n < count, other=-1)
    source = n.to(tl.int64)
    if BY_ROW:
        source = tl.load(row_of + n, mask=n < count, other=0).to(tl.int64)
    o = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    inside_o = (o < wide)[None, :]
    stop = tl.minimum(block + STEP, count)
    at = _first_run(keys, key_n, n, block, tile, ROWS)
    while at < stop:
        key = tl.load(keys + at)
        end = tl.min(tl.where((n > at) & (key_n != key), n, tile + ROWS))
        expert = key // keys_of_expert
        group = key - expert * keys_of_expert
        address = tl.load(addresses + group)
        inside = ((n >= at) & (n < end) & (address != 0))[:, None]
        rank = tl.load(ranks + group).to(tl.int32) // 8 * 8
        weights = tl.multiple_of(address.to(tl.pointer_type(OPERAND)), 16)
        weights += expert.to(tl.int64) * rank * wide
        total = tl.zeros([ROWS, OUTER], tl.float32)
        for start in range(0, tl.where(address == 0, 0, rank), RANKS):
            r = start + tl.arange(0, RANKS)
            inside_r = r < rank
            values = tl.zeros([ROWS, RANKS], tl.float32)
            for part in tl.static_range(PARTS):
                place = h + part * h_part + source[:, None] * h_row + r[None, :]
                values += tl.load(place, mask=inside & inside_r[None, :], other=0.0).to(tl.float32)
            place = r[:, None] * wide + o[None, :] if IS_A else r[:, None] + o[None, :] * rank
            factors = tl.load(weights + place, mask=inside_r[:, None] & inside_o, other=0.0)
            total = tl.dot(values.to(OPERAND), factors, total, input_precision=PRECISION)
        place = y + n.to(tl.int64)[:, None] * y_row + o[None, :] * y_column
        total += tl.load(place, mask=inside & inside_o, other=0.0).to(tl.float32)
        tl.store(place, total.to(y.dtype.element_ty), mask=inside & inside_o)
        at = end


@triton.jit(do_not_specialize=["groups"])
def _add_outer(
    h,
    wide_rows,
    row_of,
    factors,
    starts,
    ends,
    addresses,
    ranks,
    groups,
    wide,
    h_row,
    wide_row,
    wide_column,
    IS_A: tl.constexpr,
    H_BY_ROW: tl.constexpr,
    WIDE_BY_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    steps = (groups + STEP - 1) // STEP
    expert = tl.program_id(0) // steps
    g = (tl.program_id(0) - expert * steps) * STEP + tl.arange(0, STEP)
    keys = expert * (groups + 1) + g
    has_items = tl.load(starts + keys, mask=g < groups, other=0) < tl.load(ends + keys, mask=g < groups, other=0)
    found = has_items & (tl.load(addresses + g, mask=g < groups, other=0) != 0)
    o = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    r = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    inside_o = (o < wide)[None, :]
    group = tl.min(tl.where(found, g, groups))
    while group < groups:
        first, end = tl.load(starts + expert * (groups + 1) + group), tl.load(ends + expert * (groups + 1) + group)
        rank = tl.load(ranks + group).to(tl.int32) // 8 * 8
        gradient = tl.multiple_of(tl.load(addresses + group).to(tl.pointer_type(tl.float32)), 16)
        gradient += expert.to(tl.int64) * rank * wide
        inside_r = (r < rank)[None, :]
        total = tl.zeros([RANKS, WIDE], tl.float32)
        for start in range(first, tl.where(tl.program_id(2) * RANKS < rank, end, first), ROWS):
            n = start + tl.arange(0, ROWS)
            inside = n < end
            row = n.to(tl.int64)
            if H_BY_ROW or WIDE_BY_ROW:
                row = tl.load(row_of + n, mask=inside, other=0).to(tl.int64)
            h_source = row if H_BY_ROW else n.to(tl.int64)
            wide_source = row if WIDE_BY_ROW else n.to(tl.int64)
            left = tl.load(h + h_source[:, None] * h_row + r[None, :], mask=inside[:, None] & inside_r, other=0.0)
            if WEIGHTED:
                factor = tl.load(factors + n, mask=inside, other=0.0).to(tl.float32)
                left = (left.to(tl.float32) * factor[:, None]).to(h.dtype.element_ty)
            place = wide_rows + wide_source[:, None] * wide_row + o[None, :] * wide_column
            right = tl.load(place, mask=inside[:, None] & inside_o, other=0.0)
            total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
        if IS_A:
            place = gradient + r[:, None] * wide + o[None, :]
            inside_2 = (r < rank)[:, None] & inside_o
            tl.store(place, tl.load(place, mask=inside_2, other=0.0) + total, mask=inside_2)
        else:
            place = gradient + o[:, None] * rank + r[None, :]
            inside_2 = (o < wide)[:, None] & inside_r
            tl.store(place, tl.load(place, mask=inside_2, other=0.0) + tl.trans(total), mask=inside_2)
        group = tl.min(tl.where(found & (g > group), g, groups))


@triton.jit
def _add_up(
    out,
    pairs,
    places,
    weights,
    features,
    pair_stride,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + row * CHOICES + choice).to(tl.int64)
        values = tl.load(pairs + place * pair_stride + f, mask=f < features, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + row * CHOICES + choice).to(tl.float32)
        total += values
    tl.store(out + row * features + f, total.to(out.dtype.element_ty), mask=f < features)


@triton.jit(do_not_specialize=["count"])
def _find_places(rows, places, order, count, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(order + n, mask=n < count, other=0)
    tl.store(rows + n, (at // CHOICES).to(tl.int32), mask=n < count)
    tl.store(places + at, n, mask=n < count)
