"""A mixture-of-experts block whose experts are divided among processes (expert parallelism).

Every rank of the expert group has some of the experts, whole. A rank sends each of its tokens to the ranks that have
the token's experts, and gets their outputs back (two all-to-all exchanges a layer). Ranks may have different numbers of
tokens, also none, but all must run the layer together.

The ranks of a tensor-parallel group have the same tokens, so each sends only its part of them; with sequence parallel
it has no others anyway.

Adapters on experts are computed where the experts are. Rows are sent in the order of expert and request, and the number
of each kind tells the rank that gets them whose they are. A factor that all experts share is on every rank, and each
adds to its gradient what comes from the rows that it got.

Shapes: T tokens, N of them on this rank, K experts per token, S tokens that this rank's experts get, E experts of this
rank, H hidden and I intermediate features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.activations import ACT2FN

from twinkle.model.decoder.experts.forward import experts_forward
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.lora import LayerLora
from twinkle.model.decoder.lora.segments import Segment, SegmentLora
from twinkle.model.decoder.products import linear
from twinkle.model.decoder.transfer import to_device
from twinkle.model.megatron.config import StageSpec
from twinkle.model.megatron.regions import gather_rows, part_rows, split_rows
from twinkle.model.parallel import Ranks

__all__ = ["ExpertMlp"]


class ExpertMlp(nn.Module):
    """The router, which every rank has, and this rank's experts."""

    adapter_name = "mlp.experts"  # within its decoder layer

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
        self.activation = ACT2FN[spec.shape.activation]
        self.lora: LayerLora | None = None  # the adapters of the batch, for the time of one call
        self._shape, self._mesh, self._own = shape, mesh, own

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return _uncompiled(self, x, rows)

    def compute(self, x: Tensor, rows: int) -> Tensor:
        """Return the outputs for this rank's rows of x. It is never compiled: routes change with every batch."""
        mesh = self._mesh
        tenants = None if self.lora is None else _Tenants.find(self.lora, self.adapter_name, rows, mesh.tp, x.device)
        if mesh.sequence_parallel or mesh.tp.size == 1:
            return self._mixed(x, tenants)
        return gather_rows(self._mixed(split_rows(x, mesh.tp), tenants), mesh.tp, rows)

    def _mixed(self, x_NH: Tensor, tenants: "_Tenants | None") -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        weights_NK, experts_NK = self._route(x_NH)
        kinds_NK = experts_NK if tenants is None else tenants.kinds(experts_NK)
        kinds = kinds_NK.flatten()
        order = torch.argsort(kinds, stable=True)  # by expert, hence by the rank that has it
        count = self._shape.count * (1 if tenants is None else tenants.groups)
        exchange = _Exchange.plan(torch.bincount(kinds, minlength=count), self._mesh.ep)
        received_SH = exchange.forth(x_NH[order // self._shape.per_token])
        answers = exchange.back(self._answers(received_SH, exchange.kinds(), tenants))
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

    def _answers(self, x_SH: Tensor, kind_S: Tensor, tenants: "_Tenants | None") -> Tensor:
        """Return the outputs of this rank's experts for rows of these kinds."""
        if tenants is not None:
            order, expert_S, lora = tenants.on_received(kind_S)
            if lora is not None:
                order, chosen_S1 = to_device(order, x_SH.device), to_device(expert_S[order], x_SH.device)[:, None]
                y_SH = experts_forward(_OwnExperts(self, lora), x_SH[order], chosen_S1, x_SH.new_ones(len(x_SH), 1))
                return y_SH[torch.argsort(order)]
            kind_S = expert_S
        order = to_device(torch.argsort(kind_S, stable=True), x_SH.device)
        return self._run(x_SH, order, torch.bincount(kind_S, minlength=self._own).tolist())

    def _run(self, x_SH: Tensor, by_expert: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs without adapters. ``by_expert``: the rows ordered by expert; ``counts``: of each."""
        outputs = []
        weights = self.gate_up_E2IH.unbind(), self.down_EHI.unbind()  # their gradients are put together once
        for rows, gate_up_2IH, down_HI in zip(x_SH[by_expert].split(counts), *weights, strict=True):
            gate, up = linear(rows, gate_up_2IH).chunk(2, dim=-1)
            outputs.append(linear(self.activation(gate) * up, down_HI))
        return torch.cat(outputs)[torch.argsort(by_expert)]


_uncompiled: Callable[[ExpertMlp, Tensor, int], Tensor] = torch.compiler.disable(ExpertMlp.compute)


class _OwnExperts:
    """This rank's experts as :func:`experts_forward` reads them from a module of Transformers."""

    is_transposed, is_concatenated, has_bias = False, True, False

    def __init__(self, mlp: ExpertMlp, lora: LayerLora) -> None:
        self.gate_up_proj, self.down_proj = mlp.gate_up_E2IH, mlp.down_EHI
        self.lora, self.adapter_name = lora, mlp.adapter_name
        self.act_fn = mlp.activation

    def _apply_gate(self, gate_up_SN: Tensor) -> Tensor:
        gate, up = gate_up_SN.chunk(2, dim=-1)
        activated: Tensor = self.act_fn(gate) * up
        return activated


@dataclass(frozen=True)
class _Tenants:
    """The adapters of a batch that are on the experts of one layer.

    A group is the rows of one such adapter's request, numbered from 1; 0 is that of all other rows. All ranks that
    exchange rows have the same groups. A kind of row is one for an expert and a group: expert · groups + group.
    """

    lora: LayerLora
    segments: Sequence[SegmentLora]
    group_N: Tensor  # of each of this rank's rows

    @classmethod
    def find(cls, lora: LayerLora, name: str, rows: int, tp: Ranks, device: torch.device) -> "_Tenants | None":
        """Return the adapters on the experts ``name``; None if there are none. ``rows``: those of the batch."""
        segments = lora.segments_on_experts(name)
        if not segments:
            return None
        padded = part_rows(rows, tp) * tp.size
        group_T, first = torch.zeros(padded, dtype=torch.long), 1
        for each in segments:
            sizes = torch.tensor(each.segment.groups.sizes)
            numbers = torch.arange(first, first + len(sizes))
            group_T[each.segment.start : each.segment.stop] = numbers.repeat_interleave(sizes)
            first += len(sizes)
        return cls(lora, segments, to_device(group_T.chunk(tp.size)[tp.number].clone(), device))

    @property
    def groups(self) -> int:
        """Return the number of groups, with that of rows without adapters."""
        return 1 + sum(len(each.segment.groups.sizes) for each in self.segments)

    def kinds(self, experts_NK: Tensor) -> Tensor:
        return experts_NK * self.groups + self.group_N[:, None]

    def on_received(self, kind_S: Tensor) -> tuple[Tensor, Tensor, LayerLora | None]:
        """Return received rows ordered by group, the expert of each row, and the adapters on the rows in that order.

        The adapters are None if no row has any.
        """
        expert_S, group_S = kind_S // self.groups, kind_S % self.groups
        sizes = torch.bincount(group_S, minlength=self.groups).tolist()
        start, first = sizes[0], 1
        segments: list[SegmentLora] = []
        for each in self.segments:
            last = first + len(each.segment.groups.sizes)
            for run in _runs(sizes, first, last):  # groups of a segment are never empty
                here = Segment(
                    start, start + sum(sizes[run.start : run.stop]), Groups(tuple(sizes[run.start : run.stop]))
                )
                own = slice(run.start - first, run.stop - first)
                gradient_GP = None if each.gradient_GP is None else each.gradient_GP[own]
                weights_GP = each.weights_GP[own]
                segments.append(replace(each, segment=here, weights_GP=weights_GP, gradient_GP=gradient_GP))
                start = here.stop
            first = last
        lora = self.lora.with_segments(segments) if segments else None
        return torch.argsort(group_S, stable=True), expert_S, lora


def _runs(sizes: Sequence[int], first: int, last: int) -> Iterator[range]:
    """Yield the ranges of neighbours between ``first`` and ``last`` whose sizes are not 0."""
    for filled, run in groupby(range(first, last), key=lambda number: sizes[number] > 0):
        numbers = list(run)
        if filled:
            yield range(numbers[0], numbers[-1] + 1)


class _Exchange:
    """Which rows the ranks of an expert group send each other: ``sent[r]`` to rank r, ``received[r]`` from it."""

    def __init__(self, ranks: Ranks, sent: list[int], received_RE: Tensor) -> None:
        self._ranks = ranks
        self._sent = sent
        self._received_RE = received_RE  # rows of each kind from each rank; each expert has as many kinds
        self._received = received_RE.sum(1).tolist()

    @classmethod
    def plan(cls, counts: Tensor, ranks: Ranks) -> "_Exchange":
        """Tell the other ranks how many rows their experts get. ``counts``: of all kinds, in the order of experts."""
        counts_RE = counts.view(ranks.size, -1)
        received_RE = counts_RE
        if ranks.size > 1:
            received_RE = torch.empty_like(counts_RE)
            dist.all_to_all_single(received_RE, counts_RE.contiguous(), group=ranks.group)
        return cls(ranks, counts_RE.sum(1).tolist(), received_RE.cpu())

    def kinds(self) -> Tensor:
        """Return the kind of each received row, counted from this rank's first expert; in host memory.

        Rows come ordered by rank, and for each rank by kind.
        """
        numbers = torch.arange(self._received_RE.shape[1]).repeat(len(self._received_RE))
        return torch.repeat_interleave(numbers, self._received_RE.flatten())

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
