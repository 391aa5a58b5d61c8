"""What is different about the runs of one protocol, in one place.

The services work with adapters and ops, and never ask which protocol a request came through. A :class:`RunKind` answers
what depends on it: how an op is read from the journal again, what a pass leaves behind, what is kept of an adapter
beside the trainer's state. The class itself has the answers for Tinker's runs. Another protocol derives its own kind
and registers it where services are assembled (``runtime/assembly.py``); ops whose payloads the services do not know
are run by the kind that names them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle.model.types import TrainItem, TrainResult
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.types import (
    CreateAdapter,
    LoadWeights,
    Op,
    OpKind,
    OpRecord,
    Outcome,
    Payload,
    RunRecord,
    SaveWeights,
)
from twinkle.server.wire.fields import parse
from twinkle.server.wire.requests import (
    CreateFromRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SequencedRequest,
    to_op,
)
from twinkle.server.wire.training import Allowance, decode_forward_backward
from twinkle.server.wire.training_json import decode_json_pass, is_json

if TYPE_CHECKING:
    from twinkle.server.services.checkpoints.save_and_load import Checkpoints

UNLIMITED = 2**62  # tokens: what was accepted under an earlier limit is not refused when the journal is read
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
class DevicePass:
    """A pass that is ready for the trainer. ``encode`` makes its outcome of the result, in the compute thread."""

    item: TrainItem
    encode: Callable[[TrainResult], Outcome]


class RunKind:
    """The runs of Tinker's protocol, and what another protocol may answer differently."""

    # The payloads that only this kind can run: see the three methods that run an op.
    payloads: tuple[type[Payload], ...] = ()
    # Whether a pass leaves something behind that is neither gradient nor weights. Then also a forward pass changes the
    # adapter, and the passes of one adapter run one after another.
    passes_leave_state = False
    # Whether a failed pass spoils its window: the optimizer step that follows is refused.
    failed_pass_spoils = True
    # Whether an op's OpKind tells what it means for its window. If not, a restart reads the bodies also of those ops
    # that do not run again: a step among them closes its window once more.
    kind_tells_steps = True

    def owns(self, run_id: str) -> bool:
        """Return whether a run is of this kind, by the form of its id."""
        return True

    def used_before(self, run: RunRecord) -> str:
        """Say what was used before, to whoever creates a run under an id that another request has."""
        return f"model_seq_id {run.number} was used"

    # --- running ops whose payloads are of this kind ------------------------------------------------------------------

    def prepare(self, op: Op, measurements: RunMeasurements) -> DevicePass:
        """Return a pass, ready for the trainer. Runs in the compute thread."""
        raise AssertionError(f"{op.kind} is not a pass")

    def run_on_device(self, op: Op, measurements: RunMeasurements) -> Outcome:
        """Run an op that touches nothing but the device. Runs in the compute thread."""
        raise AssertionError(f"{op.kind} is not a short barrier")

    async def run_with_files(self, op: Op, run: RunRecord, checkpoints: "Checkpoints") -> Outcome:
        """Run an op that reads or writes files."""
        raise AssertionError(f"{op.kind} has nothing to do with files")

    # --- what is kept of an adapter beside the trainer's state: all but the first in the compute thread ---------------

    def is_settled(self, run_id: str) -> bool:
        """Return whether nothing of the adapter is only in memory, so that a snapshot can be taken. Any thread."""
        return True

    def dump(self, run_id: str) -> bytes | None:
        """Return what a snapshot keeps beside the trainer's state, if there is anything."""
        return None

    def restore(self, run_id: str, state: bytes) -> None:
        """Bring back what :meth:`dump` returned."""

    def drop_window(self, run_id: str) -> None:
        """Forget what was counted of a gradient that is dropped."""

    def remove(self, run_id: str) -> None:
        """Forget an adapter that leaves the trainer."""

    # --- evicting -----------------------------------------------------------------------------------------------------

    def eviction_save(self, name: str, keep_seconds: int) -> Payload:
        """Return the save that keeps the last state of an adapter that leaves the device."""
        return SaveWeights(name, keep_seconds, overwrite=True)

    def how_to_resume(self, path: CheckpointPath) -> str:
        """Say how a client goes on from a checkpoint."""
        return f"create_training_client_from_state_with_optimizer({str(path)!r}) goes on from it"

    # --- the journal --------------------------------------------------------------------------------------------------

    def runs_again(self, kind: OpKind, outcome: Outcome) -> bool:
        """Return whether an op that has ended is run again after a restart, to bring its adapter back."""
        return not outcome.failed and kind in _CHANGES

    def read_op(self, run: RunRecord, record: OpRecord, body: bytes) -> Op:
        """Return an op from its body in the journal. UserError: it was accepted by a version that took more."""
        if record.kind is OpKind.CREATE:
            return Op(run.run_id, record.seq, record.kind, CreateAdapter(run.spec), body)
        if record.kind is OpKind.CREATE_FROM:
            asked = parse(CreateFromRequest, body)
            return Op(run.run_id, record.seq, record.kind, LoadWeights(asked.path, asked.optimizer), body)
        if not record.kind.is_pass:
            return to_op(_REQUESTS[record.kind], body)
        if is_json(body):
            return decode_json_pass(body, record.kind, Allowance(UNLIMITED))
        return decode_forward_backward(body, Allowance(UNLIMITED))


class RunKinds:
    """The kinds of runs that a service knows: those that were registered, and Tinker's."""

    def __init__(self, registered: Sequence[RunKind] = ()) -> None:
        self._kinds = (*registered, RunKind())
        # The registered kinds by the payloads that only they can run.
        self.by_payload: Mapping[type[Payload], RunKind] = {
            payload: kind for kind in registered for payload in kind.payloads
        }

    def find(self, run_id: str) -> RunKind:
        """Return the kind of a run."""
        return next(kind for kind in self._kinds if kind.owns(run_id))
