"""The borders between tensors that all ranks of a group have and tensors of which each rank has its own part.

Between two borders every rank computes with its cut of the weights. A column layer (cut along its outputs) stands
behind :func:`enter_cut`, a row layer (cut along its inputs) before :func:`leave_cut`. Each function communicates in the
forward pass, in the backward pass, or in both, and nothing where the group has one rank.

With sequence parallel, the tensors outside are divided among the ranks by rows, in parts of equal size: the last part
is padded with zeros. Inside, every rank has all rows, without the padding.

Shapes: T rows, N rows of one part, H features.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.model.parallel import Ranks

__all__ = ["enter_cut", "gather_rows", "leave_cut", "part_rows", "split_rows"]


def part_rows(rows: int, ranks: Ranks) -> int:
    """Return the number of rows of one rank's part, with padding."""
    return -(-rows // ranks.size)


def enter_cut(x: Tensor, ranks: Ranks, rows: int, *, by_rows: bool) -> Tensor:
    """Return x for layers that are cut along their outputs. Each rank computes a part of dx; they are added up.

    ``by_rows``: x is this rank's part of ``rows`` rows; the result has all of them.
    """
    if ranks.size == 1:
        return x
    entered: Tensor = _GatherSum.apply(x, ranks, rows) if by_rows else _SumGradient.apply(x, ranks)
    return entered


def leave_cut(y_TH: Tensor, ranks: Ranks, *, by_rows: bool) -> Tensor:
    """Return the sum of the ranks' y. ``by_rows``: only this rank's part of its rows."""
    if ranks.size == 1:
        return y_TH
    left: Tensor = _SumScatter.apply(y_TH, ranks) if by_rows else _Sum.apply(y_TH, ranks)
    return left


def split_rows(x_TH: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part of rows that all ranks have. Their gradient is gathered from the parts."""
    if ranks.size == 1:
        return x_TH
    part_NH: Tensor = _Split.apply(x_TH, ranks)
    return part_NH


def gather_rows(x_NH: Tensor, ranks: Ranks, rows: int) -> Tensor:
    """Return all rows from the parts of the ranks. All ranks must have the same gradient; each takes its part."""
    if ranks.size == 1:
        return x_NH
    whole_TH: Tensor = _Gather.apply(x_NH, ranks, rows)
    return whole_TH


def _sum(x: Tensor, ranks: Ranks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ranks.add_up(total)
    return total


def _gather(x_NH: Tensor, ranks: Ranks, rows: int) -> Tensor:
    whole = x_NH.new_empty(ranks.size * len(x_NH), *x_NH.shape[1:])
    dist.all_gather_into_tensor(whole, x_NH.contiguous(), group=ranks.group)
    return whole[:rows]


def _padded(x_TH: Tensor, ranks: Ranks) -> Tensor:
    missing = part_rows(len(x_TH), ranks) * ranks.size - len(x_TH)
    if not missing:
        return x_TH.contiguous()
    return torch.cat([x_TH, x_TH.new_zeros(missing, *x_TH.shape[1:])])


def _scatter_sum(x_TH: Tensor, ranks: Ranks) -> Tensor:
    padded = _padded(x_TH, ranks)
    part = padded.new_empty(len(padded) // ranks.size, *padded.shape[1:])
    dist.reduce_scatter_tensor(part, padded, group=ranks.group)
    return part


def _own_part(x_TH: Tensor, ranks: Ranks) -> Tensor:
    return _padded(x_TH, ranks).chunk(ranks.size)[ranks.number].clone()


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(dx, ctx.ranks), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks) -> Tensor:
        return _sum(y, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, ranks: Ranks, rows: int) -> Tensor:
        ctx.ranks = ranks
        return _gather(x_NH, ranks, rows)

    @staticmethod
    def backward(ctx: Any, dx_TH: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter_sum(dx_TH, ctx.ranks), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TH: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(y_TH)
        return _scatter_sum(y_TH, ranks)

    @staticmethod
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(dy_NH, ctx.ranks, ctx.rows), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(x_TH)
        return _own_part(x_TH, ranks)

    @staticmethod
    def backward(ctx: Any, dx_NH: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(dx_NH, ctx.ranks, ctx.rows), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, ranks: Ranks, rows: int) -> Tensor:
        ctx.ranks = ranks
        return _gather(x_NH, ranks, rows)

    @staticmethod
    def backward(ctx: Any, dx_TH: Tensor) -> tuple[Tensor | None, ...]:
        return _own_part(dx_TH, ctx.ranks), None, None
