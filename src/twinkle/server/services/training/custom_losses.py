"""Custom losses of tenants: created once in a session, and named by the passes of the session's runs.

A loss is in the database before its client learns its id, and stays there as long as a replay may need it. A run knows
only the losses of its own session, and so never those of another tenant.
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

_KEPT_GRAPHS = 256  # decoded graphs in memory
_KEPT_COSTS = 256  # estimates for one graph

Sizes = tuple[tuple[tuple[int, ...], str], ...]  # the same type as in twinkle.loss.graph.estimate, which imports torch


class CustomLosses:
    """Creates the custom losses of all tenants. ``limit``: the most losses of one tenant."""

    def __init__(self, store: Store, limit: int, threads: FairPool) -> None:
        self._store = store
        self._limit = limit
        self._threads = threads

    async def create(self, session: SessionRecord, number: int, body: bytes) -> str:
        """Create a loss; return its id, which is also the id of its future. An invalid graph fails the future.

        A repeated request gets the same id. InvalidInputError: another request of the session used this number.
        QuotaError: the tenant has too many losses.
        """
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
        """Return the outcome of the request that created a loss; NotFoundError if the tenant has no such request."""
        record = await self._store.custom_losses.get(loss_id)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("request", loss_id)
        if record.error is not None:
            return Outcome.failure(record.error, "user")
        return responses.created_loss(record.loss_id)


class LossGraphs:
    """Looks up the graphs of custom losses. A loss never changes, so the most recently used graphs are cached."""

    def __init__(self, store: Store, threads: FairPool) -> None:
        self._store = store
        self._threads = threads
        self._graphs: OrderedDict[str, LossGraph] = OrderedDict()
        self._costs: dict[str, dict[Sizes, int]] = {}  # for one sequence, by loss id and sizes of its inputs

    async def resolved(self, op: Op, run: RunRecord) -> Op:
        """Return the op with the graph of its custom loss and the loss's work; an op without a custom loss is returned
        unchanged.

        If the run's session has no such loss, or after another UserError, the returned op has the payload ``Refused``.
        """
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
        return replace(op, payload=payload, sent_digest=op.digest)  # the digest was computed before, in a thread

    def _work(self, graph: LossGraph, loss_id: str, asked: TrainPass) -> int:
        """Return an estimate of how many numbers the graph computes for this request. Runs in a thread of the pool.

        The work is 0 if an input is missing: the op will fail.
        """
        from twinkle.loss.graph.estimate import estimated_work  # imports torch, so only when a custom loss is used
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
    """Return why a body is not a valid loss; None if it is valid."""
    try:
        decode_custom_loss(body)
    except UserError as error:
        return str(error)
    return None
