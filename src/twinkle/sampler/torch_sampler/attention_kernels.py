"""CUDA kernels (Triton) for decoding: one new token of each sequence attends to the sequence's cached keys and values.

The grid depends only on the number of sequences; the kernels read the length of each sequence on the device. A captured
graph therefore serves sequences of any length. Long sequences are split into parts that are computed in parallel and
then joined.

Shapes: n sequences, H query heads, J key/value heads, P parts, D head dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.early_start_kernels import launch_options, let_next_start, wait_for_previous

_KEYS_AT_ONCE = 64
_PROGRAMS = 528  # Triton programs to aim for: four for each multiprocessor of a large device
_MOST_PARTS = 32


def attend_one_token(
    q_nHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_nB: Tensor,
    lengths_n: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Return the attention outputs, (n, H, D).

    keys and values are (blocks, BLOCK, J, D). The lengths include the new token, whose key is already in the cache.
    sinks_H: one more score of each head in the softmax, whose weight is dropped.
    early: whether these kernels start early, see ``early_start_kernels``.
    """
    count, heads, width = q_nHD.shape
    kv_heads, value_width = keys.shape[2], values.shape[3]
    parts = max(1, min(_MOST_PARTS, _PROGRAMS // (count * kv_heads)))
    out_nHD = q_nHD.new_empty(count, heads, value_width)
    # A single part is the result.
    partial = out_nHD if parts == 1 else out_nHD.new_empty(count, heads, parts, value_width, dtype=torch.float32)
    weights = q_nHD.new_empty(count, heads, parts, 2, dtype=torch.float32)
    _attend[(parts, kv_heads, count)](
        q_nHD,
        keys,
        values,
        table_nB,
        lengths_n,
        q_nHD if sinks_H is None else sinks_H,  # without sinks it is not read
        partial,
        weights,
        scale,
        0 if window is None else window,
        0.0 if softcap is None else softcap,
        q_nHD.stride(0),
        q_nHD.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        table_nB.stride(0),
        heads,
        width,
        value_width,
        GROUP=heads // kv_heads,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        WIDTH=max(16, triton.next_power_of_2(width)),
        VALUE_WIDTH=triton.next_power_of_2(value_width),
        KEYS=_KEYS_AT_ONCE,
        BLOCK=BLOCK,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        WHOLE=parts == 1,
        PRECISION="ieee" if q_nHD.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,  # the table of blocks, then keys and values, then the products
        **launch_options(early),
    )
    if parts == 1:
        return out_nHD
    _join[(heads, count)](
        partial,
        weights,
        out_nHD,
        parts,
        heads,
        value_width,
        PARTS=triton.next_power_of_2(parts),
        VALUE_WIDTH=triton.next_power_of_2(value_width),
        num_warps=4,
        **launch_options(early),
    )
    return out_nHD


@triton.jit
def _attend(
    q,
    keys,
    values,
    table,
    lengths,
    sinks,
    partial,
    weights,
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
    table_row,
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
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts = tl.num_programs(0)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, parts), KEYS) * KEYS
    start = first + part * share
    stop = tl.minimum(start + share, length)

    member = tl.arange(0, ROWS)  # the query heads of this key/value head
    head = kv_head * GROUP + member
    is_member = member < GROUP
    d = tl.arange(0, WIDTH)
    v = tl.arange(0, VALUE_WIDTH)
    inside_q = is_member[:, None] & (d < width)[None, :]
    query = tl.load(q + row * q_row + head[:, None] * q_head + d[None, :], mask=inside_q, other=0.0)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # the first part counts them; they have no values
        sink = tl.load(sinks + head, mask=is_member, other=0.0).to(tl.float32)
        highest = tl.where(part == 0, sink, highest)
        total += tl.where(part == 0, 1.0, 0.0)
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for at in range(start, stop, KEYS):
        token = at + tl.arange(0, KEYS)
        here = token < stop
        block = tl.load(table + row * table_row + token // BLOCK, mask=here, other=0).to(tl.int64)
        key_at = block * key_block + (token % BLOCK) * key_token + kv_head * key_head
        key = tl.load(keys + key_at[:, None] + d[None, :], mask=here[:, None] & (d < width)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(here[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        exps = tl.exp(scores - new_highest[:, None])
        total = total * shrink + tl.sum(exps, 1)
        value_at = block * value_block + (token % BLOCK) * value_token + kv_head * value_head
        value = tl.load(
            values + value_at[:, None] + v[None, :], mask=here[:, None] & (v < value_width)[None, :], other=0.0
        )
        sums = sums * shrink[:, None] + tl.dot(exps.to(value.dtype), value, input_precision=PRECISION)
        highest = new_highest

    place = (row * heads + head) * parts + part
    if WHOLE:
        sums = sums / total[:, None]
    else:
        tl.store(weights + place * 2, highest, mask=is_member)
        tl.store(weights + place * 2 + 1, total, mask=is_member)
    inside_v = is_member[:, None] & (v < value_width)[None, :]
    tl.store(partial + place[:, None] * value_width + v[None, :], sums.to(partial.dtype.element_ty), mask=inside_v)


@triton.jit
def _join(
    partial,
    weights,
    out,
    parts,
    heads,
    value_width,
    PARTS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    v = tl.arange(0, VALUE_WIDTH)
    place = (row * heads + head) * parts + part
    inside = part < parts
    highest = tl.load(weights + place * 2, mask=inside, other=float("-inf"))
    total = tl.load(weights + place * 2 + 1, mask=inside, other=0.0)
    shrink = tl.exp(highest - tl.max(highest, 0))  # a part without keys has −∞ here, so its weight is zero
    sums = tl.load(
        partial + place[:, None] * value_width + v[None, :],
        mask=inside[:, None] & (v < value_width)[None, :],
        other=0.0,
    )
    result = tl.sum(sums * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(out + (row * heads + head) * value_width + v, result.to(out.dtype.element_ty), mask=v < value_width)
