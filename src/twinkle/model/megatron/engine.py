"""Micro-batches through a model that is cut: what ``trainer.engine`` does for one process, on a mesh of processes.

A process runs one stage of the pipeline, with its cut of each layer. Without pipeline parallelism a pass is computed as
in one process; the layers and the head communicate. With pipeline parallelism several micro-batches run as one schedule
of megatron-core (one forward, one backward, in turn), in which stages send each other hidden states and their
gradients. The head and the losses are on the last stage. Its values are then sent to the other stages, so that every
process knows the results of every sequence.

The gradients of adapters are a side effect of the backward pass, as in one process: each process has those of its own
cuts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.errors import CapacityError
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.head import STATISTICS, ChunkedHead
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.decoder.transfer import HostCopy
from twinkle.model.megatron.mcore import ModelType, get_forward_backward_func
from twinkle.model.megatron.on_cpu import megatron_on_cpu
from twinkle.model.megatron.stage import Stage
from twinkle.model.parallel import Ranks, in_step
from twinkle.model.trainer.batch import Block, DeviceBatch, GradientRow, GradientRows, Part, build_batch, harvest
from twinkle.model.trainer.engine import Computed, head_pass, head_values
from twinkle.model.trainer.lockstep import one_token

__all__ = ["MegatronEngine", "MegatronPipeline", "make_engine"]

_GROUPS = 8  # micro-batches that run as one schedule, for each stage, at most: their results are held until its end
_FORWARD, _FORWARD_BACKWARD, _NOTHING = range(3)

Batches = Sequence[Sequence[Part]]


class Runs(Protocol):
    """What runs micro-batches. ``recompute``: of each micro-batch; None: no gradients are computed."""

    def run(self, batches: Batches, recompute: Sequence[bool] | None, give_way: GiveWay | None) -> list[Computed]: ...

    def finish(self) -> None:
        """Note that this call has no more micro-batches."""
        ...


class MegatronEngine:
    """Runs one micro-batch after another (:class:`~twinkle.model.trainer.call.Passes`)."""

    def __init__(
        self, stage: Stage, stage_runs: "StageRuns", runs: Runs, remote: "ExpertLockstep | None" = None
    ) -> None:
        self.stage = stage
        self.remote = remote  # what computes for requests of other ranks; None: nothing does
        self._stage_runs = stage_runs
        self._runs = runs

    @property
    def architecture(self) -> Architecture:
        return self.stage.architecture

    @property
    def head(self) -> ChunkedHead | None:
        """Return the head; None on all stages but the last."""
        return self._stage_runs.head

    @property
    def token_rows(self) -> int:
        return self._stage_runs.token_rows

    @property
    def padding_rows(self) -> int:
        return 0

    @property
    def pipeline(self) -> "MegatronPipeline | None":
        """Return what runs several micro-batches at once; None without pipeline parallelism."""
        stages = self.stage.mesh.pp.size
        return None if stages == 1 else MegatronPipeline(self._runs, stages)

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        return self._runs.run([parts], None, give_way)[0]

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        return self._runs.run([parts], [recompute], give_way)[0]

    def finish(self) -> None:
        self._runs.finish()

    def freeze_compilation(self) -> None:
        """Stop compiling: from now on, batches for which there is no compiled code run eagerly."""
        self._stage_runs.stance = "eager_on_recompile"


class MegatronPipeline:
    """Runs several micro-batches through the pipeline stages (:class:`~twinkle.model.trainer.call.Pipeline`)."""

    def __init__(self, runs: Runs, stages: int) -> None:
        self.fewest, self.most = 2 * stages, _GROUPS * stages
        self._runs = runs

    def forward(self, batches: Batches) -> list[Computed]:
        return self._runs.run(batches, None, None)

    def forward_backward(self, batches: Batches, recompute: Sequence[bool]) -> list[Computed]:
        return self._runs.run(batches, recompute, None)


def make_engine(stage: Stage, head: ChunkedHead | None) -> MegatronEngine:
    """Return the engine of this process. ``head``: None on all stages but the last."""
    stage_runs = StageRuns(stage, head)
    mesh = stage.mesh
    if not mesh.spreads_experts:
        return MegatronEngine(stage, stage_runs, stage_runs)
    if mesh.is_first:  # all ranks of an expert group must go back through all layers, whatever adapters they have
        stage.layers[0].opens_gradient = True
    lockstep = ExpertLockstep(stage_runs, mesh.dp, mesh.data_block)
    return MegatronEngine(stage, stage_runs, lockstep, remote=lockstep)


class StageRuns:
    """Runs micro-batches through this process's stage."""

    def __init__(self, stage: Stage, head: ChunkedHead | None) -> None:
        self.head = head
        self.token_rows = 0  # counted over all passes so far
        self.stance = "default"  # of torch.compile
        self._stage = stage

    def run(self, batches: Batches, recompute: Sequence[bool] | None, give_way: GiveWay | None) -> list[Computed]:
        mesh = self._stage.mesh
        assert mesh.world.size == 1 or give_way is None, "ranks compute in step with each other"
        with in_step(mesh.world), torch.compiler.set_stance(self.stance):
            if mesh.pp.size > 1:
                return self._scheduled(batches, recompute)
            if recompute is None:
                return [self._forward(parts, give_way) for parts in batches]
            pairs = zip(batches, recompute, strict=True)
            return [self._forward_backward(parts, again, give_way) for parts, again in pairs]

    def finish(self) -> None:
        """Do nothing: the ranks of one model have the same calls, and other ranks do not wait for this one."""

    def _forward(self, parts: Sequence[Part], give_way: GiveWay | None) -> Computed:
        with torch.no_grad():
            batch = self._build(parts, None, give_way)
            values = head_values(self._own_head, batch.blocks, self._hidden(batch.input_ids, batch), give_way)
        return Computed.from_values(batch.blocks, values)

    def _forward_backward(self, parts: Sequence[Part], recompute: bool, give_way: GiveWay | None) -> Computed:
        batch = self._build(parts, recompute, give_way)
        hidden_TH = self._hidden(batch.input_ids, batch)
        with torch.no_grad():
            values, dhidden_TH = head_pass(self._own_head, batch.blocks, hidden_TH.detach(), give_way)
        if hidden_TH.requires_grad:  # False if all adapters of the batch are on the head alone
            hidden_TH.backward(dhidden_TH)
        with torch.no_grad():
            gradients = harvest(batch.gradients, parts)
        return Computed.from_values(batch.blocks, values, gradients)

    def _scheduled(self, batches: Batches, recompute: Sequence[bool] | None) -> list[Computed]:
        """Run micro-batches as one schedule: forward passes alone, or one forward, one backward, in turn."""
        stage, train = self._stage, recompute is not None
        flags = recompute if recompute is not None else [None] * len(batches)
        scheduled = _ScheduledStage(stage, [_Entry(parts, flag) for parts, flag in zip(batches, flags, strict=True)])

        def forward_step(entries: Iterator[_Entry], scheduled: _ScheduledStage) -> tuple[Tensor, Any]:
            entry = next(entries)
            batch = self._build(entry.parts, entry.recompute, None)
            entry.remember(batch, stage.architecture)
            received = scheduled.input_tensor
            hidden = self._hidden(batch.input_ids if received is None else received, batch)
            if stage.is_last:
                entry.compute_head = lambda hidden_TH: self._head_step(entry, batch.blocks, hidden_TH, train)
            return hidden, entry.loss

        with torch.set_grad_enabled(train), megatron_on_cpu():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(scheduled.entries),
                model=scheduled,
                num_microbatches=len(batches),
                seq_length=1,  # this and the next are not read: stages tell each other the shapes
                micro_batch_size=1,
                forward_only=not train,
            )
        _send_values(scheduled.entries, stage)
        return [entry.computed() for entry in scheduled.entries]

    def _head_step(self, entry: "_Entry", blocks: Sequence[Block], hidden_TH: Tensor, train: bool) -> Tensor | None:
        """Compute the head of one micro-batch; in training, return dL/dhidden."""
        if not train:
            entry.values = head_values(self._own_head, blocks, hidden_TH)
            return None
        entry.values, dhidden_TH = head_pass(self._own_head, blocks, hidden_TH)
        return dhidden_TH

    def _build(self, parts: Sequence[Part], recompute: bool | None, give_way: GiveWay | None) -> DeviceBatch:
        return build_batch(
            parts,
            self._stage.architecture,
            self._stage.device,
            train=recompute is not None,
            recompute=bool(recompute),
            give_way=give_way,
        )

    def _hidden(self, ids_or_hidden: Tensor, batch: DeviceBatch) -> Tensor:
        self.token_rows += batch.rows
        return self._stage.hidden_states(ids_or_hidden, batch.position_ids, batch.layer_batch)

    @property
    def _own_head(self) -> ChunkedHead:
        assert self.head is not None, "only the last stage has the head"
        return self.head


@dataclass
class _Entry:
    """One micro-batch of a schedule. What it needs of its tensors after its passes is kept, not more."""

    parts: Sequence[Part]
    recompute: bool | None  # None: no gradients are computed
    compute_head: Callable[[Tensor], Tensor | None] | None = None  # on the last stage, between forward and backward
    values: list[Tensor] = field(default_factory=list)  # one (n, M) for each block
    shapes: tuple[tuple[int, int], ...] = ()  # of the values
    lengths: tuple[tuple[int, ...], ...] = ()
    gradients: tuple[GradientRows, ...] = ()

    def remember(self, batch: DeviceBatch, architecture: Architecture) -> None:
        self.shapes = tuple(_values_shape(block, architecture) for block in batch.blocks)
        self.lengths = tuple(block.lengths for block in batch.blocks)
        self.gradients = batch.gradients

    def loss(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return a loss whose backward pass sends dL/dhidden back, and what the schedule asks for beside it."""
        assert self.compute_head is not None
        nothing = torch.zeros((), dtype=torch.int, device=hidden_TH.device)
        loss = _HeadLoss.apply(hidden_TH, self.compute_head)
        self.compute_head = None
        return loss, nothing, None

    def computed(self) -> Computed:
        gradients = None
        if self.recompute is not None:
            with torch.no_grad():
                gradients = harvest(self.gradients, self.parts)
        return Computed(tuple(map(HostCopy.start, self.values)), self.lengths, gradients)


class _ScheduledStage:
    """What megatron-core's schedules ask of a model: its settings, and a place for the tensor that was received."""

    model_type = ModelType.encoder_or_decoder
    vp_stage = None

    def __init__(self, stage: Stage, entries: list[_Entry]) -> None:
        self.config = stage.config
        self.entries = entries
        self.input_tensor: Tensor | None = None  # None on the first stage

    def set_input_tensor(self, tensors: Sequence[Tensor | None]) -> None:
        self.input_tensor = tensors[0]


class _HeadLoss(torch.autograd.Function):
    """The head and the losses as the end of the autograd graph. Its value is 0; what counts is the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, compute: Callable[[Tensor], Tensor | None]) -> Tensor:
        dhidden_TH = compute(hidden_TH.detach())
        if dhidden_TH is not None:
            ctx.save_for_backward(dhidden_TH)
        return torch.zeros((), device=hidden_TH.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (dhidden_TH,) = ctx.saved_tensors
        return dhidden_TH, None


def _values_shape(block: Block, architecture: Architecture) -> tuple[int, int]:
    """Return the shape of the values that the head computes for a block."""
    head = architecture.head
    if block.last_rows is not None:
        return len(block.last_rows), block.width + head.in_features
    columns = block.width + (STATISTICS if block.query.statistics else 0)
    return len(block.targets_nK), columns + (head.out_features if block.query.logits else 0)


@torch.no_grad()
def _send_values(entries: Sequence[_Entry], stage: Stage) -> None:
    """Give all stages the values of the last one."""
    shapes = [shape for entry in entries for shape in entry.shapes]
    sizes = [rows * columns for rows, columns in shapes]
    if stage.is_last:
        flat = torch.cat([values.reshape(-1) for entry in entries for values in entry.values])
        assert len(flat) == sum(sizes), "the other stages expect other values"
    else:
        flat = torch.empty(sum(sizes), device=stage.device)
    pp = stage.mesh.pp
    dist.broadcast(flat, group=pp.group, group_src=pp.size - 1)
    if stage.is_last:
        return
    pieces = iter([part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)])
    for entry in entries:
        entry.values = [next(pieces) for _ in entry.shapes]


@dataclass(frozen=True, order=True)
class _OnExperts:
    """A request whose adapter is on experts: those of one layout are neighbours in this order."""

    layout: str  # the digest of the whole adapter's
    index: int
    adapter_id: str


@dataclass(frozen=True)
class _Turn:
    """What a rank asks for in one micro-batch: whether it is recomputed, and the requests with adapters on experts."""

    recompute: bool
    requests: tuple[_OnExperts, ...]


class ExpertLockstep:
    """Runs micro-batches together with ranks that have other sequences, but some of this model's experts.

    The experts of a layer need all ranks that hold some of them, so all must run the same number of micro-batches. A
    rank that has fewer runs dummy ones and discards their results. Before each run the ranks agree on what comes next:
    first all forward runs, then all forward-backward runs.

    A rank computes its experts for the requests of other ranks, with their adapters. So that each rank has these
    adapters in its micro-batch, and room for their gradients, it has one dummy token of each such request there
    (:class:`~twinkle.model.trainer.call.RemoteRequests`).
    """

    def __init__(self, runs: StageRuns, ranks: Ranks, block: int) -> None:
        """``ranks``: those with different data. The ranks of one model take the same decisions.

        ``block``: how many neighbours of ``ranks`` need each other's experts.
        """
        self.block = block
        self._runs = runs
        self._ranks = ranks
        self._pool: AdapterPool | None = None
        self._gradients: dict[int, GradientRow] = {}  # by request; of micro-batches that only other ranks had

    def begin(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._gradients = {}

    def gradients(self) -> list[GradientRow]:
        found, self._gradients = self._gradients, {}
        return list(found.values())

    def run(self, batches: Batches, recompute: Sequence[bool] | None, give_way: GiveWay | None) -> list[Computed]:
        kind = _FORWARD if recompute is None else _FORWARD_BACKWARD
        flags = recompute or [False] * len(batches)
        own = [_Turn(flag, _on_experts(parts)) for flag, parts in zip(flags, batches, strict=True)]
        turns = self._wait_for(kind, own)
        padded = [*batches, *([()] * (len(turns) - len(batches)))]
        filled = [self._filled(parts, turn) for parts, turn in zip(padded, turns, strict=True)]
        computed = self._run(kind, filled, turns, give_way)
        self._keep(computed[len(batches) :])
        pairs = zip(computed, batches, filled, strict=False)
        return [each.only(_places(parts, among)) for each, parts, among in pairs]

    def finish(self) -> None:
        """Run dummy micro-batches for as long as other ranks have some left."""
        self._wait_for(_NOTHING, [])

    def _wait_for(self, kind: int, own: list[_Turn]) -> list[_Turn]:
        """Run dummies until all ranks agree that a run of this kind comes next. Return the micro-batches of that run.

        All ranks recompute the same ones, because the layers of a recomputed micro-batch communicate again.
        """
        while True:
            everyone = self._ranks.gather((kind, own))
            next_kind = min(each for each, _ in everyone)
            asked = [turns if each == next_kind else [] for each, turns in everyone]
            blocks = [asked[start : start + self.block] for start in range(0, len(asked), self.block)]
            merged = self._merged(blocks)
            if next_kind == kind:
                return merged
            self._keep(self._run(next_kind, [self._filled((), turn) for turn in merged], merged, None))

    def _merged(self, blocks: Sequence[Sequence[Sequence[_Turn]]]) -> list[_Turn]:
        """Return what this rank runs: what the ranks of its own block ask for. All blocks recompute alike.

        Raise on all ranks if a rank of any block has no room for the adapters that it needs.
        """
        count = max(len(turns) for block in blocks for turns in block)
        for block in blocks:
            self._bring({request.adapter_id for turns in block for turn in turns for request in turn.requests}, False)
        own = blocks[self._ranks.number // self.block]
        merged = []
        for place in range(count):
            recompute = any(turn.recompute for block in blocks for turns in block for turn in turns[place : place + 1])
            requests = {request for turns in own for turn in turns[place : place + 1] for request in turn.requests}
            merged.append(_Turn(recompute, tuple(sorted(requests))))
        self._bring({request.adapter_id for turn in merged for request in turn.requests}, True)
        return merged

    def _bring(self, adapter_ids: set[str], now: bool) -> None:
        """Raise CapacityError if these adapters do not fit together; with ``now`` bring them to the device."""
        if not adapter_ids:
            return
        assert self._pool is not None, "a call begins with begin()"
        adapters = [self._pool.get(each) for each in sorted(adapter_ids)]
        if not self._pool.fit(adapters):
            raise CapacityError(
                f"{len(adapters)} adapters on experts, which {self.block} data parallel ranks need at the same time, "
                "do not fit the memory for adapters; allowed: smaller ranks, or an ep_size that divides tp_size"
            )
        if now:
            self._pool.make_resident(adapters, trains=True)

    def _run(self, kind: int, filled: Batches, turns: Sequence[_Turn], give_way: GiveWay | None) -> list[Computed]:
        recompute = None if kind == _FORWARD else [turn.recompute for turn in turns]
        return self._runs.run(filled, recompute, give_way)

    def _keep(self, computed: Sequence[Computed]) -> None:
        for row in (row for each in computed for row in each.gradients):
            self._gradients[row.index] = row.added_to(self._gradients.get(row.index))

    def _filled(self, parts: Sequence[Part], turn: _Turn) -> list[Part]:
        """Return a micro-batch in which all ranks of a block have the same adapters on experts, in the same order."""
        own = {_key(part): part for part in parts}
        filled = [part for part in parts if not _is_on_experts(part)]
        for request in turn.requests:
            filled.append(own[request] if request in own else self._stand_in(request))
        return filled or [one_token()]

    def _stand_in(self, request: _OnExperts) -> Part:
        assert self._pool is not None, "a call begins with begin()"
        return replace(one_token(), index=request.index, adapter=self._pool.get(request.adapter_id))


def _is_on_experts(part: Part) -> bool:
    return part.adapter is not None and part.adapter.whole.has_experts


def _key(part: Part) -> _OnExperts | None:
    if part.adapter is None or not _is_on_experts(part):
        return None
    return _OnExperts(part.adapter.whole.digest, part.index, part.adapter.adapter_id)


def _on_experts(parts: Sequence[Part]) -> tuple[_OnExperts, ...]:
    return tuple(key for part in parts if (key := _key(part)) is not None)


def _places(parts: Sequence[Part], among: Sequence[Part]) -> list[int]:
    """Return the places of the parts' sequences among those of other parts, which contain them."""
    starts, start = {}, 0
    for part in among:
        starts[id(part)] = start
        start += len(part.data)
    return [starts[id(part)] + number for part in parts for number in range(len(part.data))]
