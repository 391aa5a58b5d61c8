"""Losses that tenants make: created once in a session, named by the passes of its models.

A loss is on disk before its future is told, and stays as long as anything of its session can be run again. Another
session's loss, and so another tenant's, is unknown to a model.
"""

import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial

from twinkle.errors import InvalidInputError, NotFoundError, QuotaError, UserError
from twinkle.loss.graph.nodes import LossGraph
from twinkle.server import ids
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import (
    CustomLossRecord,
    Op,
    Outcome,
    Payload,
    Refused,
    RunRecord,
    SessionRecord,
    TrainPass,
    digest,
)
from twinkle.server.wire import responses
from twinkle.server.wire.custom_losses import decode_custom_loss

_KEPT_GRAPHS = 256
_KEPT_COSTS = 256  # of one graph

Sizes = tuple[tuple[tuple[int, ...], str], ...]  # as in twinkle.loss.graph.estimate, which needs torch


class CustomLosses:
    """Those of all tenants; ``limit`` of one."""

    def __init__(self, store: Store, limit: int, threads: FairPool) -> None:
        self._store = store
        self._limit = limit
        self._threads = threads

    async def create(self, session: SessionRecord, number: int, body: bytes) -> str:
        """The id of the loss, which is that of its future as well. What is wrong with the graph is in the future."""
        error = await self._threads.in_thread(session.tenant_id, partial(_mistake, body))
        record = CustomLossRecord(
            loss_id=ids.custom_loss_id(session.session_id, number),
            session_id=session.session_id,
            number=number,
            tenant_id=session.tenant_id,
            digest=digest(body),
            body=body if error is None else b"",
            error=error,
            created_at=time.time(),
        )
        made = await self._store.custom_losses.create(record, self._limit)
        if made is None:
            raise QuotaError("custom losses", self._limit, self._limit, "max_custom_losses_per_tenant")
        if made.digest != record.digest:
            raise InvalidInputError("custom_loss_seq_id", number, "a number not used before in this session")
        return made.loss_id

    async def outcome(self, loss_id: str, tenant_id: str) -> Outcome:
        record = await self._store.custom_losses.get(loss_id)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("request", loss_id)
        if record.error is not None:
            return Outcome.failure(record.error, "user")
        return responses.created_loss(record.loss_id)


class LossGraphs:
    """Finds what the loss of an op stands for; losses never change, so that those in use are kept."""

    def __init__(self, store: Store, threads: FairPool) -> None:
        self._store = store
        self._threads = threads
        self._graphs: OrderedDict[str, LossGraph] = OrderedDict()
        self._costs: dict[str, dict[Sizes, int]] = {}  # of one sequence, by loss and by the sizes of its inputs

    async def resolved(self, op: Op, run: RunRecord) -> Op:
        """The op with the graph of its loss, if it has one of its own; refused where the run's session has no such."""
        if not isinstance(op.payload, TrainPass) or op.payload.custom is None:
            return op
        custom = op.payload.custom
        payload: Payload
        try:
            graph = await self._graph(custom.loss_id, run.session_id)
            weigh = partial(self._work, graph, custom.loss_id, op.payload)
            work = await self._threads.in_thread(run.tenant_id, weigh)
            payload = replace(op.payload, custom=replace(custom, graph=graph, work=work))
        except UserError as error:
            payload = Refused.because(error)
        return replace(op, payload=payload, sent_digest=op.digest)  # which was computed before, in a thread

    def _work(self, graph: LossGraph, loss_id: str, asked: TrainPass) -> int:
        """What the graph computes for this request, in any thread; 0 where its inputs are not there: it will fail."""
        from twinkle.loss.graph.estimate import estimated_work  # torch: not before somebody has a loss of its own
        from twinkle.loss.graph.interpreter import Limits

        assert asked.custom is not None
        sequences = []
        for datum, inputs in zip(asked.data, asked.custom.inputs, strict=True):
            if any(declared.name not in inputs for declared in graph.inputs[1:]):
                return 0
            arrays = [(declared.rank, inputs[declared.name]) for declared in graph.inputs[1:]]
            shapes = [(() if rank == 0 else array.shape, array.dtype.name) for rank, array in arrays]
            sequences.append(((datum.targets.shape, "float32"), *shapes))
        known = self._costs.setdefault(loss_id, {})
        if len(known) > _KEPT_COSTS:
            known.clear()
        return estimated_work(graph, sequences, known, Limits())

    async def _graph(self, loss_id: str, session_id: str) -> LossGraph:
        unknown = UserError(f"loss_id: unknown custom loss {loss_id!r} in the session of this model")
        if not loss_id.startswith(f"{session_id}:"):
            raise unknown
        graph = self._graphs.get(loss_id)
        if graph is None:
            record = await self._store.custom_losses.get(loss_id)
            if record is None or record.session_id != session_id or record.error is not None:
                raise unknown
            graph = await self._threads.in_thread(record.tenant_id, partial(decode_custom_loss, record.body))
        self._graphs[loss_id] = graph
        self._graphs.move_to_end(loss_id)
        if len(self._graphs) > _KEPT_GRAPHS:
            self._costs.pop(self._graphs.popitem(last=False)[0], None)
        return graph


def _mistake(body: bytes) -> str | None:
    """Why a body is no loss; None if it is one."""
    try:
        decode_custom_loss(body)
    except UserError as error:
        return str(error)
    return None
