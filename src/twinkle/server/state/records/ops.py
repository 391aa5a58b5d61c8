"""Ops: accepted requests about runs, and their outcomes. Rows are in the database, bodies and outcomes in two journals.

There are two journals because bodies can be deleted as soon as a snapshot covers them, while outcomes stay for a while
after clients have fetched them. Samples are not stored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, case, delete, exists, func, or_, select, update

from twinkle.server.state.database.database import Cursor, Database, Row
from twinkle.server.state.database.journal import Journal, JournalWriters
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import OPS, RUNS, SNAPSHOTS
from twinkle.server.state.errors import Refusal
from twinkle.server.state.records.area import Area, in_read, in_write
from twinkle.server.state.records.runs import insert_run
from twinkle.server.types import Op, OpKind, OpRecord, Outcome, RunRecord

_PRUNE_BATCH = 1000  # rows deleted in one transaction

_OP = RecordMapper(OpRecord, OPS)
_AT = and_(OPS.c.adapter_id == bindparam("adapter"), OPS.c.seq == bindparam("number"))

# Recovery replays an op if its run is live and no snapshot covers the op.
_COVERED = exists().where(SNAPSHOTS.c.adapter_id == OPS.c.adapter_id, SNAPSHOTS.c.seq >= OPS.c.seq)
_LIVE = exists().where(RUNS.c.run_id == OPS.c.adapter_id, RUNS.c.state == "live")
_REPLAYED = and_(_LIVE, ~_COVERED)
# A forward pass of Tinker's protocol leaves nothing behind, so it is not replayed once its outcome is on record. Only
# its row stays until a snapshot covers it, so that recovery does not take its sequence number for a missing one. Native
# forward passes, whose run ids have no colon, are replayed: losses and metrics are computed from their results.
_FINAL = and_(
    OPS.c.kind == OpKind.FORWARD.value, OPS.c.outcome_segment.is_not(None), OPS.c.adapter_id.like("%:train:%")
)
_NEEDED = and_(_REPLAYED, ~_FINAL)
# An op whose outcome no client will ask for any more: it was delivered or finished long ago. An op of a run that is not
# live may never get an outcome; then the time since its acceptance counts.
_SETTLED = or_(
    OPS.c.delivered_at < bindparam("delivered_before"),
    OPS.c.finished_at < bindparam("finished_before"),
    and_(OPS.c.finished_at.is_(None), ~_LIVE, OPS.c.accepted_at < bindparam("finished_before")),
)

_AFTER = and_(OPS.c.adapter_id == bindparam("adapter"), OPS.c.seq > bindparam("number"))
_SINCE = select(OPS).where(_AFTER, ~_FINAL).order_by(OPS.c.seq)
_FINAL_SINCE = select(OPS.c.seq).where(_AFTER, _FINAL).order_by(OPS.c.seq)
_TIMES = (
    select(OPS.c.seq, OPS.c.kind, OPS.c.accepted_at, OPS.c.finished_at, OPS.c.failed)
    .where(OPS.c.adapter_id == bindparam("adapter"))
    .order_by(OPS.c.seq)
)
_OF_OUTCOME = "outcome_segment", "outcome_offset", "outcome_length", "encoding", "failed", "ending", "finished_at"
_FINISH = update(OPS).where(_AT, OPS.c.finished_at.is_(None)).values({name: bindparam(name) for name in _OF_OUTCOME})
_DELIVERED = update(OPS).where(_AT, OPS.c.delivered_at.is_(None)).values(delivered_at=bindparam("now"))
_FINISHED_NOW = update(OPS).where(OPS.c.finished_at.is_not(None)).values(finished_at=bindparam("now"))
_DELIVERED_NOW = update(OPS).where(OPS.c.delivered_at.is_not(None)).values(delivered_at=bindparam("now"))
_PRUNABLE = select(OPS.c.adapter_id, OPS.c.seq).where(~_REPLAYED, _SETTLED)
_PRUNE = delete(OPS).where(_AT, ~_REPLAYED, _SETTLED)
# The parts of the journal that must be retained, also in a backup: segments with needed bodies, segments with outcomes,
# and the ops whose bodies are needed.
BODIES_NEEDED = select(OPS.c.body_segment.label("segment")).where(_NEEDED).distinct()
OUTCOMES_NEEDED = select(OPS.c.outcome_segment.label("segment")).where(OPS.c.outcome_segment.is_not(None)).distinct()
OPS_WITH_BODIES = select(OPS.c.adapter_id, OPS.c.seq).where(_NEEDED)
_OWNERS = RUNS.alias("owners")
_BYTES_BY_TENANT = (
    select(
        _OWNERS.c.tenant_id,
        func.sum(case((_NEEDED, OPS.c.body_length), else_=0) + func.coalesce(OPS.c.outcome_length, 0)).label("size"),
    )
    .select_from(OPS.join(_OWNERS, _OWNERS.c.run_id == OPS.c.adapter_id))
    .group_by(_OWNERS.c.tenant_id)
)


@dataclass(frozen=True)
class AcceptedOp:
    """The op on record. If not ``created``, it was on record before: compare its digest with that of the request."""

    record: OpRecord
    created: bool


@dataclass(frozen=True)
class AcceptedRun:
    """The run on record, and as ``record`` the op that creates its adapter; None if that op was pruned already.

    ``created``: both were stored just now; otherwise the run was on record before.
    """

    run: RunRecord
    record: OpRecord | None
    created: bool


@dataclass(frozen=True)
class Pruned:
    """What pruning deleted: rows, segment files of bodies and of outcomes, and the total size of these files."""

    rows: int
    body_segments: int
    outcome_segments: int
    freed_bytes: int = 0


@dataclass(frozen=True)
class OpTimes:
    """When an op was accepted and when it ended; ``finished_at`` is None until then."""

    seq: int
    kind: OpKind
    accepted_at: float
    finished_at: float | None
    failed: bool


_OP_TIMES = RecordMapper(OpTimes, OPS)


class Ops(Area):
    """The ops of all adapters. ``writers``: the processes that share the journals; None: this process is alone."""

    def __init__(
        self, database: Database, bodies: Journal, outcomes: Journal, writers: JournalWriters | None = None
    ) -> None:
        super().__init__(database)
        self._bodies = bodies
        self._outcomes = outcomes
        self._writers = writers

    async def accept(self, op: Op, digest: bytes, now: float) -> AcceptedOp:
        """Store an op. When this returns, the op survives the death of the process.

        An op of this adapter with this sequence number that is on record already stays unchanged, and is returned.
        """
        return await self._database.write(lambda cursor: self._accept(cursor, op, digest, now))

    @in_write
    def accept_run(
        self,
        cursor: Cursor,
        run: RunRecord,
        op: Op,
        digest: bytes,
        now: float,
        most: int | None = None,
        most_rows: int | None = None,
    ) -> AcceptedRun | Refusal:
        """Store a run and the op that creates its adapter, both or neither, or return those that are on record.

        Raises QuotaError for a new run if the tenant has ``most`` live runs in active sessions, or ``most_rows`` runs
        on record; ReplicaHeldError if it is to train all parameters of a replica that another run holds. Both are
        checked inside the transaction, because several requests, and processes of a server, may add runs at once.
        """
        assert op.adapter_id == run.run_id
        recorded = insert_run(cursor, run, most, most_rows)
        if isinstance(recorded, Refusal):
            return recorded
        if recorded is run:
            return AcceptedRun(run, self._accept(cursor, op, digest, now).record, created=True)
        return AcceptedRun(recorded, _OP.find(cursor, adapter_id=recorded.run_id, seq=op.seq), created=False)

    @in_write
    def record_outcomes(self, cursor: Cursor, outcomes: Sequence[tuple[str, int, Outcome]], now: float) -> None:
        """Store the outcomes of ops, given as (adapter id, seq, outcome).

        The first outcome of an op is final, and a later one is ignored: after a replay, a client may have seen the
        first one already. Ops that are not on record are ignored too.
        """
        refs = self._outcomes.append([outcome.body for _, _, outcome in outcomes])
        cursor.execute_many(
            _FINISH,
            [
                {
                    **_at(adapter_id, seq),
                    "outcome_segment": ref.segment,
                    "outcome_offset": ref.offset,
                    "outcome_length": ref.length,
                    "encoding": outcome.encoding.value,
                    "failed": int(outcome.failed),
                    "ending": outcome.ending.value,
                    "finished_at": now,
                }
                for (adapter_id, seq, outcome), ref in zip(outcomes, refs, strict=True)
            ],
        )

    async def get(self, adapter_id: str, seq: int) -> OpRecord | None:
        return await self._find(_OP, adapter_id=adapter_id, seq=seq)

    async def since(self, adapter_id: str, seq: int) -> tuple[OpRecord, ...]:
        """Return the adapter's ops after ``seq`` that recovery replays, in sequence order; there may be gaps."""
        return await self._all(_OP, _SINCE, **_at(adapter_id, seq))

    async def final_since(self, adapter_id: str, seq: int) -> list[int]:
        """Return the numbers of the ops after ``seq`` that recovery does not replay, although no snapshot covers them.

        These are forward passes of Tinker's protocol that have an outcome.
        """
        return [row["seq"] for row in await self._rows(_FINAL_SINCE, **_at(adapter_id, seq))]

    async def bytes_by_tenant(self) -> dict[str, int]:
        """Return by tenant the bytes of bodies that recovery needs and of outcomes that are on record."""
        return {row["tenant_id"]: int(row["size"]) for row in await self._rows(_BYTES_BY_TENANT)}

    async def bytes_on_disk(self) -> int:
        """Return the total size of all segment files, of bodies and of outcomes."""
        return await self._database.read(lambda _: self._bodies.size() + self._outcomes.size())

    async def times(self, adapter_id: str) -> tuple[OpTimes, ...]:
        """Return the times of the adapter's ops that are still on record, in sequence order."""
        return await self._all(_OP_TIMES, _TIMES, adapter=adapter_id)

    @in_read
    def outcome(self, cursor: Cursor, adapter_id: str, seq: int) -> Outcome | None:
        """Return an op's outcome; None if the op has not finished or is not on record; JournalError if damaged."""
        record = _OP.find(cursor, adapter_id=adapter_id, seq=seq)
        if record is None or record.outcome is None or record.encoding is None:
            return None
        body = self._outcomes.read(record.outcome)
        return Outcome.from_record(record.encoding, body, record.failed, record.ending)

    async def body(self, record: OpRecord) -> bytes:
        """Return the body that the client sent; JournalError if it is damaged or was deleted.

        Bodies of ops that recovery does not replay may be deleted.
        """
        return await self._database.read(lambda _: self._bodies.read(record.body))

    async def mark_delivered(self, ops: Iterable[tuple[str, int]], now: float) -> None:
        """Record that clients fetched the outcomes of these (adapter id, seq). The first delivery of an op counts."""
        await self._execute_many(_DELIVERED, [_at(adapter_id, seq) | {"now": now} for adapter_id, seq in ops])

    @in_write
    def extend_deadlines_after_downtime(self, cursor: Cursor, now: float) -> None:
        """Restart the retention time of every outcome: no client could fetch one while the server was down.

        This includes delivered outcomes, because the response to a client may have been cut off by the shutdown.
        """
        cursor.execute(_FINISHED_NOW, {"now": now})
        cursor.execute(_DELIVERED_NOW, {"now": now})

    async def prune(self, now: float, delivered_seconds: float, finished_seconds: float) -> Pruned:
        """Delete ops that neither recovery nor a client needs any more; then delete segment files without needed data.

        Recovery does not need ops that the adapter's snapshot covers, or ops of a run that is not live. Clients do not
        need an outcome that was delivered ``delivered_seconds`` ago or finished ``finished_seconds`` ago, or an op
        without an outcome that was accepted ``finished_seconds`` ago and whose run is not live.
        """
        parameters = {"delivered_before": now - delivered_seconds, "finished_before": now - finished_seconds}
        # The search runs in a reader thread, and the writer deletes in small transactions: accepting ops continues.
        prunable = await self._rows(_PRUNABLE, **parameters)
        keys = [_at(row["adapter_id"], row["seq"]) | parameters for row in prunable]
        rows = 0
        for start in range(0, len(keys), _PRUNE_BATCH):
            rows += await self._execute_many(_PRUNE, keys[start : start + _PRUNE_BATCH])
        return await self.delete_segments(rows)

    async def delete_segments(self, rows: int = 0) -> Pruned:
        """Delete the segment files that hold nothing needed. ``rows``: deleted rows, for the returned summary."""
        # The list of closed segments is made in the writer's thread, inside a transaction. All blobs of these segments
        # were appended in this transaction or an earlier one. So once it is committed, a blob has its row or never
        # will, and segments without a row that needs them can be deleted.
        bodies, outcomes = await self._database.write(
            lambda _: (set(self._bodies.closed_segments()), set(self._outcomes.closed_segments()))
        )
        return await self._delete_unneeded(bodies, outcomes, rows)

    @in_read
    def _delete_unneeded(self, cursor: Cursor, bodies: set[int], outcomes: set[int], rows: int) -> Pruned:
        """Delete the closed segments ``bodies`` and ``outcomes``, except those that a row on record needs."""
        bodies = bodies.difference(row["segment"] for row in cursor.rows(BODIES_NEEDED, {}))
        outcomes = outcomes.difference(row["segment"] for row in cursor.rows(OUTCOMES_NEEDED, {}))
        freed = self._bodies.size(bodies) + self._outcomes.size(outcomes)
        self._bodies.delete_segments(bodies)
        self._outcomes.delete_segments(outcomes)
        if self._writers is not None:
            self._writers.forget_dead(self._bodies.writers_left() | self._outcomes.writers_left())
        return Pruned(rows, len(bodies), len(outcomes), freed)

    def _accept(self, cursor: Cursor, op: Op, digest: bytes, now: float) -> AcceptedOp:
        """Append an op's body to the journal and insert its row, unless it is on record. In the writer's thread."""
        known = _OP.find(cursor, adapter_id=op.adapter_id, seq=op.seq)
        if known is not None:
            return AcceptedOp(known, created=False)
        (body,) = self._bodies.append([op.body])
        record = OpRecord(op.adapter_id, op.seq, op.kind, digest, body, accepted_at=now)
        _OP.insert(cursor, record)
        return AcceptedOp(record, created=True)


def _at(adapter_id: str, seq: int) -> Row:
    return {"adapter": adapter_id, "number": seq}
