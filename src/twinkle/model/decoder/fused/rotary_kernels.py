"""Queries and keys turned to their positions, and the gradient of that, in one CUDA kernel (Triton).

With the halves x = (x1, x2) of a head, and of cos and sin, the result is (x1·c1 - x2·s1, x2·c2 + x1·s2). Its gradient
is (d1·c1 + d2·s2, d2·c2 - d1·s1). Products and sums are in fp32.

Shapes: N heads of queries and J of keys, T rows, D numbers of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def turn(q_1NTD: Tensor, k_1JTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Return the turned heads; with ``back``, the gradients before the turn. Rows of a head lie together in memory."""
    (_, queries, rows, width), keys = q_1NTD.shape, k_1JTD.shape[1]
    out_q = torch.empty(1, rows, queries, width, dtype=q_1NTD.dtype, device=q_1NTD.device).transpose(1, 2)
    out_k = torch.empty(1, rows, keys, width, dtype=k_1JTD.dtype, device=k_1JTD.device).transpose(1, 2)
    _turn[(rows,)](
        out_q,
        out_k,
        q_1NTD,
        k_1JTD,
        cos_1TD,
        sin_1TD,
        queries,
        keys,
        q_1NTD.stride(1),
        q_1NTD.stride(2),
        k_1JTD.stride(1),
        k_1JTD.stride(2),
        width // 2,
        BACK=back,
        QUERIES=triton.next_power_of_2(queries),
        KEYS=triton.next_power_of_2(keys),
        HALF=triton.next_power_of_2(width // 2),
        num_warps=4,
    )
    return out_q, out_k


@triton.jit
def _turn(
    out_q,
    out_k,
    q,
    k,
    cos,
    sin,
    queries,
    keys,
    q_head,
    q_row,
    k_head,
    k_row,
    half,
    BACK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)
    inside = d < half
    place = row * 2 * half + d
    c1 = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + place + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + place + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACK:  # the transpose: each half gets the other one's sine, with the other sign
        s1, s2 = -s2, -s1
    n = tl.arange(0, QUERIES)
    _turn_heads(out_q + row * queries * 2 * half, q + row * q_row, n, queries, q_head, d, half, c1, c2, s1, s2)
    n = tl.arange(0, KEYS)
    _turn_heads(out_k + row * keys * 2 * half, k + row * k_row, n, keys, k_head, d, half, c1, c2, s1, s2)


@triton.jit
def _turn_heads(out, x, n, heads, head_stride, d, half, c1, c2, s1, s2):
    inside = (n < heads)[:, None] & (d < half)[None, :]
    place = n[:, None].to(tl.int64) * head_stride + d[None, :]
    x1 = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    place = n[:, None] * 2 * half + d[None, :]
    tl.store(out + place, (x1 * c1 - x2 * s1).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + half, (x2 * c2 + x1 * s2).to(out.dtype.element_ty), mask=inside)
