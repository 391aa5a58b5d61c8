"""One new token of each sequence in a layer of linear attention, as CUDA kernels (Triton) that change states in place.

A state is megabytes of fp32 numbers in each layer. The formulas in torch copy it several times; here it is read and
written once. Products and sums are in fp32.

Shapes: N sequences, S slots, K key heads of width D, V value heads of width E, F features, W width of the convolution,
C = W − 1 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEATURES = 256  # of a program
_NUMBERS = 4096  # of a state, in a program
_EPS = 1e-6  # of the length of queries and keys, as in the formula


def convolve_tokens(x_NF: Tensor, weight_FW: Tensor, columns_SCF: Tensor, slots_N: Tensor, begins_N: Tensor) -> Tensor:
    """Return SiLU of the convolution, and keep the last columns of each sequence."""
    count, features = x_NF.shape
    out_NF = torch.empty_like(x_NF)
    _convolve[(count, triton.cdiv(features, _FEATURES))](
        out_NF,
        x_NF,
        weight_FW,
        columns_SCF,
        slots_N,
        begins_N.view(torch.uint8),
        features,
        columns_SCF.stride(0),
        COLUMNS=columns_SCF.shape[1],
        FEATURES=_FEATURES,
        num_warps=4,
    )
    return out_NF


@triton.jit
def _convolve(
    out, x, weight, columns, slots, begins, features, columns_slot, COLUMNS: tl.constexpr, FEATURES: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = f < features
    slot = columns + tl.load(slots + n) * columns_slot + f
    kept = inside & (tl.load(begins + n) == 0)
    newest = tl.load(x + n * features + f, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + f * (COLUMNS + 1) + COLUMNS, mask=inside, other=0.0).to(tl.float32)
    for column in tl.static_range(COLUMNS):
        value = tl.load(slot + column * features, mask=kept, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + f * (COLUMNS + 1) + column, mask=inside, other=0.0).to(
            tl.float32
        )
        if column > 0:  # the oldest is forgotten
            tl.store(slot + (column - 1) * features, value, mask=inside)
    tl.store(slot + (COLUMNS - 1) * features, newest, mask=inside)
    tl.store(out + n * features + f, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


def step_states(
    q_NKD: Tensor,
    k_NKD: Tensor,
    v_NVE: Tensor,
    g_NV: Tensor,
    beta_NV: Tensor,
    matrices_SVDE: Tensor,
    slots_N: Tensor,
    begins_N: Tensor,
) -> Tensor:
    """Return the outputs (N, V, E) of the delta rule, and keep the last state of each sequence."""
    (count, heads, value_width), (key_heads, key_width) = v_NVE.shape, q_NKD.shape[1:]
    q_NKD, k_NKD, v_NVE, g_NV, beta_NV = (each.contiguous() for each in (q_NKD, k_NKD, v_NVE, g_NV, beta_NV))
    out_NVE = torch.empty_like(v_NVE)
    keys = triton.next_power_of_2(key_width)
    values = max(16, min(triton.next_power_of_2(value_width), _NUMBERS // keys))
    _step[(triton.cdiv(value_width, values), heads, count)](
        out_NVE,
        q_NKD,
        k_NKD,
        v_NVE,
        g_NV,
        beta_NV,
        matrices_SVDE,
        slots_N,
        begins_N.view(torch.uint8),
        key_width,
        value_width,
        key_width**-0.5,
        _EPS,
        matrices_SVDE.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEYS=keys,
        VALUES=values,
        num_warps=4,
    )
    return out_NVE


@triton.jit
def _step(
    out,
    q,
    k,
    v,
    g,
    beta,
    states,
    slots,
    begins,
    key_width,
    value_width,
    scale,
    eps,
    states_slot,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    head, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, e = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside_d, inside_e = d < key_width, e < value_width
    inside = inside_d[:, None] & inside_e[None, :]
    key_at = (n * KEY_HEADS + head // (HEADS // KEY_HEADS)) * key_width + d
    query = tl.load(q + key_at, mask=inside_d, other=0.0).to(tl.float32)
    key = tl.load(k + key_at, mask=inside_d, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    one, value_at = n * HEADS + head, (n * HEADS + head) * value_width + e
    place = states + tl.load(slots + n) * states_slot + (head * key_width + d[:, None]) * value_width + e[None, :]
    state = tl.load(place, mask=inside & (tl.load(begins + n) == 0), other=0.0)
    state *= tl.exp(tl.load(g + one).to(tl.float32))
    known = tl.sum(state * key[:, None], 0)
    value = tl.load(v + value_at, mask=inside_e, other=0.0).to(tl.float32)
    correction = (value - known) * tl.load(beta + one).to(tl.float32)
    state += key[:, None] * correction[None, :]
    tl.store(place, state, mask=inside)
    tl.store(out + value_at, tl.sum(state * query[:, None], 0).to(out.dtype.element_ty), mask=inside_e)
