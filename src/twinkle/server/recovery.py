"""What to run again after a restart: the ops behind an adapter's last snapshot, with what is known of them."""

import asyncio
import json
from dataclasses import dataclass

from twinkle.errors import UserError
from twinkle.server.native import codec
from twinkle.server.state import Store
from twinkle.server.types import (
    CreateAdapter,
    CreateFromCheckpoint,
    NativePass,
    NativeVerb,
    Op,
    OpKind,
    OpRecord,
    Outcome,
    Refused,
    RunRecord,
)
from twinkle.server.wire import responses
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
    """An op from the journal and its outcome, if it had one."""

    op: Op
    outcome: Outcome | None

    @property
    def must_run(self) -> bool:
        """A native pass also leaves behind what its loss and its metrics are computed from.

        A native request that failed by the tenant's mistake fails again, and with it happens what had happened by then:
        a metric that refuses a pass has dropped it, clip_grad_and_step has stepped before its scheduler complains.
        """
        if self.outcome is None:
            return True
        if self.outcome.failed:
            return isinstance(self.op.payload, NativePass | NativeVerb) and _is_users(self.outcome)
        return self.op.kind in _CHANGES or isinstance(self.op.payload, NativePass)


async def read_replay(store: Store, run: RunRecord, applied: int) -> list[Replay]:
    """All ops after number ``applied``.

    A number that is missing below one that has ended was given up as missing: it takes its place again as a
    forward_backward that failed, which is what the scheduler took it for.
    """
    records = await store.ops.since(run.run_id, applied)
    ended = max((record.seq for record in records if record.outcome is not None), default=applied)
    present = {record.seq for record in records}
    replays = [_missing(run.run_id, seq) for seq in range(applied + 1, ended) if seq not in present]
    for record in records:
        body = await store.ops.body(record)
        outcome = None if record.outcome is None else await store.ops.outcome(run.run_id, record.seq)
        replays.append(Replay(await asyncio.to_thread(_decode, run, record, body), outcome))
    return sorted(replays, key=lambda replay: replay.op.seq)


def _decode(run: RunRecord, record: OpRecord, body: bytes) -> Op:
    try:
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


def _is_users(failure: Outcome) -> bool:
    return bool(json.loads(failure.body)["category"] == "user")


def _missing(run_id: str, seq: int) -> Replay:
    message = f"seq_id {seq} never arrived"
    op = Op(run_id, seq, OpKind.FORWARD_BACKWARD, Refused(message), b"")
    return Replay(op, responses.failed(message, "user"))
