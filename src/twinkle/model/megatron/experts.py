"""A mixture-of-experts block whose experts are divided among processes (expert parallelism).

Every rank of the expert group has some of the experts, whole. A rank sends each of its tokens to the ranks that have
the token's experts, and gets their outputs back (two all-to-all exchanges a layer). Ranks may have different numbers of
tokens, also none, but all must run the layer together.

The ranks of a tensor-parallel group have the same tokens, so each sends only its part of them; with sequence parallel
it has no others anyway.

Shapes: T tokens, N of them on this rank, K experts per token, S tokens that this rank's experts get, E experts of this
rank, H hidden and I intermediate features.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.activations import ACT2FN

from twinkle.model.decoder.products import linear
from twinkle.model.decoder.transfer import to_device
from twinkle.model.megatron.config import StageSpec
from twinkle.model.megatron.regions import gather_rows, split_rows
from twinkle.model.parallel import Ranks

__all__ = ["ExpertMlp"]


class ExpertMlp(nn.Module):
    """The router, which every rank has, and this rank's experts."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__()
        shape, hidden, mesh = spec.shape.experts, spec.shape.hidden, spec.mesh
        assert shape is not None, "the decoder has no experts"
        own = shape.count // mesh.ep.size
        place: Any = {"device": spec.device, "dtype": spec.dtype}
        self.first = own * mesh.ep.number  # the number of this rank's first expert
        self.router_EH = nn.Parameter(torch.empty(shape.count, hidden, **place))
        self.gate_up_E2IH = nn.Parameter(torch.empty(own, 2 * shape.intermediate, hidden, **place))
        self.down_EHI = nn.Parameter(torch.empty(own, hidden, shape.intermediate, **place))
        self._activation = ACT2FN[spec.shape.activation]
        self._shape, self._mesh, self._own = shape, mesh, own

    def forward(self, x: Tensor, rows: int) -> Tensor:
        mesh = self._mesh
        if mesh.sequence_parallel or mesh.tp.size == 1:
            return self._mixed(x)
        return gather_rows(self._mixed(split_rows(x, mesh.tp)), mesh.tp, rows)

    def _mixed(self, x_NH: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        weights_NK, experts_NK = self._route(x_NH)
        chosen = experts_NK.flatten()
        order = torch.argsort(chosen, stable=True)  # by expert, hence by the rank that has it
        exchange = _Exchange.plan(torch.bincount(chosen, minlength=self._shape.count), self._mesh.ep)
        received_SH = exchange.forth(x_NH[order // self._shape.per_token])
        answers = exchange.back(self._run(received_SH, *exchange.expert_order(self._own, x_NH.device)))
        # No index_add: on CUDA its sums come in any order, and results must not change from run to run.
        answers_NKH = answers[torch.argsort(order)].view(*weights_NK.shape, -1)
        return (answers_NKH * weights_NK[:, :, None]).sum(1)

    def _route(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts."""
        logits_NE = linear(x_NH, self.router_EH)
        shares_NE = torch.softmax(logits_NE, -1, dtype=torch.float)
        weights_NK, experts_NK = torch.topk(shares_NE, self._shape.per_token, dim=-1)
        if self._shape.normalize:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return weights_NK.to(logits_NE.dtype), experts_NK

    def _run(self, x_SH: Tensor, by_expert: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs of this rank's experts. ``by_expert``: the rows ordered by expert; ``counts``: of each."""
        outputs = []
        weights = self.gate_up_E2IH.unbind(), self.down_EHI.unbind()  # their gradients are put together once
        for rows, gate_up_2IH, down_HI in zip(x_SH[by_expert].split(counts), *weights, strict=True):
            gate, up = linear(rows, gate_up_2IH).chunk(2, dim=-1)
            outputs.append(linear(self._activation(gate) * up, down_HI))
        return torch.cat(outputs)[torch.argsort(by_expert)]


class _Exchange:
    """Which rows the ranks of an expert group send each other: ``sent[r]`` to rank r, ``received[r]`` from it."""

    def __init__(self, ranks: Ranks, sent: list[int], received_RE: Tensor) -> None:
        self._ranks = ranks
        self._sent = sent
        self._received_RE = received_RE  # rows from each rank for each of this rank's experts
        self._received = received_RE.sum(1).tolist()

    @classmethod
    def plan(cls, counts: Tensor, ranks: Ranks) -> "_Exchange":
        """Tell the other ranks how many rows each of their experts gets. ``counts``: for all experts, in order."""
        counts_RE = counts.view(ranks.size, -1)
        received_RE = counts_RE
        if ranks.size > 1:
            received_RE = torch.empty_like(counts_RE)
            dist.all_to_all_single(received_RE, counts_RE.contiguous(), group=ranks.group)
        return cls(ranks, counts_RE.sum(1).tolist(), received_RE.cpu())

    def expert_order(self, experts: int, device: torch.device) -> tuple[Tensor, list[int]]:
        """Return the received rows ordered by expert, and how many each expert has.

        They come ordered by rank, and for each rank by expert.
        """
        numbers = torch.arange(experts).repeat(len(self._received_RE))
        expert_S = torch.repeat_interleave(numbers, self._received_RE.flatten())
        return to_device(torch.argsort(expert_S, stable=True), device), self._received_RE.sum(0).tolist()

    def forth(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts; return those that came here."""
        return self._exchanged(rows, self._sent, self._received)

    def back(self, rows: Tensor) -> Tensor:
        """Send the outputs for received rows back; return those for this rank's rows."""
        return self._exchanged(rows, self._received, self._sent)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self._ranks.size == 1:
            return rows
        exchanged: Tensor = _AllToAll.apply(rows, sent, received, self._ranks)
        return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
        ctx.sent, ctx.received, ctx.ranks = sent, received, ranks
        return _all_to_all(rows, sent, received, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.ranks), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ranks.group)
    return result
