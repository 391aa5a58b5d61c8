"""One new token of each of many sequences in a layer of linear attention, which is what decoding computes.

Nothing here waits for the device or depends on lengths, so CUDA graphs can capture it. On CUDA, kernels of our own
change the states where they are, if they give the numbers of the formulas; otherwise states are copied out and back.

Shapes: N sequences, S slots, K key heads of width D, V value heads of width E, F features, W width of the convolution,
C = W − 1 columns.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.decoder.fused.kernel_check import kernels_agree
from twinkle.model.decoder.linear_attention.delta_rule import one_step

_CLOSE = 4e-6  # relative difference of the kernels' numbers, besides two roundings


@dataclass(frozen=True)
class TokenRows:
    """One layer's part; implements :class:`~twinkle.model.decoder.linear_attention.layer.StatefulRows`."""

    slots_N: Tensor
    begins_N: Tensor  # whether a sequence begins with this token; what its slot holds has no meaning then
    matrices_SVDE: Tensor
    columns_SCF: Tensor

    def convolve(self, x_NF: Tensor, weight_FW: Tensor) -> Tensor:
        if self._runs_kernels(x_NF.dtype):
            return self.kernel_convolution(x_NF, weight_FW)
        return self.plain_convolution(x_NF, weight_FW)

    def delta_rule(self, q_NKD: Tensor, k_NKD: Tensor, v_NVE: Tensor, g_NV: Tensor, beta_NV: Tensor) -> Tensor:
        if self._runs_kernels(v_NVE.dtype):
            return self.kernel_delta_rule(q_NKD, k_NKD, v_NVE, g_NV, beta_NV)
        return self.plain_delta_rule(q_NKD, k_NKD, v_NVE, g_NV, beta_NV)

    def kernel_convolution(self, x_NF: Tensor, weight_FW: Tensor) -> Tensor:
        from twinkle.sampler.torch_sampler.states.token_kernels import convolve_tokens  # needs Triton

        x_NF, weight_FW = x_NF.contiguous(), weight_FW.contiguous()
        return convolve_tokens(x_NF, weight_FW, self.columns_SCF, self.slots_N, self.begins_N)

    def kernel_delta_rule(self, q_NKD: Tensor, k_NKD: Tensor, v_NVE: Tensor, g_NV: Tensor, beta_NV: Tensor) -> Tensor:
        from twinkle.sampler.torch_sampler.states.token_kernels import step_states  # needs Triton

        return step_states(q_NKD, k_NKD, v_NVE, g_NV, beta_NV, self.matrices_SVDE, self.slots_N, self.begins_N)

    def plain_convolution(self, x_NF: Tensor, weight_FW: Tensor) -> Tensor:
        # Slots may hold anything where a sequence begins, NaN too, so the old columns are not multiplied by 0.
        before_NCF = self.columns_SCF[self.slots_N].masked_fill(self.begins_N[:, None, None], 0)
        window_NWF = torch.cat([before_NCF, x_NF[:, None]], 1)
        self.columns_SCF[self.slots_N] = window_NWF[:, 1:]
        return F.silu((window_NWF.float() * weight_FW.float().t()).sum(1)).to(x_NF.dtype)

    def plain_delta_rule(self, q_NKD: Tensor, k_NKD: Tensor, v_NVE: Tensor, g_NV: Tensor, beta_NV: Tensor) -> Tensor:
        states_NVDE = self.matrices_SVDE[self.slots_N].masked_fill(self.begins_N[:, None, None, None], 0)
        out_NVE, states_NVDE = one_step(q_NKD, k_NKD, v_NVE, g_NV, beta_NV, states_NVDE)
        self.matrices_SVDE[self.slots_N] = states_NVDE
        return out_NVE

    def _runs_kernels(self, dtype: torch.dtype) -> bool:
        matrices = self.matrices_SVDE
        return matrices.is_cuda and _kernels_agree(matrices.device, dtype, matrices.shape[2], matrices.shape[3])


@functools.cache
def _kernels_agree(device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> bool:
    limit = _CLOSE + 2 * torch.finfo(dtype).eps
    return kernels_agree(
        "states of linear attention are changed without our kernels",
        lambda: compare_kernels(device, dtype, key_width, value_width),
        limit,
    )


@torch.no_grad()
def compare_kernels(
    device: torch.device, dtype: torch.dtype, key_width: int, value_width: int
) -> list[tuple[Tensor, Tensor]]:
    """Return what kernels compute and how they change states, each with what the formulas give."""
    generator = torch.Generator().manual_seed(0)
    key_heads, value_heads, features, width, slots = 2, 6, 200, 4, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    slots_N = torch.tensor([4, 0, 2], device=device)
    rows = len(slots_N)
    matrices = normal(slots, value_heads, key_width, value_width).float()
    columns = normal(slots, width - 1, features)
    matrices[2], columns[2] = torch.nan, torch.nan  # the last sequence begins, and its slot was not cleared
    begins_N = torch.tensor([False, False, True], device=device)
    ours = TokenRows(slots_N, begins_N, matrices, columns)
    theirs = TokenRows(slots_N, begins_N, matrices.clone(), columns.clone())
    pairs = []
    for _ in range(2):  # the second time from the states that the first one left
        x_NF, weight_FW = normal(rows, features), normal(features, width)
        q_NKD, k_NKD = normal(rows, key_heads, key_width), normal(rows, key_heads, key_width)
        v_NVE, gates = normal(rows, value_heads, value_width), normal(2, rows, value_heads)
        rule = q_NKD, k_NKD, v_NVE, -gates[0].float().abs(), gates[1].sigmoid()
        pairs.append((ours.kernel_convolution(x_NF, weight_FW), theirs.plain_convolution(x_NF, weight_FW)))
        pairs.append((ours.kernel_delta_rule(*rule), theirs.plain_delta_rule(*rule)))
        pairs.append((ours.matrices_SVDE.clone(), theirs.matrices_SVDE.clone()))  # of all slots
        pairs.append((ours.columns_SCF.clone(), theirs.columns_SCF.clone()))
        begins_N.fill_(False)
    return pairs
