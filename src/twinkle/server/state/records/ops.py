"""Ops: every accepted request and its outcome. Rows are in the database, bodies and outcomes in two journals.

Two journals, because bodies go as soon as snapshots cover them, and outcomes stay until they were fetched.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, case, delete, exists, func, or_, select, update

from twinkle.errors import QuotaError
from twinkle.server.state.database.database import Cursor, Database, Row
from twinkle.server.state.database.journal import Journal, JournalWriters
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import OPS, RUNS, SNAPSHOTS
from twinkle.server.state.records.area import Area, in_read, in_write
from twinkle.server.state.records.runs import insert_run
from twinkle.server.types import Op, OpKind, OpRecord, Outcome, RunRecord

_PRUNE_BATCH = 1000  # rows deleted in one transaction

_OP = RecordMapper(OpRecord, OPS)
_AT = and_(OPS.c.adapter_id == bindparam("adapter"), OPS.c.seq == bindparam("number"))

# An op that no recovery will replay: its effect is in a snapshot, or its adapter will not be brought back.
_COVERED = exists().where(SNAPSHOTS.c.adapter_id == OPS.c.adapter_id, SNAPSHOTS.c.seq >= OPS.c.seq)
_LIVE = exists().where(RUNS.c.run_id == OPS.c.adapter_id, RUNS.c.state == "live")
_REPLAYED = and_(_LIVE, ~_COVERED)
# A forward pass of Tinker's protocol leaves nothing behind: with its outcome on record nobody runs it again, and only
# its row is kept until a snapshot covers it, to tell its number from one that never arrived. Native forward passes,
# whose run ids have no colon, leave behind what a loss and metrics are computed from.
_FINAL = and_(
    OPS.c.kind == OpKind.FORWARD.value, OPS.c.outcome_segment.is_not(None), OPS.c.adapter_id.like("%:train:%")
)
_NEEDED = and_(_REPLAYED, ~_FINAL)
# An op whose outcome nobody will ask for any more. Without one, which only an adapter that is not live can be left
# with, it counts from its acceptance.
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
# What of the journal is kept, also in a backup: segments of bodies and outcomes, and the ops that have such bodies.
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
class Accepted:
    """The op on record. Unless ``created``, it was there before: compare its digest."""

    record: OpRecord
    created: bool


@dataclass(frozen=True)
class AcceptedRun:
    """The run on record and the op that creates it, which is None once it was pruned."""

    run: RunRecord
    record: OpRecord | None
    created: bool


@dataclass(frozen=True)
class Pruned:
    """What pruning removed: rows, segment files of bodies and outcomes, and the bytes of these files."""

    rows: int
    body_segments: int
    outcome_segments: int
    freed_bytes: int = 0


@dataclass(frozen=True)
class OpTimes:
    """When an op was accepted and when it ended, which is None as long as it has not."""

    seq: int
    kind: OpKind
    accepted_at: float
    finished_at: float | None
    failed: bool


_OP_TIMES = RecordMapper(OpTimes, OPS)


class Ops(Area):
    """The ops of all adapters. ``writers``: the processes that share the journals; None: this one has them alone."""

    def __init__(
        self, database: Database, bodies: Journal, outcomes: Journal, writers: JournalWriters | None = None
    ) -> None:
        super().__init__(database)
        self._bodies = bodies
        self._outcomes = outcomes
        self._writers = writers

    async def accept(self, op: Op, digest: bytes, now: float) -> Accepted:
        """Record an op, which survives our death once this returns. One with this number on record stays as it is."""
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
    ) -> AcceptedRun | QuotaError:
        """Record a run and the op that creates its adapter, both or neither. Those that are there already are returned.

        ``most``: live runs of a tenant, counted here, where all processes of a server meet; ``most_rows``: of all that
        are on record. Where there are as many, QuotaError.
        """
        assert op.adapter_id == run.run_id
        recorded = insert_run(cursor, run, most, most_rows)
        if isinstance(recorded, QuotaError):
            return recorded
        if recorded is run:
            return AcceptedRun(run, self._accept(cursor, op, digest, now).record, created=True)
        return AcceptedRun(recorded, _OP.find(cursor, adapter_id=recorded.run_id, seq=op.seq), created=False)

    @in_write
    def record_outcomes(self, cursor: Cursor, outcomes: Sequence[tuple[str, int, Outcome]], now: float) -> None:
        """Record outcomes by (adapter id, seq). The first one stands: a client may have seen it before a replay.

        Ops that are not on record are passed over.
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
        """Return the adapter's ops after ``seq`` that a recovery runs again, in sequence order; there may be gaps."""
        return await self._all(_OP, _SINCE, **_at(adapter_id, seq))

    async def final_since(self, adapter_id: str, seq: int) -> list[int]:
        """Return the numbers of the other ops after ``seq``, in order: forward passes that are answered."""
        return [row["seq"] for row in await self._rows(_FINAL_SINCE, **_at(adapter_id, seq))]

    async def bytes_by_tenant(self) -> dict[str, int]:
        """Return the bytes of bodies that a recovery needs and of outcomes that are kept, by tenant."""
        return {row["tenant_id"]: int(row["size"]) for row in await self._rows(_BYTES_BY_TENANT)}

    async def bytes_on_disk(self) -> int:
        """Return the size of all segment files, of bodies and of outcomes."""
        return await self._database.read(lambda _: self._bodies.size() + self._outcomes.size())

    async def times(self, adapter_id: str) -> tuple[OpTimes, ...]:
        """Return the times of the adapter's ops that are still on record, in sequence order."""
        return await self._all(_OP_TIMES, _TIMES, adapter=adapter_id)

    @in_read
    def outcome(self, cursor: Cursor, adapter_id: str, seq: int) -> Outcome | None:
        """Return an op's outcome; None while the op is not done, or not on record."""
        record = _OP.find(cursor, adapter_id=adapter_id, seq=seq)
        if record is None or record.outcome is None or record.encoding is None:
            return None
        body = self._outcomes.read(record.outcome)
        return Outcome.from_record(record.encoding, body, record.failed, record.ending)

    async def body(self, record: OpRecord) -> bytes:
        """Return what the client sent: there for every op that recovery may replay, perhaps gone for others."""
        return await self._database.read(lambda _: self._bodies.read(record.body))

    async def mark_delivered(self, ops: Iterable[tuple[str, int]], now: float) -> None:
        """Note that clients fetched the outcomes of these (adapter id, seq); the first time counts."""
        await self._execute_many(_DELIVERED, [_at(adapter_id, seq) | {"now": now} for adapter_id, seq in ops])

    @in_write
    def extend_deadlines_after_downtime(self, cursor: Cursor, now: float) -> None:
        """Keep every outcome for its whole time again: nobody could fetch one, or fetch again one whose answer was cut
        off, from a server that was down."""
        cursor.execute(_FINISHED_NOW, {"now": now})
        cursor.execute(_DELIVERED_NOW, {"now": now})

    async def prune(self, now: float, delivered_seconds: float, finished_seconds: float) -> Pruned:
        """Forget ops that no recovery needs and that no client will ask for; then delete files that nobody needs.

        No recovery needs what the adapter's snapshot covers, or what belongs to an adapter that is not live. No client
        asks for an outcome that was delivered ``delivered_seconds`` ago or finished ``finished_seconds`` ago.
        """
        parameters = {"delivered_before": now - delivered_seconds, "finished_before": now - finished_seconds}
        # The search runs beside the writer, which then deletes in small transactions: accepting goes on meanwhile.
        prunable = await self._rows(_PRUNABLE, **parameters)
        keys = [_at(row["adapter_id"], row["seq"]) | parameters for row in prunable]
        rows = 0
        for start in range(0, len(keys), _PRUNE_BATCH):
            rows += await self._execute_many(_PRUNE, keys[start : start + _PRUNE_BATCH])
        return await self.delete_segments(rows)

    async def delete_segments(self, rows: int = 0) -> Pruned:
        """Delete the segment files of which nothing is needed. ``rows``: how many were deleted before."""
        # What is in a segment that the writer's thread finds closed was written with or before the transaction it is
        # in: once that is committed, a blob there has its row, or never will.
        bodies, outcomes = await self._database.write(
            lambda _: (set(self._bodies.closed_segments()), set(self._outcomes.closed_segments()))
        )
        return await self._delete_unneeded(bodies, outcomes, rows)

    @in_read
    def _delete_unneeded(self, cursor: Cursor, bodies: set[int], outcomes: set[int], rows: int) -> Pruned:
        """Delete those of the closed segments that nothing needs."""
        bodies = bodies.difference(row["segment"] for row in cursor.rows(BODIES_NEEDED, {}))
        outcomes = outcomes.difference(row["segment"] for row in cursor.rows(OUTCOMES_NEEDED, {}))
        freed = self._bodies.size(bodies) + self._outcomes.size(outcomes)
        self._bodies.delete_segments(bodies)
        self._outcomes.delete_segments(outcomes)
        if self._writers is not None:
            self._writers.forget_dead(self._bodies.writers_left() | self._outcomes.writers_left())
        return Pruned(rows, len(bodies), len(outcomes), freed)

    def _accept(self, cursor: Cursor, op: Op, digest: bytes, now: float) -> Accepted:
        known = _OP.find(cursor, adapter_id=op.adapter_id, seq=op.seq)
        if known is not None:
            return Accepted(known, created=False)
        (body,) = self._bodies.append([op.body])
        record = OpRecord(op.adapter_id, op.seq, op.kind, digest, body, accepted_at=now)
        _OP.insert(cursor, record)
        return Accepted(record, created=True)


def _at(adapter_id: str, seq: int) -> Row:
    return {"adapter": adapter_id, "number": seq}
