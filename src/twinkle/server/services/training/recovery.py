"""What a restart finds of an adapter: a snapshot to begin at, and the ops behind it, decoded when their turn comes.

Ops that were refused before they ran have the reason in the journal, in the place of what was sent. A body of which
only the error will ever be repeated may be a thousand times larger than what came over the wire. Its digest stays,
which tells the same request from another one under its number.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from twinkle.errors import CheckpointError, UserError
from twinkle.server.scheduling.sequence import Passed
from twinkle.server.services.training.run_kind import RunKind
from twinkle.server.state.errors import Damage, DamagedRecordError, JournalError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.state.store import Store
from twinkle.server.types import Ending, Op, OpKind, OpRecord, Outcome, Refused, RunRecord, SnapshotRecord

logger = logging.getLogger(__name__)

_REFUSED = b"\x00\x00"  # no body of any protocol begins like this
_MOST_CHARACTERS = 4096  # of a reason
_SMALL = 512  # bytes: a shorter body is kept as it is


# --- refused ops in the journal ---------------------------------------------------------------------------------------


def refused_body(message: str) -> bytes:
    """Return the body in the journal of an op that was refused."""
    return _REFUSED + json.dumps({"refused": message[:_MOST_CHARACTERS]}).encode()


def journalled(op: Op, refused: Refused) -> Op:
    """Return a refused op as it goes to the journal: without its body, unless that is small."""
    if len(op.body) <= _SMALL:
        return op
    message = refused.message[:_MOST_CHARACTERS]
    return replace(op, payload=replace(refused, message=message), body=refused_body(message), sent_digest=op.digest)


# --- what is to run again ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """An op of the journal that has its turn again after a restart. Its body is still on disk.

    ``repeated`` is set once the op is decoded, if it is not run: what it ended with before. Of an outcome that was no
    failure only the fact counts then; its bytes stay in the journal, where clients get them.
    """

    record: OpRecord
    repeated: Outcome | None = None

    @property
    def seq(self) -> int:
        return self.record.seq

    @property
    def ended(self) -> bool:
        """Whether it had an outcome before the restart."""
        return self.record.outcome is not None

    def without_body(self) -> Op:
        """The op for whoever needs to know no more than its place and kind."""
        record = self.record
        return Op(record.adapter_id, record.seq, record.kind, Refused("its body was not read"), b"", record.digest)


@dataclass(frozen=True)
class Plan:
    """From where an adapter goes on: as a new one, or from what a restart found.

    ``replays`` and ``passed`` are the numbers behind its snapshot, in order; ``last`` is the highest that is known.
    """

    next_seq: int = 0
    failed_seq: int | None = None
    has_snapshot: bool = False
    replays: tuple[Replay, ...] = ()
    passed: tuple[Passed, ...] = ()
    last: int = 0


async def plan_recovery(store: Store, files: DataDir, run: RunRecord) -> Plan:
    """Find out where an adapter stood, and which numbers are to run again, without reading their bodies.

    Forward passes that were answered are passed over. So is a number that is missing below one that has ended: it was
    given up as missing. DamagedRecordError: too little is left to bring the adapter back.
    """
    snapshot = await _usable_snapshot(store, files, run)
    applied, failed_seq = (-1, None) if snapshot is None else (snapshot.seq, snapshot.failed_seq)
    records = await store.ops.since(run.run_id, applied)
    final = await store.ops.final_since(run.run_id, applied)
    ended = max((*(record.seq for record in records if record.outcome is not None), *final[-1:]), default=applied)
    last = max((ended, *(record.seq for record in records[-1:])))
    present = {record.seq for record in records}.union(final)
    missing = [seq for seq in range(applied + 1, ended) if seq not in present]
    if final and not records and not missing:  # nothing but answered passes
        await store.snapshots.advance(run.run_id, last, failed_seq)
    passed = sorted([*_ranges(final, given_up=False), *_ranges(missing, given_up=True)], key=lambda each: each.first)
    replays = tuple(map(Replay, records))
    return Plan(applied + 1, failed_seq, snapshot is not None, replays, tuple(passed), max(last, 0))


def _ranges(numbers: Sequence[int], *, given_up: bool) -> Iterable[Passed]:
    """Neighbours become one."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield Passed(numbers[first], numbers[index - 1], given_up)
            first = index


async def decode(store: Store, run: RunRecord, kind: RunKind, replay: Replay) -> tuple[Op, Replay]:
    """Read an op from the journal. If it had ended and does not run again, note what it ended with."""
    record = replay.record
    if replay.ended:
        outcome = await _outcome(store, record)
        if not kind.runs_again(record.kind, outcome):
            replay = replace(replay, repeated=outcome)
            if kind.kind_tells_steps:
                return replay.without_body(), replay
    body = await store.ops.body(record)
    return await asyncio.to_thread(_decoded, run, kind, record, body), replay


async def _outcome(store: Store, record: OpRecord) -> Outcome:
    assert record.encoding is not None, "it has ended"
    if not record.failed:
        return Outcome(record.encoding, b"")
    outcome = await store.ops.outcome(record.adapter_id, record.seq)
    assert outcome is not None, "it has ended"
    if record.ending is None and record.kind is OpKind.OPTIM_STEP:  # by a version that dropped it in any case
        return replace(outcome, ending=Ending.DROPPED)
    return outcome


def _decoded(run: RunRecord, kind: RunKind, record: OpRecord, body: bytes) -> Op:
    try:
        if not body.startswith(_REFUSED):
            return replace(kind.read_op(run, record, body), sent_digest=record.digest)
        message = json.loads(body.removeprefix(_REFUSED))["refused"]
    except UserError as error:  # it was accepted by an older version of this server
        message = str(error)
    return Op(run.run_id, record.seq, record.kind, Refused(message), body, record.digest)


# --- from where: from its snapshot, or from its creation on -----------------------------------------------------------


async def _usable_snapshot(store: Store, files: DataDir, run: RunRecord) -> SnapshotRecord | None:
    """Return the snapshot to begin at; None: the journal has everything since the adapter was created.

    A snapshot is read, and so checked, when its adapter is first used. It is checked here only where the journal could
    take its place: of a young adapter. DamagedRecordError: there is neither.
    """
    snapshot = await store.snapshots.get(run.run_id)
    numbers = [times.seq for times in await store.ops.times(run.run_id)]
    is_from_creation_on = bool(numbers) and numbers[0] == 0
    if snapshot is None:
        if not is_from_creation_on:
            raise DamagedRecordError("neither a snapshot nor the beginning of its journal is left on the server's disk")
        return None
    covered = [number for number in numbers if number <= snapshot.seq]
    if not is_from_creation_on or covered != list(range(snapshot.seq + 1)):
        return snapshot
    try:
        await asyncio.to_thread(check_files, files.root / snapshot.directory)
    except CheckpointError as error:
        await _check_journal(store, run, error)
        what = f"its snapshot is damaged ({error}); it is brought back from its journal, from its creation on"
        logger.error("damaged: run %s (tenant %s): %s", run.run_id, run.tenant_id, what)
        damage = Damage(f"snapshot of {run.run_id}", f"model {run.run_id}: {what}", time.time(), run.tenant_id)
        await store.damage.note(damage)
        # As long as its record covers them, the bodies of its ops would be taken for needless and deleted.
        await store.snapshots.delete(run.run_id)
        return None
    return snapshot


async def _check_journal(store: Store, run: RunRecord, snapshot: CheckpointError) -> None:
    """Raise DamagedRecordError if the journal does not reach back to the adapter's creation.

    Rows of ops outlive their bodies, which go with the oldest segment files once a snapshot covers them.
    """
    creation = await store.ops.get(run.run_id, 0)
    try:
        if creation is not None:
            await store.ops.body(creation)
            return
    except JournalError:
        pass  # it is gone, which is no damage: the snapshot was to be enough
    raise DamagedRecordError("its snapshot on the server's disk is damaged") from snapshot
