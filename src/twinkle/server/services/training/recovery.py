"""What to run again after a restart: the ops behind an adapter's last snapshot, each decoded when its turn comes."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from twinkle.errors import UserError
from twinkle.server.ids import is_native_run
from twinkle.server.scheduling.sequence import Passed
from twinkle.server.services.training.refused_ops import is_refused, read_refused
from twinkle.server.state import Store
from twinkle.server.types import (
    CreateAdapter,
    CreateFromCheckpoint,
    Ending,
    NativePass,
    NativeVerb,
    Op,
    OpKind,
    OpRecord,
    Outcome,
    Payload,
    Refused,
    RunRecord,
)
from twinkle.server.verbs import codec
from twinkle.server.wire.checkpoint_requests import CreateFromRequest, SaveWeightsExternalRequest
from twinkle.server.wire.fields import parse
from twinkle.server.wire.requests import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SequencedRequest,
    to_op,
)
from twinkle.server.wire.training import decode_forward_backward
from twinkle.server.wire.training_json import decode_json_pass, is_json

_REQUESTS: dict[OpKind, type[SequencedRequest]] = {
    request.kind: request
    for request in (
        OptimStepRequest,
        SaveWeightsRequest,
        SaveWeightsForSamplerRequest,
        SaveWeightsExternalRequest,
        LoadWeightsRequest,
    )
}

_UNLIMITED = 2**62  # what was accepted under an earlier limit is not refused now

# Ops that change the adapter; the others only read it, and their files are there already.
_CHANGES = (
    OpKind.CREATE,
    OpKind.CREATE_FROM,
    OpKind.FORWARD_BACKWARD,
    OpKind.OPTIM_STEP,
    OpKind.LOAD,
    OpKind.VERB,
)


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
        op = Op(record.adapter_id, record.seq, record.kind, Refused("its body was not read"), b"")
        vars(op)["digest"] = record.digest  # a cached property: the body is on disk
        return op


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


async def decode(store: Store, run: RunRecord, replay: Replay) -> tuple[Op, Replay]:
    """Read an op from the journal, if it may have to run, and find out whether it has to."""
    record = replay.record
    if not is_native_run(run.run_id) and replay.ended and (record.failed or record.kind not in _CHANGES):
        op = replay.without_body()
    else:
        body = await store.ops.body(record)
        op = await asyncio.to_thread(_decoded, run, record, body)
    if not replay.ended:
        return op, replay
    assert record.encoding is not None
    if record.failed:
        outcome = await store.ops.outcome(record.adapter_id, record.seq)
        assert outcome is not None, "it has ended"
        if record.ending is None and record.kind is OpKind.OPTIM_STEP:  # by a version that dropped it in any case
            outcome = replace(outcome, ending=Ending.DROPPED)
    else:
        outcome = Outcome(record.encoding, b"")
    return op, replace(replay, repeated=None if _must_run(op.payload, record, outcome) else outcome)


def _must_run(payload: Payload, record: OpRecord, outcome: Outcome) -> bool:
    """Whether an op that has ended is run again to bring its adapter back.

    A native pass also leaves behind what its loss and its metrics are computed from. A native request that failed by
    the tenant's mistake fails again, and with it happens what had happened by then: a metric that refuses a pass has
    dropped it, clip_grad_and_step has stepped before its scheduler complains.
    """
    if outcome.failed:
        ran = outcome.ending is Ending.RAN and isinstance(payload, NativePass | NativeVerb)
        return ran and outcome.category == "user"
    return record.kind in _CHANGES or isinstance(payload, NativePass)


def _decoded(run: RunRecord, record: OpRecord, body: bytes) -> Op:
    try:
        if is_refused(body):
            return read_refused(run.run_id, record.seq, record.kind, body)
        if codec.is_native(body):
            return codec.read_op(run, record.seq, body)
        if record.kind is OpKind.CREATE:
            return Op(run.run_id, record.seq, record.kind, CreateAdapter(run.spec), body)
        if record.kind is OpKind.CREATE_FROM:
            request = parse(CreateFromRequest, body)
            payload = CreateFromCheckpoint(run.spec, request.path, request.optimizer)
            return Op(run.run_id, record.seq, record.kind, payload, body)
        if not record.kind.is_pass:
            return to_op(_REQUESTS[record.kind], body)
        if is_json(body):
            return decode_json_pass(body, record.kind, max_tokens=_UNLIMITED)
        return decode_forward_backward(body, max_tokens=_UNLIMITED)
    except UserError as error:  # it was accepted by an older version of this server
        return Op(run.run_id, record.seq, record.kind, Refused(str(error)), body)
