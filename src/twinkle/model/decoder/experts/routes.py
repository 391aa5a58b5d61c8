"""Which rows of a batch go to which expert, in the order in which experts compute them.

A router chooses K experts for each of T rows. That makes S = T · K pairs of a row and an expert. The experts compute
the pairs ordered by expert, and for each expert in the order of the rows. Rows are ordered by request, so the pairs of
one expert and one request are a range.

Shapes: T rows, K experts of a row, S pairs, E experts, N features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.model.decoder.products import mm


@dataclass(frozen=True)
class PairRange:
    """The pairs from ``start`` to ``stop``: those of one expert with rows of one request."""

    expert: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Routes:
    """The pairs of a batch. ``sizes``: how many pairs each expert has."""

    order_S: Tensor  # the place of each pair among (row, choice)
    row_S: Tensor  # the row of each pair
    expert_S: Tensor
    sizes: tuple[int, ...]
    choices: int  # K

    @classmethod
    def from_choices(cls, chosen_TK: Tensor, experts: int) -> "Routes":
        expert_S, order_S = chosen_TK.flatten().sort(stable=True)
        sizes = tuple(torch.bincount(expert_S, minlength=experts).tolist())
        return cls(order_S, order_S // chosen_TK.shape[1], expert_S, sizes, chosen_TK.shape[1])

    def gather(self, rows_TN: Tensor) -> Tensor:
        """Return the row of each pair (S, N)."""
        return rows_TN[self.row_S]

    def weights(self, weights_TK: Tensor) -> Tensor:
        """Return the router's weight of each pair (S,)."""
        return weights_TK.flatten()[self.order_S]

    def unordered(self, pairs_S: Tensor) -> Tensor:
        """Return a number for each pair by row and choice (T, K)."""
        placed = torch.empty_like(pairs_S)
        placed[self.order_S] = pairs_S
        return placed.view(-1, self.choices)

    def add_up(self, pairs_SN: Tensor) -> Tensor:
        """Return the sum of each row's pairs (T, N). The order of addition depends on nothing else in the batch."""
        placed_SN = torch.empty_like(pairs_SN)
        placed_SN[self.order_S] = pairs_SN
        return placed_SN.view(-1, self.choices, pairs_SN.shape[1]).sum(1)

    def ranges(self, group_T: Tensor, groups: int) -> list[PairRange]:
        """Return the pairs by expert and request. group_T: the request of each row; -1: it has none."""
        keys, counts = (self.expert_S * (groups + 1) + group_T[self.row_S] + 1).unique_consecutive(return_counts=True)
        found, start = [], 0
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            expert, group = divmod(key, groups + 1)
            if group:
                found.append(PairRange(expert, group - 1, start, start + count))
            start += count
        return found


def by_expert(pairs_SI: Tensor, weights_EIO: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the product (S, O) of each pair with the weights of its expert."""
    product_SO = pairs_SI.new_empty(len(pairs_SI), weights_EIO.shape[2])
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            mm(pairs_SI[start : start + size], weights_EIO[expert], out=product_SO[start : start + size])
        start += size
    return product_SO
