"""Plans the recovery of an adapter after a restart: the snapshot to start from, and the ops to replay after it.

The bodies of these ops are decoded later, when their turn comes. For an op that was refused before it ran, the journal
has the reason instead of the body, unless the body is small: only the error will ever be needed again, and a
decompressed body may be a thousand times larger than what was sent. The digest of the body stays, to tell a repeated
request from another one with the same number.
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

_REFUSED = b"\x00\x00"  # marks a reason in place of a body; no body of any protocol begins like this
_MOST_CHARACTERS = 4096  # longer reasons are cut
_SMALL = 512  # bytes: the body of a refused op is kept if it is not larger


# --- refused ops in the journal ---------------------------------------------------------------------------------------


def refused_body(message: str) -> bytes:
    """Return the bytes that the journal has in place of the body of a refused op."""
    return _REFUSED + json.dumps({"refused": message[:_MOST_CHARACTERS]}).encode()


def journalled(op: Op, refused: Refused) -> Op:
    """Return a refused op as it is written to the journal: with the reason in place of its body, unless the body is
    small.
    """
    if len(op.body) <= _SMALL:
        return op
    message = refused.message[:_MOST_CHARACTERS]
    return replace(op, payload=replace(refused, message=message), body=refused_body(message), sent_digest=op.digest)


# --- the ops to replay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """An op in the journal that is replayed after a restart. Its body is still on disk.

    Ops that ``RunKind.runs_again`` leaves out, such as those that only wrote files, are not run again; for them
    ``repeated`` is set, when the op is decoded, to the outcome that they had. If that was a success, ``repeated`` has
    no bytes: clients get these from the journal. For an op whose body is damaged, it is the failure that says so.
    """

    record: OpRecord
    repeated: Outcome | None = None

    @property
    def seq(self) -> int:
        return self.record.seq

    @property
    def ended(self) -> bool:
        """Return whether the op had an outcome before the restart."""
        return self.record.outcome is not None

    def without_body(self) -> Op:
        """Return the op with its place and kind, but with a placeholder for its payload."""
        record = self.record
        return Op(record.adapter_id, record.seq, record.kind, Refused("its body was not read"), b"", record.digest)


@dataclass(frozen=True)
class Plan:
    """Where the sequence of an adapter continues. The default is a new adapter.

    ``next_seq`` is the first number after the snapshot; ``failed_seq`` is the number that had spoilt the open window at
    the snapshot, if any. ``replays`` and ``passed`` are the ops to replay and the numbers to skip after the snapshot,
    in order; ``last`` is the highest number that the journal knows.
    """

    next_seq: int = 0
    failed_seq: int | None = None
    has_snapshot: bool = False
    replays: tuple[Replay, ...] = ()
    passed: tuple[Passed, ...] = ()
    last: int = 0


async def plan_recovery(store: Store, files: DataDir, run: RunRecord) -> Plan:
    """Return how far an adapter was, and which ops are to be replayed, without reading their bodies.

    Forward passes that were answered and left no state behind are skipped. So is a number that is missing although a
    higher one has ended: it was given up as missing before the restart. DamagedRecordError: too little is left on disk
    to recover the adapter.
    """
    snapshot = await _usable_snapshot(store, files, run)
    applied, failed_seq = (-1, None) if snapshot is None else (snapshot.seq, snapshot.failed_seq)
    records = await store.ops.since(run.run_id, applied)
    final = await store.ops.final_since(run.run_id, applied)
    ended = max((*(record.seq for record in records if record.outcome is not None), *final[-1:]), default=applied)
    last = max((ended, *(record.seq for record in records[-1:])))
    present = {record.seq for record in records}.union(final)
    missing = [seq for seq in range(applied + 1, ended) if seq not in present]
    if final and not records and not missing:  # only answered forward passes: the snapshot covers them from now on
        await store.snapshots.advance(run.run_id, last, failed_seq)
    passed = sorted([*_ranges(final, given_up=False), *_ranges(missing, given_up=True)], key=lambda each: each.first)
    replays = tuple(map(Replay, records))
    return Plan(applied + 1, failed_seq, snapshot is not None, replays, tuple(passed), max(last, 0))


def _ranges(numbers: Sequence[int], *, given_up: bool) -> Iterable[Passed]:
    """Return sorted numbers as ranges of consecutive numbers."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield Passed(numbers[first], numbers[index - 1], given_up)
            first = index


async def decode(store: Store, run: RunRecord, kind: RunKind, replay: Replay) -> tuple[Op, Replay]:
    """Read an op from the journal, and return it with its replay.

    If the op had ended and does not run again, ``repeated`` of the replay is set, and the body is read only where the
    run kind needs it.
    """
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
    if record.ending is None and record.kind is OpKind.OPTIM_STEP:  # an earlier version always dropped the gradient
        return replace(outcome, ending=Ending.DROPPED)
    return outcome


def _decoded(run: RunRecord, kind: RunKind, record: OpRecord, body: bytes) -> Op:
    try:
        if not body.startswith(_REFUSED):
            return replace(kind.read_op(run, record, body), seq=record.seq, sent_digest=record.digest)
        message = json.loads(body.removeprefix(_REFUSED))["refused"]
    except UserError as error:  # an earlier version of the server accepted it
        message = str(error)
    return Op(run.run_id, record.seq, record.kind, Refused(message), body, record.digest)


# --- where to start: at the snapshot, or at the creation of the adapter -----------------------------------------------


async def _usable_snapshot(store: Store, files: DataDir, run: RunRecord) -> SnapshotRecord | None:
    """Return the snapshot to start from; None: replay the whole journal, from the creation of the adapter on.

    The checksums of a snapshot are normally checked when the adapter is loaded. They are checked here only for a young
    adapter, whose journal still reaches back to its creation and could replace a damaged snapshot. DamagedRecordError:
    there is neither a good snapshot nor such a journal.
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
        await store.damage.record(damage)
        # Delete the snapshot's record: while it covers the ops, maintenance would delete their bodies as unneeded.
        await store.snapshots.delete(run.run_id)
        return None
    return snapshot


async def _check_journal(store: Store, run: RunRecord, snapshot: CheckpointError) -> None:
    """Raise DamagedRecordError if the journal does not reach back to the adapter's creation.

    The rows of ops stay longer than their bodies, which are deleted with their segment file when snapshots cover them.
    """
    creation = await store.ops.get(run.run_id, 0)
    try:
        if creation is not None:
            await store.ops.body(creation)
            return
    except JournalError:
        pass  # the body was deleted, which is normal: the snapshot covered it
    raise DamagedRecordError("its snapshot on the server's disk is damaged") from snapshot
