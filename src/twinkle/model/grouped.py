"""Matrix products over consecutive groups of rows, one weight matrix a group.

``rows`` is a (T, K) matrix whose rows are ordered by group. On CUDA in bf16 a product is one kernel
(``torch.nn.functional.grouped_mm``). On CPU that function is slower than what is chosen here by shape: one plain product
for a single group, one batched product for groups of equal size, a loop otherwise. Groups are never empty.

Shapes: T rows in all, G groups, K inner and N outer features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# grouped_mm wants every stride to be a multiple of 16 bytes: 8 elements of bf16.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Groups:
    """How T rows fall into consecutive groups: their sizes on the host and their ends on the device."""

    sizes: tuple[int, ...]
    ends_G: Tensor  # int32, cumulative

    @classmethod
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> "Groups":
        assert all(size > 0 for size in sizes), "a group without rows has no gradient to read"
        return cls(sizes, torch.tensor(sizes).cumsum(0).to(device=device, dtype=torch.int32))


def grouped_mm(rows_TK: Tensor, weights_GKN: Tensor, groups: Groups) -> Tensor:
    """``out[t] = rows[t] @ weights[group of t]``; (T, N)."""
    if weights_GKN.shape[0] == 1:
        return rows_TK @ weights_GKN[0]
    if _one_kernel(rows_TK, weights_GKN.shape[1], weights_GKN.shape[2]):
        return F.grouped_mm(rows_TK, weights_GKN, offs=groups.ends_G)
    if _equal(groups.sizes):
        batched = rows_TK.reshape(len(groups.sizes), groups.sizes[0], -1)
        return torch.bmm(batched, weights_GKN).flatten(0, 1)
    parts = rows_TK.split(list(groups.sizes))
    return torch.cat([part @ weight for part, weight in zip(parts, weights_GKN.unbind(), strict=True)])


def grouped_outer(left_TK: Tensor, right_TN: Tensor, groups: Groups) -> Tensor:
    """``out[g] = left[rows of g].T @ right[rows of g]``; (G, K, N), the weight gradient of :func:`grouped_mm`."""
    if groups.ends_G.shape[0] == 1:
        return (left_TK.t() @ right_TN).unsqueeze(0)
    if _one_kernel(left_TK, left_TK.shape[1], right_TN.shape[1]):
        return F.grouped_mm(left_TK.t(), right_TN, offs=groups.ends_G)
    if _equal(groups.sizes):
        count, size = len(groups.sizes), groups.sizes[0]
        left = left_TK.reshape(count, size, -1).transpose(1, 2)
        return torch.bmm(left, right_TN.reshape(count, size, -1))
    sizes = list(groups.sizes)
    parts = zip(left_TK.split(sizes), right_TN.split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in parts])


def _one_kernel(rows: Tensor, inner: int, outer: int) -> bool:
    aligned = inner % _ALIGNMENT == 0 and outer % _ALIGNMENT == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned


def _equal(sizes: tuple[int, ...]) -> bool:
    return min(sizes) == max(sizes)
