"""SiLU(gate) · up of experts, and its gradient, with one CUDA kernel each (Triton).

Gate is the first half of a pair's numbers, and up is the second. Sums and products are in fp32.

Shapes: S pairs, I width of an expert, N = 2 I.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def silu_gate(gate_up_SN: Tensor) -> Tensor:
    """Return SiLU(gate) · up (S, I)."""
    pairs, width = len(gate_up_SN), gate_up_SN.shape[1] // 2
    a_SI = gate_up_SN.new_empty(pairs, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_gate[(pairs, triton.cdiv(width, block))](a_SI, gate_up_SN, width, BLOCK=block, num_warps=4)
    return a_SI


def silu_gate_gradient(gate_up_SN: Tensor, back_SI: Tensor, weights_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a = SiLU(gate) · up (S, I), the gradient of gate and up (S, N), and Σ back · a (S,).

    The gradient of a is weight · back.
    """
    pairs, width = back_SI.shape
    a_SI, dgate_up_SN = torch.empty_like(back_SI), torch.empty_like(gate_up_SN)
    dot_S = back_SI.new_empty(pairs)
    block = min(1024, triton.next_power_of_2(width))
    _silu_gate_gradient[(pairs,)](
        a_SI, dgate_up_SN, dot_S, gate_up_SN, back_SI, weights_S, width, BLOCK=block, num_warps=4
    )
    return a_SI, dgate_up_SN, dot_S


@triton.jit
def _silu_gate(a, gate_up, width, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(gate_up + pair * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(a + pair * width + i, (gate * tl.sigmoid(gate) * up).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _silu_gate_gradient(a, dgate_up, dot, gate_up, back, weights, width, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + pair).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < width
        gate = tl.load(gate_up + pair * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + pair * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(back + pair * width + i, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += slope * silu * up
        tl.store(a + pair * width + i, (silu * up).to(a.dtype.element_ty), mask=inside)
        slope *= weight
        dgate = slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dgate_up + pair * 2 * width + i, dgate.to(a.dtype.element_ty), mask=inside)
        tl.store(dgate_up + pair * 2 * width + width + i, (slope * silu).to(a.dtype.element_ty), mask=inside)
    tl.store(dot + pair, tl.sum(total, 0).to(dot.dtype.element_ty))
