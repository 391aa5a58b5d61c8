"""What to run again after a restart: the ops behind an adapter's last snapshot, each decoded when its turn comes."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from twinkle.errors import UserError
from twinkle.server.scheduling.sequence import Passed
from twinkle.server.services.training.refused_ops import is_refused, read_refused
from twinkle.server.services.training.run_kind import RunKind
from twinkle.server.state.store import Store
from twinkle.server.types import Ending, Op, OpKind, OpRecord, Outcome, Refused, RunRecord


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
    """What the journal holds behind an adapter's snapshot. ``last``: the highest number that is known."""

    replays: tuple[Replay, ...]
    passed: tuple[Passed, ...]
    last: int


async def plan_replay(store: Store, run: RunRecord, applied: int) -> Plan:
    """Read which numbers after ``applied`` are to run again, without their bodies.

    Forward passes that were answered are passed over. So is a number that is missing below one that has ended: it was
    given up as missing.
    """
    records = await store.ops.since(run.run_id, applied)
    final = await store.ops.final_since(run.run_id, applied)
    ended = max((*(record.seq for record in records if record.outcome is not None), *final[-1:]), default=applied)
    last = max((ended, *(record.seq for record in records[-1:])))
    present = {record.seq for record in records}.union(final)
    missing = [seq for seq in range(applied + 1, ended) if seq not in present]
    passed = [*_ranges(final, given_up=False), *_ranges(missing, given_up=True)]
    return Plan(tuple(map(Replay, records)), tuple(sorted(passed, key=lambda each: each.first)), last)


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
        refused = is_refused(body)
        op = read_refused(run.run_id, record.seq, record.kind, body) if refused else kind.read_op(run, record, body)
    except UserError as error:  # it was accepted by an older version of this server
        op = Op(run.run_id, record.seq, record.kind, Refused(str(error)), body)
    return replace(op, sent_digest=record.digest)
