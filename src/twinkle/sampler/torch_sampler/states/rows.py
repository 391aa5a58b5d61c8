"""The rows of one pass in a layer of linear attention: sequences go on from their states, and leave new ones.

Nothing here waits for the device. Passes of single tokens, as in decoding, are in ``tokens``.

Shapes: T rows, N sequences, K key heads of width D, V value heads of width E, F features, W width of the convolution, C
= W − 1 columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.convolution import silu_convolution
from twinkle.model.decoder.linear_attention.delta_rule import gated_delta_rule
from twinkle.model.decoder.linear_attention.layer import StatefulRows
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.states.pool import StatePool
from twinkle.sampler.torch_sampler.states.tokens import TokenRows


@dataclass(frozen=True)
class StatePlan:
    """The sequences of a pass: their rows, their slots, and which of them begin with the state 0."""

    bounds: Bounds
    longer: Bounds  # with the columns of each sequence before its rows
    last_NC: Tensor  # the last columns of each sequence, among the rows of ``longer``
    slots_N: Tensor
    begins_N: Tensor  # whether a sequence begins in this pass

    @classmethod
    def for_spans(
        cls, lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], columns: int, device: torch.device
    ) -> "StatePlan":
        longer = tuple(length + columns for length in lengths)
        last_NC = torch.tensor(list(accumulate(longer)))[:, None] + torch.arange(-columns, 0)
        return cls(
            Bounds.from_lengths(tuple(lengths), device),
            Bounds.from_lengths(longer, device),
            to_device(last_NC, device),
            to_device(torch.tensor(slots), device),
            to_device(torch.tensor([start == 0 for start in starts]), device),
        )


@dataclass(frozen=True)
class StateRows:
    """One layer's part; implements :class:`~twinkle.model.decoder.linear_attention.layer.StatefulRows`."""

    plan: StatePlan
    matrices_SVDE: Tensor
    columns_SCF: Tensor

    def convolve(self, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        plan = self.plan
        # Slots may hold anything where a sequence begins, NaN too, so the old columns are not multiplied by 0.
        before_NCF = self.columns_SCF[plan.slots_N].masked_fill(plan.begins_N[:, None, None], 0)
        pieces = zip(before_NCF, x_TF.split(plan.bounds.lengths), strict=True)
        longer_TF = torch.cat([each for pair in pieces for each in pair])
        self.columns_SCF[plan.slots_N] = longer_TF[plan.last_NC]
        y_TF = silu_convolution(longer_TF, weight_FW, plan.longer)
        columns = before_NCF.shape[1]
        return torch.cat([each[columns:] for each in y_TF.split(plan.longer.lengths)])

    def delta_rule(self, q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor) -> Tensor:
        plan = self.plan
        states_NVDE = self.matrices_SVDE[plan.slots_N].masked_fill(plan.begins_N[:, None, None, None], 0)
        out_TVE, states_NVDE = gated_delta_rule(q_TKD, k_TKD, v_TVE, g_TV, beta_TV, plan.bounds, states_NVDE)
        self.matrices_SVDE[plan.slots_N] = states_NVDE
        return out_TVE


def rows_of_layers(
    pool: StatePool, lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], device: torch.device
) -> list[StatefulRows]:
    """Return the rows of a pass for each layer with linear attention. ``slots``: those of the sequences' states."""
    tensors = zip(pool.matrices, pool.columns, strict=True)
    if max(lengths) == 1:
        slots_N = to_device(torch.tensor(slots), device)
        begins_N = to_device(torch.tensor([start == 0 for start in starts]), device)
        return [TokenRows(slots_N, begins_N, *each) for each in tensors]
    plan = StatePlan.for_spans(lengths, starts, slots, pool.columns[0].shape[1], device)
    return [StateRows(plan, *each) for each in tensors]
