"""Causal attention over packed sequences as Hopper kernels (Triton).

torch's variable-length kernel was written for the GPU generation before Hopper. Times in ms, forward and backward, with
32 query heads and 8 key/value heads of size 128:

                                  torch's          these
    32 sequences of 512 tokens    0.47 and 1.24    0.28 and 0.83
    one sequence of 8192 tokens   1.70 and 4.79    1.26 and 4.71

torch's backward also computes the gradients of keys and values for every query head in half precision and adds them up
afterwards; here they are added up in fp32. There are no atomic additions, so the same batch always gives the same bits.

The softmax is computed in base 2.

With a sliding window, tiles whose keys no query of a tile sees are skipped. An attention sink is one more score of a
head in the softmax; its weight is dropped. It is part of the denominator, from which the backward pass computes the
weights again, so that pass needs nothing else.

Where the sequences lie is in a table of tiles (see ``packed_attention.tile_table``): a captured pass serves any
sequences, because only the contents of the table change. Entries of zeros are skipped.

Shapes: T tokens, n tiles, H query heads, J key/value heads, D head dimension. All tensors are contiguous.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.model.decoder.tiles import TILE_ROWS

_LOG2_E = tl.constexpr(math.log2(math.e))


def attend(
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, (T, H, D), and the logarithms of the softmax's denominators, (H, T) fp32.

    window: how many tokens a token sees, itself included; 0: all.
    """
    rows, heads, size = q_THD.shape
    out_THD = torch.empty_like(q_THD)
    norm_HT = torch.empty(heads, rows, dtype=torch.float32, device=q_THD.device)
    _attend[(len(tiles_n3), heads)](
        q_THD,
        k_TJD,
        v_TJD,
        out_THD,
        norm_HT,
        tiles_n3,
        q_THD if sinks_H is None else sinks_H,  # without sinks it is not read
        rows,
        scale,
        HEADS=heads,
        GROUP=heads // k_TJD.shape[1],
        SIZE=size,
        TILE=TILE_ROWS,
        WINDOW=window,
        SINKS=sinks_H is not None,
        num_warps=4,
        num_stages=3,
    )
    return out_THD, norm_HT


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    norm_HT: Tensor,
    tiles_n3: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    rows, heads, size = q_THD.shape
    kv_heads = k_TJD.shape[1]
    tiles = len(tiles_n3)
    delta_HT = torch.empty_like(norm_HT)
    dq_THD, dk_TJD, dv_TJD = torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)
    _delta[(rows,)](
        dout_THD, out_THD, delta_HT, rows, HEADS=heads, ROOM=triton.next_power_of_2(heads), SIZE=size, num_warps=4
    )
    given = dout_THD, q_THD, k_TJD, v_TJD, norm_HT, delta_HT
    _keys_gradient[(tiles, kv_heads)](
        *given,
        dk_TJD,
        dv_TJD,
        tiles_n3,
        rows,
        scale,
        HEADS=heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        TILE=TILE_ROWS,
        WINDOW=window,
        num_warps=4,
        num_stages=2,
    )
    _queries_gradient[(tiles, heads)](
        *given,
        dq_THD,
        tiles_n3,
        rows,
        scale,
        HEADS=heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        TILE=TILE_ROWS,
        WINDOW=window,
        num_warps=4,
        num_stages=2,
    )
    return dq_THD, dk_TJD, dv_TJD


@triton.jit(do_not_specialize=["rows"])
def _attend(
    q,
    k,
    v,
    out,
    norm,
    tiles,
    sinks,
    rows,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(1)
    tile = tiles + 3 * tl.program_id(0)
    first, length, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    start = start // TILE * TILE  # changes nothing: it shows the compiler that starts are multiples of TILE
    if start >= length:
        return
    d = tl.arange(0, SIZE)
    t = start + tl.arange(0, TILE)
    own = t[:, None] * (HEADS * SIZE) + d[None, :]
    x = tl.load(q + (first * HEADS + head) * SIZE + own, mask=(t < length)[:, None], other=0.0)
    k += (first * (HEADS // GROUP) + head // GROUP) * SIZE
    v += (first * (HEADS // GROUP) + head // GROUP) * SIZE
    scale *= _LOG2_E
    highest = tl.full([TILE], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE], dtype=tl.float32)
    if SINKS:
        highest = tl.zeros([TILE], dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    result = tl.zeros([TILE, SIZE], dtype=tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    for n in range(begin, start, TILE):  # tiles before the own one: without a window, every query sees all their keys
        u = n + tl.arange(0, TILE)
        place = u[:, None] * (HEADS // GROUP * SIZE) + d[None, :]
        keys = tl.load(k + place)
        scores = tl.dot(x, tl.trans(keys)) * scale
        if WINDOW > 0:
            scores = tl.where(t[:, None] - u[None, :] < WINDOW, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = higher
        if WINDOW > 0:  # a query that has seen no key yet has −∞ here, and −∞ − −∞ would be NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + place)
        result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None])
        highest = higher
    place = t[:, None] * (HEADS // GROUP * SIZE) + d[None, :]  # the own tile: a query sees the keys up to itself
    keys = tl.load(k + place, mask=(t < length)[:, None], other=0.0)
    seen = t[:, None] >= t[None, :]
    if WINDOW > 0:
        seen = seen & (t[:, None] - t[None, :] < WINDOW)
    scores = tl.where(seen, tl.dot(x, tl.trans(keys)) * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    total = total * shrink + tl.sum(weights, 1)
    values = tl.load(v + place, mask=(t < length)[:, None], other=0.0)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None]) / total[:, None]
    highest = higher
    tl.store(out + (first * HEADS + head) * SIZE + own, result.to(out.dtype.element_ty), mask=(t < length)[:, None])
    tl.store(norm + head.to(tl.int64) * rows + first + t, (highest + tl.log2(total)) / _LOG2_E, mask=t < length)


@triton.jit(do_not_specialize=["rows"])
def _delta(dout, out, delta, rows, HEADS: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr):
    """Compute Σ_d dout · out for each token and head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ROOM)
    inside = head < HEADS
    place = row * (HEADS * SIZE) + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    left = tl.load(dout + place, mask=inside[:, None], other=0.0).to(tl.float32)
    right = tl.load(out + place, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * rows + row, tl.sum(left * right, 1), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _keys_gradient(
    dout,
    q,
    k,
    v,
    norm,
    delta,
    dk,
    dv,
    tiles,
    rows,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Compute the gradients of one block of keys and values, from all query heads that use it."""
    head = tl.program_id(1)
    # Begin with the first tiles of the sequences, which are last in the table: the most queries see their keys.
    tile = tiles + 3 * (tl.num_programs(0) - 1 - tl.program_id(0))
    first, length, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    start = start // TILE * TILE
    if start >= length:
        return
    d = tl.arange(0, SIZE)
    u = start + tl.arange(0, TILE)
    own = (first * (HEADS // GROUP) + head) * SIZE + u[:, None] * (HEADS // GROUP * SIZE) + d[None, :]
    inside_u = (u < length)[:, None]
    keys = tl.load(k + own, mask=inside_u, other=0.0)
    values = tl.load(v + own, mask=inside_u, other=0.0)
    q += (first * HEADS + head * GROUP) * SIZE
    dout += (first * HEADS + head * GROUP) * SIZE
    norm += (head * GROUP).to(tl.int64) * rows + first
    delta += (head * GROUP).to(tl.int64) * rows + first
    scale2 = scale * _LOG2_E
    keys_gradient = tl.zeros([TILE, SIZE], dtype=tl.float32)
    values_gradient = tl.zeros([TILE, SIZE], dtype=tl.float32)
    end = length
    if WINDOW > 0:
        end = tl.minimum(length, start + TILE - 1 + WINDOW)
    blocks = tl.cdiv(end - start, TILE)
    for i in range(0, GROUP * blocks):  # one loop, since nested loops over short sequences would mostly be start-up
        member = i // blocks
        t = start + (i % blocks) * TILE + tl.arange(0, TILE)
        inside_t = t < length
        place = member * SIZE + t[:, None] * (HEADS * SIZE) + d[None, :]
        x = tl.load(q + place, mask=inside_t[:, None], other=0.0)
        scores = tl.dot(keys, tl.trans(x)) * scale2
        log_total = tl.load(norm + member * rows.to(tl.int64) + t, mask=inside_t, other=float("inf")) * _LOG2_E
        seen = t[None, :] >= u[:, None]
        if WINDOW > 0:
            seen = seen & (t[None, :] - u[:, None] < WINDOW)
        weights = tl.where(seen, tl.exp2(scores - log_total[None, :]), 0.0)
        y = tl.load(dout + place, mask=inside_t[:, None], other=0.0)
        values_gradient = tl.dot(weights.to(y.dtype), y, values_gradient)
        mean = tl.load(delta + member * rows.to(tl.int64) + t, mask=inside_t, other=0.0)
        slope = weights * (tl.dot(values, tl.trans(y)) - mean[None, :])
        keys_gradient = tl.dot(slope.to(x.dtype), x, keys_gradient)
    tl.store(dk + own, (keys_gradient * scale).to(dk.dtype.element_ty), mask=inside_u)
    tl.store(dv + own, values_gradient.to(dv.dtype.element_ty), mask=inside_u)


@triton.jit(do_not_specialize=["rows"])
def _queries_gradient(
    dout,
    q,
    k,
    v,
    norm,
    delta,
    dq,
    tiles,
    rows,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head = tl.program_id(1)
    tile = tiles + 3 * tl.program_id(0)
    first, length, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    start = start // TILE * TILE
    if start >= length:
        return
    d = tl.arange(0, SIZE)
    t = start + tl.arange(0, TILE)
    own = (first * HEADS + head) * SIZE + t[:, None] * (HEADS * SIZE) + d[None, :]
    inside_t = (t < length)[:, None]
    x = tl.load(q + own, mask=inside_t, other=0.0)
    y = tl.load(dout + own, mask=inside_t, other=0.0)
    at = head.to(tl.int64) * rows + first + t
    log_total = tl.load(norm + at, mask=t < length, other=float("inf")) * _LOG2_E
    mean = tl.load(delta + at, mask=t < length, other=0.0)
    k += (first * (HEADS // GROUP) + head // GROUP) * SIZE
    v += (first * (HEADS // GROUP) + head // GROUP) * SIZE
    scale2 = scale * _LOG2_E
    gradient = tl.zeros([TILE, SIZE], dtype=tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    for n in range(begin, tl.minimum(start + TILE, length), TILE):
        u = n + tl.arange(0, TILE)
        place = u[:, None] * (HEADS // GROUP * SIZE) + d[None, :]
        inside_u = (u < length)[:, None]
        keys = tl.load(k + place, mask=inside_u, other=0.0)
        scores = tl.dot(x, tl.trans(keys)) * scale2
        seen = t[:, None] >= u[None, :]
        if WINDOW > 0:
            seen = seen & (t[:, None] - u[None, :] < WINDOW)
        weights = tl.where(seen, tl.exp2(scores - log_total[:, None]), 0.0)
        values = tl.load(v + place, mask=inside_u, other=0.0)
        slope = weights * (tl.dot(y, tl.trans(values)) - mean[:, None])
        gradient = tl.dot(slope.to(keys.dtype), keys, gradient)
    tl.store(dq + own, (gradient * scale).to(dq.dtype.element_ty), mask=inside_t)
