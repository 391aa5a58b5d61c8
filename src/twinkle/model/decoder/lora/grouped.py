"""Matrix products over consecutive groups of rows, with one weight matrix per group.

The rows of a (T, K) matrix are ordered by group, and groups are never empty. Groups of equal size (also a single group)
are computed as one batched product, others in a loop. Both write to the given output.

Shapes: T rows of all groups, G groups, K inner and N outer features.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twinkle.model.decoder.products import add_product, needs_fp32


@dataclass(frozen=True)
class Groups:
    """The sizes of consecutive groups of T rows."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(size > 0 for size in self.sizes), "groups must not be empty"

    @cached_property
    def equal(self) -> bool:
        return min(self.sizes) == max(self.sizes)

    def batched(self, rows_TK: Tensor) -> Tensor:
        """Return the rows as (G, T/G, K). Groups must have equal size."""
        return rows_TK.view(len(self.sizes), self.sizes[0], rows_TK.shape[1])


def grouped_mm(out_TN: Tensor, rows_TK: Tensor, weights_GKN: Tensor, groups: Groups, *, beta: int) -> Tensor:
    """Compute ``out[t] = beta · out[t] + rows[t] @ weights[group of t]`` in place; with beta 0, ``out`` is not read."""
    if groups.equal:
        batched_GnN = groups.batched(out_TN)
        add_product(batched_GnN, groups.batched(rows_TK), weights_GKN, beta=beta)
    else:
        sizes = list(groups.sizes)
        for out, rows, weights in zip(out_TN.split(sizes), rows_TK.split(sizes), weights_GKN.unbind(), strict=True):
            add_product(out, rows, weights, beta=beta)
    return out_TN


def add_grouped_outer(out_GKN: Tensor, left_TK: Tensor, right_TN: Tensor, groups: Groups) -> None:
    """Compute ``out[g] += left[rows of g].T @ right[rows of g]`` in fp32, the weight gradient of :func:`grouped_mm`."""
    if groups.equal:
        _add_bmm(out_GKN, groups.batched(left_TK).transpose(1, 2), groups.batched(right_TN))
    else:
        sizes = list(groups.sizes)
        for out, left, right in zip(out_GKN.split(1), left_TK.split(sizes), right_TN.split(sizes), strict=True):
            _add_bmm(out, left.t()[None], right[None])


def _add_bmm(out_GKN: Tensor, left_GKn: Tensor, right_GnN: Tensor) -> None:
    """Add a batched product to ``out``, whose dtype may be wider than that of the factors.

    CUDA then adds the fp32 accumulators, and so does a CPU that computes bf16 products in fp32. Elsewhere the product
    is first rounded to the dtype of the factors.
    """
    if out_GKN.dtype == left_GKn.dtype or needs_fp32(left_GKn):
        add_product(out_GKN, left_GKn, right_GnN)
    elif out_GKN.is_cuda:
        torch.baddbmm(out_GKN, left_GKn, right_GnN, out_dtype=out_GKN.dtype, out=out_GKN)
    else:
        out_GKN.add_(torch.bmm(left_GKn, right_GnN))
