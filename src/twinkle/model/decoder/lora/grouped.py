"""Matrix products over consecutive groups of rows, one weight matrix a group.

The rows of a (T, K) matrix are ordered by group, and groups are never empty. Groups of equal size (a single one among
them) are one batched product, others a loop. Both write where they are told to, without a temporary.

Shapes: T rows in all, G groups, K inner and N outer features.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """How T rows fall into consecutive groups."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(size > 0 for size in self.sizes), "a group has rows"

    @cached_property
    def equal(self) -> bool:
        return min(self.sizes) == max(self.sizes)

    def batched(self, rows_TK: Tensor) -> Tensor:
        """(G, T/G, K), for groups of equal size."""
        return rows_TK.view(len(self.sizes), self.sizes[0], rows_TK.shape[1])


def grouped_mm(out_TN: Tensor, rows_TK: Tensor, weights_GKN: Tensor, groups: Groups, *, beta: int) -> Tensor:
    """``out[t] = beta · out[t] + rows[t] @ weights[group of t]`` in place; with beta 0, ``out`` is not read."""
    if groups.equal:
        batched_GnN = groups.batched(out_TN)
        torch.baddbmm(batched_GnN, groups.batched(rows_TK), weights_GKN, beta=beta, out=batched_GnN)
    else:
        sizes = list(groups.sizes)
        for out, rows, weights in zip(out_TN.split(sizes), rows_TK.split(sizes), weights_GKN.unbind(), strict=True):
            torch.addmm(out, rows, weights, beta=beta, out=out)
    return out_TN


def add_grouped_outer(out_GKN: Tensor, left_TK: Tensor, right_TN: Tensor, groups: Groups) -> None:
    """``out[g] += left[rows of g].T @ right[rows of g]``, the weight gradient of :func:`grouped_mm`, in fp32."""
    if groups.equal:
        _add_bmm(out_GKN, groups.batched(left_TK).transpose(1, 2), groups.batched(right_TN))
    else:
        sizes = list(groups.sizes)
        for out, left, right in zip(out_GKN.split(1), left_TK.split(sizes), right_TN.split(sizes), strict=True):
            _add_bmm(out, left.t()[None], right[None])


def _add_bmm(out_GKN: Tensor, left_GKn: Tensor, right_GnN: Tensor) -> None:
    """``out`` may be wider than the factors: CUDA adds fp32 accumulators, elsewhere the product is rounded first."""
    if out_GKN.dtype == left_GKn.dtype:
        out_GKN.baddbmm_(left_GKn, right_GnN)
    elif out_GKN.is_cuda:
        torch.baddbmm(out_GKN, left_GKn, right_GnN, out_dtype=out_GKN.dtype, out=out_GKN)
    else:
        out_GKN.add_(torch.bmm(left_GKn, right_GnN))
