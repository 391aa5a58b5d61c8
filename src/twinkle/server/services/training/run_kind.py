"""What is different about the runs of one protocol, in one place.

The services work with adapters and ops, and do not ask which protocol a request came through. A :class:`RunKind` has
everything that depends on the protocol: how an op is read from the journal, what a pass leaves behind, what a snapshot
keeps beside the trainer's state. The class itself is the kind of Tinker's runs. Another protocol derives its own kind
and registers it where services are assembled (``runtime/assembly.py``); an op whose payload the services do not know
is run by the kind that lists the payload's type in ``payloads``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twinkle.model.types import TrainItem, TrainResult
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import (
    CheckpointRecord,
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

Copy = Callable[[], Callable[[Path], None]]  # runs in the compute thread, and returns a function that writes the files
UNLIMITED = 2**62  # tokens: an op that was accepted under an earlier, higher limit must not be refused in a replay
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

# Ops that change the adapter, so that a replay runs them again. The others only read it, and their files exist already.
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
    """A pass that is ready for the trainer. ``encode`` turns the result into an outcome, in the compute thread."""

    item: TrainItem
    encode: Callable[[TrainResult], Outcome]


class CheckpointFiles(Protocol):
    """What a kind may do with files; implemented by the service's ``Checkpoints``."""

    @property
    def store(self) -> Store: ...

    @property
    def files(self) -> DataDir: ...

    @property
    def threads(self) -> FairPool: ...

    async def write(self, op: Op, run: RunRecord, save: SaveWeights, copy: Copy) -> CheckpointRecord:
        """Write a checkpoint's files and then its record, and return the record."""

    async def readable(self, path: CheckpointPath, run: RunRecord, field: str, shown: str) -> Path:
        """Return the directory of a checkpoint that the run's tenant may load.

        ``field`` is the request's field in errors; ``shown`` names the checkpoint in the error about damage.
        """


class RunKind:
    """The kind of Tinker's runs, and the base class of other kinds, which override what differs."""

    # The payload types that only this kind can run, by prepare, run_on_device or run_with_files.
    payloads: tuple[type[Payload], ...] = ()
    # Whether a pass leaves state behind that is neither gradient nor weights. If so, a forward pass changes the
    # adapter, too, and the passes of one adapter run one after another.
    passes_leave_state = False
    # Whether a failed pass spoils its window: the optimizer step that follows is refused.
    failed_pass_spoils = True
    # Whether an op's OpKind says if it is an optimizer step. If not, a replay must also decode the bodies of ops that
    # do not run again, because a step among them closes its window in the replay, too.
    kind_tells_steps = True

    def owns(self, run_id: str) -> bool:
        """Return whether a run with this id is of this kind, by the form of the id. Tinker's kind, which is asked last,
        owns all that are left.
        """
        return True

    def used_before(self, run: RunRecord) -> str:
        """Return the first words of the error when a run is created under an id that another request has used."""
        return f"model_seq_id {run.number} was used"

    # --- running ops whose payloads are of this kind ------------------------------------------------------------------

    def prepare(self, op: Op, measurements: RunMeasurements) -> DevicePass:
        """Return a pass that is ready for the trainer. Runs in the compute thread. Only called for ``payloads``."""
        raise AssertionError(f"{op.kind} is not a pass")

    def run_on_device(self, op: Op, measurements: RunMeasurements) -> Outcome:
        """Run a barrier that needs neither files nor the database. Runs in the compute thread. Only called for
        ``payloads``.
        """
        raise AssertionError(f"{op.kind} is not a short barrier")

    async def run_with_files(self, op: Op, run: RunRecord, checkpoints: CheckpointFiles) -> Outcome:
        """Run an op that reads or writes files. Runs on the event loop. Only called for ``payloads``."""
        raise AssertionError(f"{op.kind} has nothing to do with files")

    # --- state of an adapter beside the trainer's: all methods but the first run in the compute thread ----------------

    def is_settled(self, run_id: str) -> bool:
        """Return whether a snapshot would have the whole state of the adapter. May be called in any thread.

        It would not, for example, between a forward pass and a separate backward pass that needs its activations. It
        always would for Tinker's runs.
        """
        return True

    def dump(self, run_id: str) -> bytes | None:
        """Return the state that a snapshot keeps beside the trainer's; None if there is none, as for Tinker's runs."""
        return None

    def restore(self, run_id: str, state: bytes) -> None:
        """Restore the state that :meth:`dump` returned. Tinker's runs have none."""

    def drop_window(self, run_id: str) -> None:
        """Forget what this kind counted for the open window, whose gradient is dropped. Tinker's counts nothing."""

    def remove(self, run_id: str) -> None:
        """Forget what this kind keeps for an adapter that is removed from the trainer. Tinker's keeps nothing."""

    # --- evicting -----------------------------------------------------------------------------------------------------

    def eviction_save(self, name: str, keep_seconds: int) -> Payload:
        """Return the payload of the save that keeps the last state of an evicted run."""
        return SaveWeights(name, keep_seconds, overwrite=True)

    def how_to_resume(self, path: CheckpointPath) -> str:
        """Return a sentence that says how a client continues from a checkpoint."""
        return f"create_training_client_from_state_with_optimizer({str(path)!r}) goes on from it"

    # --- the journal --------------------------------------------------------------------------------------------------

    def runs_again(self, kind: OpKind, outcome: Outcome) -> bool:
        """Return whether a replay runs an op that has ended again: if it succeeded and is of a kind that changes its
        adapter. Other run kinds have other rules.
        """
        return not outcome.failed and kind in _CHANGES

    def read_op(self, run: RunRecord, record: OpRecord, body: bytes) -> Op:
        """Return an op, decoded from its body in the journal.

        UserError: the body is invalid for this version of the server; an earlier version accepted it.
        """
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
    """The kinds of runs that a service knows: those that are registered, and Tinker's."""

    def __init__(self, registered: Sequence[RunKind] = ()) -> None:
        self._kinds = (*registered, RunKind())
        # The registered kinds by the payload types that only they can run.
        self.by_payload: Mapping[type[Payload], RunKind] = {
            payload: kind for kind in registered for payload in kind.payloads
        }

    def find(self, run_id: str) -> RunKind:
        """Return the kind of a run: the first registered kind that owns its id, or else Tinker's."""
        return next(kind for kind in self._kinds if kind.owns(run_id))
