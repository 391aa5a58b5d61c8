"""CUDA kernels (Triton) for the small steps of a decoder layer, for one new token of each sequence.

Model code takes some twenty launches for them, each of which takes longer than its work. The second products of LoRA
(h B.T, see ``slot_lora_kernels``) are part of these kernels where they follow directly.

Shapes: T rows, H features, J key/value heads, D head dimension, I features inside the feed-forward block, S linear
layers of a set, R the largest rank, N tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.early_start_kernels import launch_options, let_next_start, wait_for_previous
from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import (
    RANKS_AT_ONCE,
    Projected,
    load_tile,
    operand,
    times_b_twice,
)

_TILE_ROWS = 16  # of a tile without adapters
_GATED_AT_ONCE = 64  # features of the feed-forward block that a program computes


def add_and_norm(
    residual_TH: Tensor, delta_TH: Tensor | None, weight_H: Tensor, eps: float, early: bool = False
) -> Tensor:
    """Add ``delta`` to the residual in place, and return its RMS norm times the weight."""
    rows, size = residual_TH.shape
    out_TH = torch.empty_like(residual_TH)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](
        residual_TH,
        residual_TH if delta_TH is None else delta_TH,
        weight_H,
        out_TH,
        size,
        0 if delta_TH is None else delta_TH.stride(0),
        eps,
        ADD=delta_TH is not None,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(early),
    )
    return out_TH


@triton.jit
def _add_and_norm(
    residual, delta, weight, out, size, delta_row, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    start = row * size
    h = tl.arange(0, BLOCK)
    inside = h < size
    factor = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    value = tl.load(residual + start + h, mask=inside, other=0.0)
    if ADD:
        more = tl.load(delta + row * delta_row + h, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + start + h, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(out + start + h, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of the queries and keys of each head, which some families have."""

    query_D: Tensor
    key_D: Tensor
    eps: float


def rotate_and_store(
    qkv_TO: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    table_TB: Tensor,
    norms: HeadNorms | None,
    projected: Projected | None,
    early: bool = False,
) -> Tensor:
    """Return the queries, (T, H, D), with LoRA and rotated by position; write such keys, and the values, to the cache.

    qkv: queries, keys and values of all heads, side by side. keys and values: the cache, (blocks, BLOCK, J, D).
    """
    rows, kv_heads, width = len(qkv_TO), keys.shape[2], keys.shape[3]
    heads = qkv_TO.shape[1] // width - 2 * kv_heads
    q_THD = qkv_TO.new_empty(rows, heads, width)
    tiles = None if projected is None else projected.tiles
    h = qkv_TO if projected is None else projected.h_TSR
    addresses = qkv_TO if projected is None else projected.addresses_S2N
    blocks = heads + 2 * kv_heads
    _rotate_and_store[(blocks, triton.cdiv(rows, _TILE_ROWS) if tiles is None else tiles.programs(blocks))](
        q_THD,
        qkv_TO,
        cos_TD,
        sin_TD,
        keys,
        values,
        positions_T,
        table_TB,
        cos_TD if norms is None else norms.query_D,
        cos_TD if norms is None else norms.key_D,
        0.0 if norms is None else norms.eps,
        h,
        addresses,
        positions_T if tiles is None else tiles.table_N4,
        positions_T if tiles is None else tiles.count_1,
        rows,
        qkv_TO.stride(0),
        cos_TD.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        table_TB.stride(0),
        0 if projected is None else addresses.stride(0),
        0 if projected is None else addresses.stride(1),
        0 if projected is None else h.stride(0),
        0 if projected is None else h.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        BLOCK=BLOCK,
        NORMS=norms is not None,
        LORA=projected is not None,
        OPERAND=operand(qkv_TO.dtype),
        ROWS=_TILE_ROWS if tiles is None else tiles.rows,
        RANKS=RANKS_AT_ONCE,
        num_warps=4 if tiles is None or tiles.rows <= 16 else 8,  # eight arrays of (rows, half a head) are alive
        num_stages=1,  # the loop over ranks is short, and its loads come from the cache of the device
        **launch_options(early),
    )
    return q_THD


@triton.jit(do_not_specialize=["rows"])  # compiled once for all graphs
def _rotate_and_store(
    q,
    qkv,
    cos,
    sin,
    keys,
    values,
    positions,
    table,
    query_norm,
    key_norm,
    eps,
    h,
    addresses,
    tiles,
    count,
    rows,
    qkv_row,
    cos_row,
    key_block,
    key_token,
    value_block,
    value_token,
    table_row,
    address_layer,
    address_kind,
    h_row,
    h_layer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    LORA: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    WIDTH: tl.constexpr = 2 * HALF
    head = tl.program_id(0)
    layer = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)  # 0: queries, 1: keys, 2: values
    own = head - tl.where(layer == 2, HEADS + KV_HEADS, tl.where(layer == 1, HEADS, 0))  # the head within its layer
    d = tl.arange(0, HALF)
    all_d = d < HALF
    all_tiles = tl.cdiv(rows, ROWS)
    if LORA:
        all_tiles = tl.load(count)
        addresses += layer * address_layer + address_kind
        next_address = tl.load(addresses + tl.program_id(1))
        next_first, next_end, next_rank, next_column = load_tile(tiles, tl.program_id(1))
    wait_for_previous(EARLY)
    for index in range(tl.program_id(1), all_tiles, tl.num_programs(1)):
        first, end = index * ROWS, rows
        if LORA:
            address, first, end, rank, column = next_address, next_first, next_end, next_rank, next_column
            following = tl.minimum(index + tl.num_programs(1), all_tiles - 1)
            next_address = tl.load(addresses + following)
            next_first, next_end, next_rank, next_column = load_tile(tiles, following)
        t = first + tl.arange(0, ROWS)
        row, inside = t.to(tl.int64)[:, None], (t < end)[:, None]
        place = qkv + row * qkv_row + head * WIDTH + d[None, :]
        low = tl.load(place, mask=inside, other=0.0)
        high = tl.load(place + HALF, mask=inside, other=0.0)
        if LORA:
            own_h = h + layer * h_layer + column
            n = own * WIDTH + d
            more_low, more_high = times_b_twice(
                own_h,
                own_h,
                address,
                address,
                row,
                inside,
                n,
                n + HALF,
                all_d,
                rank,
                h_row,
                ROWS,
                HALF,
                RANKS,
            )
            low, high = (low + more_low).to(OPERAND), (high + more_high).to(OPERAND)
        low, high = low.to(tl.float32), high.to(tl.float32)
        if layer < 2:
            if NORMS:
                scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / WIDTH + eps)[:, None]
                norm = query_norm + d
                if layer == 1:
                    norm = key_norm + d
                low = (low * scale * tl.load(norm).to(tl.float32)[None, :]).to(OPERAND).to(tl.float32)
                high = (high * scale * tl.load(norm + HALF).to(tl.float32)[None, :]).to(OPERAND).to(tl.float32)
            turn = row * cos_row + d[None, :]
            low_cos = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
            low_sin = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
            high_cos = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
            high_sin = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
            low, high = low * low_cos - high * low_sin, high * high_cos + low * high_sin
        low_out, high_out = low.to(OPERAND), high.to(OPERAND)
        if layer == 0:
            query_at = q + (row * HEADS + own) * WIDTH + d[None, :]
            tl.store(query_at, low_out, mask=inside)
            tl.store(query_at + HALF, high_out, mask=inside)
        else:
            position = tl.load(positions + t, mask=t < end, other=0)
            block = tl.load(table + t.to(tl.int64) * table_row + position // BLOCK, mask=t < end, other=0).to(tl.int64)
            offset = position % BLOCK
            if layer == 1:
                key_at = keys + (block * key_block + offset * key_token + own * WIDTH)[:, None] + d[None, :]
                tl.store(key_at, low_out, mask=inside)
                tl.store(key_at + HALF, high_out, mask=inside)
            else:
                value_at = values + (block * value_block + offset * value_token + own * WIDTH)[:, None] + d[None, :]
                tl.store(value_at, low_out, mask=inside)
                tl.store(value_at + HALF, high_out, mask=inside)


def gated(gate_and_up_TO: Tensor, projected: Projected | None, early: bool = False) -> Tensor:
    """Add LoRA, and return silu(gate) · up, (T, I); gate and up are side by side."""
    rows, size = len(gate_and_up_TO), gate_and_up_TO.shape[1] // 2
    out_TI = gate_and_up_TO.new_empty(rows, size)
    tiles = None if projected is None else projected.tiles
    h = gate_and_up_TO if projected is None else projected.h_TSR
    addresses = gate_and_up_TO if projected is None else projected.addresses_S2N
    blocks = triton.cdiv(size, _GATED_AT_ONCE)
    _gated[(blocks, triton.cdiv(rows, _TILE_ROWS) if tiles is None else tiles.programs(blocks))](
        out_TI,
        gate_and_up_TO,
        h,
        addresses,
        out_TI if tiles is None else tiles.table_N4,
        out_TI if tiles is None else tiles.count_1,
        rows,
        size,
        gate_and_up_TO.stride(0),
        0 if projected is None else addresses.stride(0),
        0 if projected is None else addresses.stride(1),
        0 if projected is None else h.stride(0),
        0 if projected is None else h.stride(1),
        LORA=projected is not None,
        OPERAND=operand(gate_and_up_TO.dtype),
        ROWS=_TILE_ROWS if tiles is None else tiles.rows,
        OUTER=_GATED_AT_ONCE,
        RANKS=RANKS_AT_ONCE,
        num_warps=4,
        num_stages=1,  # the loop over ranks is short, and its loads come from the cache of the device
        **launch_options(early),
    )
    return out_TI


@triton.jit(do_not_specialize=["rows"])  # compiled once for all graphs
def _gated(
    out,
    gate_and_up,
    h,
    addresses,
    tiles,
    count,
    rows,
    size,
    in_row,
    address_layer,
    address_kind,
    h_row,
    h_layer,
    LORA: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    inside_n = n < size
    all_tiles = tl.cdiv(rows, ROWS)
    if LORA:
        all_tiles = tl.load(count)
        addresses += address_kind
        next_gate_address = tl.load(addresses + tl.program_id(1))
        next_up_address = tl.load(addresses + address_layer + tl.program_id(1))
        next_first, next_end, next_rank, next_column = load_tile(tiles, tl.program_id(1))
    wait_for_previous(EARLY)
    for index in range(tl.program_id(1), all_tiles, tl.num_programs(1)):
        first, end = index * ROWS, rows
        if LORA:
            gate_address, up_address = next_gate_address, next_up_address
            first, end, rank, column = next_first, next_end, next_rank, next_column
            following = tl.minimum(index + tl.num_programs(1), all_tiles - 1)
            next_gate_address = tl.load(addresses + following)
            next_up_address = tl.load(addresses + address_layer + following)
            next_first, next_end, next_rank, next_column = load_tile(tiles, following)
        t = first + tl.arange(0, ROWS)
        row, inside_t = t.to(tl.int64)[:, None], (t < end)[:, None]
        inside = inside_t & inside_n[None, :]
        place = gate_and_up + row * in_row + n[None, :]
        gate = tl.load(place, mask=inside, other=0.0)
        up = tl.load(place + size, mask=inside, other=0.0)
        if LORA:
            more_gate, more_up = times_b_twice(
                h + column,
                h + h_layer + column,
                gate_address,
                up_address,
                row,
                inside_t,
                n,
                n,
                inside_n,
                rank,
                h_row,
                ROWS,
                OUTER,
                RANKS,
            )
            gate, up = (gate + more_gate).to(OPERAND), (up + more_up).to(OPERAND)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(out + row * size + n[None, :], value.to(OPERAND), mask=inside)
