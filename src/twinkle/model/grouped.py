"""Matrix products over consecutive groups of rows, one weight matrix a group.

The rows of a (T, K) matrix are ordered by group, and groups are never empty. How a product is done depends on its
shape: one plain product for a single group, one batched product for groups of equal size, torch's ``grouped_mm`` (one
kernel) for many ragged groups in bf16 on CUDA, a loop otherwise. On CPU ``grouped_mm`` would be the slowest of these.

Shapes: T rows in all, G groups, K inner and N outer features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# grouped_mm wants every stride to be a multiple of 16 bytes: 8 elements of bf16.
_ALIGNMENT = 8
_FEW_GROUPS = 4


@dataclass(frozen=True)
class Groups:
    """How T rows fall into consecutive groups: their sizes on the host and their ends on the device."""

    sizes: tuple[int, ...]
    ends_G: Tensor  # int32, cumulative
    equal: bool

    @classmethod
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> "Groups":
        assert all(size > 0 for size in sizes), "a group without rows has no gradient to read"
        ends_G = torch.tensor(sizes).cumsum(0).to(device=device, dtype=torch.int32)
        return cls(sizes, ends_G, equal=min(sizes) == max(sizes))

    def batched(self, rows_TK: Tensor) -> Tensor:
        """(G, T/G, K), for groups of equal size."""
        return rows_TK.view(len(self.sizes), self.sizes[0], rows_TK.shape[1])


def grouped_mm(rows_TK: Tensor, weights_GKN: Tensor, groups: Groups) -> Tensor:
    """``out[t] = rows[t] @ weights[group of t]``; (T, N). Differentiable by the compiler only: see lora.py."""
    if weights_GKN.shape[0] == 1:
        return rows_TK @ weights_GKN[0]
    if groups.equal:
        batched_GnK = rows_TK.view(weights_GKN.shape[0], -1, rows_TK.shape[1])
        return torch.bmm(batched_GnK, weights_GKN).flatten(0, 1)
    if torch.compiler.is_compiling() or _one_kernel(rows_TK, weights_GKN.shape[1], weights_GKN.shape[2], groups):
        return F.grouped_mm(rows_TK, weights_GKN, offs=groups.ends_G)
    out_TN = rows_TK.new_empty(rows_TK.shape[0], weights_GKN.shape[2])
    sizes = list(groups.sizes)
    for out, rows, weights in zip(out_TN.split(sizes), rows_TK.split(sizes), weights_GKN.unbind(), strict=True):
        torch.mm(rows, weights, out=out)
    return out_TN


def add_grouped_mm(out_TN: Tensor, rows_TK: Tensor, weights_GKN: Tensor, groups: Groups) -> None:
    """``out += grouped_mm(rows, weights)`` in place, without a temporary where the shapes allow it."""
    if weights_GKN.shape[0] == 1:
        out_TN.addmm_(rows_TK, weights_GKN[0])
    elif groups.equal:
        groups.batched(out_TN).baddbmm_(groups.batched(rows_TK), weights_GKN)
    elif _one_kernel(rows_TK, weights_GKN.shape[1], weights_GKN.shape[2], groups):
        out_TN.add_(F.grouped_mm(rows_TK, weights_GKN, offs=groups.ends_G))
    else:
        sizes = list(groups.sizes)
        for out, rows, weights in zip(out_TN.split(sizes), rows_TK.split(sizes), weights_GKN.unbind(), strict=True):
            out.addmm_(rows, weights)


def grouped_outer(left_TK: Tensor, right_TN: Tensor, groups: Groups) -> Tensor:
    """``out[g] = left[rows of g].T @ right[rows of g]``; (G, K, N), the weight gradient of :func:`grouped_mm`."""
    if len(groups.sizes) == 1:
        return (left_TK.t() @ right_TN).unsqueeze(0)
    if groups.equal:
        return torch.bmm(groups.batched(left_TK).transpose(1, 2), groups.batched(right_TN))
    if _one_kernel(left_TK, left_TK.shape[1], right_TN.shape[1], groups):
        return F.grouped_mm(left_TK.t(), right_TN, offs=groups.ends_G)
    out_GKN = left_TK.new_empty(len(groups.sizes), left_TK.shape[1], right_TN.shape[1])
    sizes = list(groups.sizes)
    for out, left, right in zip(out_GKN.unbind(), left_TK.split(sizes), right_TN.split(sizes), strict=True):
        torch.mm(left.t(), right, out=out)
    return out_GKN


def _one_kernel(rows: Tensor, inner: int, outer: int, groups: Groups) -> bool:
    """A few large groups are launched one by one: by launch counts that is no slower, and they add in place."""
    aligned = inner % _ALIGNMENT == 0 and outer % _ALIGNMENT == 0
    many = len(groups.sizes) > _FEW_GROUPS
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and many
