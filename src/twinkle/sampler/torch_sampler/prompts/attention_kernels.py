"""CUDA kernel (Triton) for prompts: rows of many sequences attend to the cached keys and values of their sequences.

The rows' own keys and values are in the cache already. The grid depends only on the number of tiles and heads, so one
captured graph serves any layout: the tiles are a table on the device, and programs of unused tiles return at once. The
softmax is computed in base 2.

Shapes: T rows, H query heads, J key/value heads, D head dimension, n tiles.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.prompts.tables import ATTENTION_ROWS

_KEYS_AT_ONCE = 64
_LOG2_E = tl.constexpr(math.log2(math.e))


def attend_spans(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles_n4: Tensor,
    blocks: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention outputs, (T, H, D), undefined in rows without a tile.

    keys and values are (blocks, BLOCK, J, D). tiles_n4 and blocks: see :class:`~.tables.Bucket`. A row sees the keys of
    its sequence up to itself; with a window, only the last ones. sinks_H: one more score of each head in the softmax,
    whose weight is dropped.
    """
    rows, heads, width = q_THD.shape
    kv_heads, value_width = keys.shape[2], values.shape[3]
    out_THD = q_THD.new_empty(rows, heads, value_width)
    wide = max(width, value_width) > 128  # then fewer stages, which take less shared memory
    _attend[(len(tiles_n4), heads)](
        q_THD,
        keys,
        values,
        blocks,
        tiles_n4,
        q_THD if sinks_H is None else sinks_H,  # without sinks it is not read
        out_THD,
        scale,
        0 if window is None else window,
        0.0 if softcap is None else softcap,
        q_THD.stride(0),
        q_THD.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        heads,
        width,
        value_width,
        GROUP=heads // kv_heads,
        ROWS=ATTENTION_ROWS,
        WIDTH=max(16, triton.next_power_of_2(width)),
        VALUE_WIDTH=max(16, triton.next_power_of_2(value_width)),
        KEYS=_KEYS_AT_ONCE,
        BLOCK=BLOCK,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=8 if wide else 4,
        num_stages=1 if wide else 2,
    )
    return out_THD


@triton.jit
def _attend(
    q,
    keys,
    values,
    blocks,
    tiles,
    sinks,
    out,
    scale,
    window,
    softcap,
    q_row,
    q_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    heads,
    width,
    value_width,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(0)
    first, end, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= end:
        return
    table = blocks + tl.load(tile + 3)
    head = tl.program_id(1)
    kv_head = head // GROUP
    i = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    v = tl.arange(0, VALUE_WIDTH)
    row = (first + i).to(tl.int64)[:, None]
    inside = (first + i < end)[:, None]
    x = tl.load(q + row * q_row + head * q_head + d[None, :], mask=inside & (d < width)[None, :], other=0.0)
    stop = position + tl.minimum(ROWS, end - first)  # the end of the keys that any row of this tile sees
    reach = tl.where(window > 0, window, stop)
    start = tl.maximum(position - reach + 1, 0) // KEYS * KEYS

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # they have no values
        highest = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for at in range(start, stop, KEYS):
        token = at + tl.arange(0, KEYS)
        here = token < stop
        block = tl.load(table + token // BLOCK, mask=here, other=0).to(tl.int64)
        key_at = block * key_block + (token % BLOCK) * key_token + kv_head * key_head
        key = tl.load(keys + key_at[:, None] + d[None, :], mask=here[:, None] & (d < width)[None, :], other=0.0)
        scores = tl.dot(x, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        distance = (position + i)[:, None] - token[None, :]
        scores = tl.where((distance >= 0) & (distance < reach), scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row whose window begins later has seen no key yet. Its highest score is −∞, and −∞ − −∞ would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        value_at = block * value_block + (token % BLOCK) * value_token + kv_head * value_head
        value = tl.load(
            values + value_at[:, None] + v[None, :], mask=here[:, None] & (v < value_width)[None, :], other=0.0
        )
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
        highest = higher
    place = out + (row * heads + head) * value_width + v[None, :]
    result = sums / total[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=inside & (v < value_width)[None, :])
