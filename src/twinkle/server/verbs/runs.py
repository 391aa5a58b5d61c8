"""The kind of run of the native protocol: what is different about native runs, for the services that run their ops.

The library's verbs need torch, so they are loaded when a native request first needs them.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.errors import InvalidInputError, UserError
from twinkle.model.types import MAX_LOGITS, TrainItem, TrainResult
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.ids import CheckpointPath, directory_name, is_native_run
from twinkle.server.services.checkpoints.access import without_server_paths
from twinkle.server.services.checkpoints.save_and_load import delete_checkpoint
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.run_kind import CheckpointFiles, DevicePass, RunKind
from twinkle.server.state.files.data_dir import copy_whole
from twinkle.server.state.files.export import allowed_path, existing_dir
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import (
    CheckpointRecord,
    CreateNative,
    Ending,
    NativeLoad,
    NativePass,
    NativeSave,
    NativeVerb,
    Op,
    OpKind,
    OpRecord,
    Outcome,
    Payload,
    RunRecord,
    SaveWeights,
)
from twinkle.server.verbs.base_model import BaseModelPasses
from twinkle.server.verbs.codec import answered, read_op, succeeded
from twinkle.server.verbs.templates import Templates
from twinkle.server.wire import responses

if TYPE_CHECKING:  # they need torch
    from twinkle.model.library.optimizer_group import OptimizerGroup
    from twinkle.server.verbs.adapters import NativeAdapters

logger = logging.getLogger(__name__)

_SERIES = "series"  # metadata key: names the series of sampler versions in which a new one replaces older ones
_KEPT_OF_SERIES = 2


class NativeRuns(RunKind):
    """The native runs of one served model. Registered where its services are assembled."""

    payloads = (CreateNative, NativePass, NativeVerb, NativeSave, NativeLoad)
    passes_leave_state = True  # inputs of losses and metrics, and the counters of the optimizer group
    failed_pass_spoils = False  # a client hears of the failure before it sends its next request
    kind_tells_steps = False  # a step is a verb, so only the body of an op shows it

    def __init__(
        self,
        model: ServedModel,
        compute: Compute,
        tenants: Tenants,
        allowed_dirs: Sequence[Path] = (),
        max_logits: int = MAX_LOGITS,
    ) -> None:
        """Prepare without loading torch. Tenants may load checkpoints of the server and from ``allowed_dirs``.

        ``max_logits``: the most logits (tokens times the size of the vocabulary) that one request may compute.
        """
        self.templates = Templates(model)
        self.base_model = BaseModelPasses(model, lambda: self.adapters, compute, tenants)
        self._model = model
        self._compute = compute
        self._allowed_dirs = allowed_dirs
        self._max_logits = max_logits
        self._adapters: NativeAdapters | None = None
        self._lock = threading.Lock()

    @property
    def adapters(self) -> "NativeAdapters":
        with self._lock:
            if self._adapters is None:
                from twinkle.server.verbs.adapters import NativeAdapters

                self._adapters = NativeAdapters(self._model, self.templates, self._max_logits)
            return self._adapters

    def owns(self, run_id: str) -> bool:
        return is_native_run(run_id)

    def used_before(self, run: RunRecord) -> str:
        return f"an adapter of this name was added to this session, {run.run_id},"

    # --- on the device ------------------------------------------------------------------------------------------------

    def prepare(self, op: Op, measurements: RunMeasurements) -> DevicePass:
        asked, adapters = op.payload, self.adapters
        assert isinstance(asked, NativePass), f"{op.kind} is not a pass"
        prepared = adapters.prepare(op.adapter_id, asked)

        def encode(result: TrainResult) -> Outcome:
            outputs = prepared.absorb(result)
            outcome = answered(None if asked.verb == "backward" else adapters.pass_result(op.adapter_id, outputs))
            if op.kind is OpKind.FORWARD_BACKWARD:
                _measure_pass(measurements, prepared.item, outputs)
            return outcome

        return DevicePass(prepared.item, encode)

    def run_on_device(self, op: Op, measurements: RunMeasurements) -> Outcome:
        trainer, adapters = self._model.trainer, self.adapters
        if isinstance(op.payload, CreateNative):
            if op.adapter_id not in trainer.adapter_ids():
                trainer.create_adapter(op.adapter_id, op.payload.spec)
            adapters.add(op.adapter_id, op.payload.config, op.payload.gradient_accumulation_steps)
            return responses.created(op.adapter_id)
        assert isinstance(op.payload, NativeVerb), f"{op.kind} is not a short barrier"
        result = adapters.run(op.adapter_id, op.payload)
        _measure_verb(measurements, op, op.payload.verb, adapters.group(op.adapter_id))
        return answered(result)

    # --- state beside the trainer's; without a native adapter most of these do nothing, so that torch is not loaded ---

    def is_settled(self, run_id: str) -> bool:
        return self._adapters is None or self._adapters.is_settled(run_id)

    def dump(self, run_id: str) -> bytes | None:
        return None if self._adapters is None else self._adapters.dump(run_id)

    def restore(self, run_id: str, state: bytes) -> None:
        self.adapters.restore(run_id, state)

    def drop_window(self, run_id: str) -> None:
        if self._adapters is not None:
            self._adapters.drop_window(run_id)

    def remove(self, run_id: str) -> None:
        if self._adapters is not None:
            self._adapters.remove(run_id)

    # --- the journal --------------------------------------------------------------------------------------------------

    def runs_again(self, kind: OpKind, outcome: Outcome) -> bool:
        """Return whether a replay runs an op that has ended again. A pass that succeeded always runs again.

        That brings back the state it leaves behind. A pass or verb that failed by the tenant's mistake runs and fails
        again, because part of it had taken effect: a metric that refuses a pass has dropped it, and clip_grad_and_step
        has stepped before its scheduler raises.
        """
        if outcome.failed:
            ran = outcome.ending is Ending.RAN and outcome.category == "user"
            return ran and (kind.is_pass or kind is OpKind.VERB)
        return kind.is_pass or super().runs_again(kind, outcome)

    def read_op(self, run: RunRecord, record: OpRecord, body: bytes) -> Op:
        return read_op(run, record.seq, body)

    # --- files --------------------------------------------------------------------------------------------------------

    def eviction_save(self, name: str, keep_seconds: int) -> Payload:
        return NativeSave(name, optimizer=True, sampler=False, ttl_seconds=keep_seconds)

    def how_to_resume(self, path: CheckpointPath) -> str:
        return f"add an adapter in a new session, and resume_from_checkpoint({path.native!r}) goes on from it"

    async def run_with_files(self, op: Op, run: RunRecord, checkpoints: CheckpointFiles) -> Outcome:
        if isinstance(op.payload, NativeSave):
            return await self._save(op, run, op.payload, checkpoints)
        assert isinstance(op.payload, NativeLoad), f"{op.kind} has nothing to do with files"
        return await self._load(op, run, op.payload, checkpoints)

    async def _save(self, op: Op, run: RunRecord, save: NativeSave, checkpoints: CheckpointFiles) -> Outcome:
        save_dir = await checkpoints.threads.in_thread(run.tenant_id, partial(self._save_dir, run, save))
        path = await self._compute.run(partial(self._path, op, save))
        if path is None:
            return succeeded({"twinkle_path": "", "checkpoint_dir": None})
        series = {_SERIES: save.name or "latest"} if save.sampler else {}
        copy = partial(self.adapters.prepare_save, op.adapter_id, save)  # already loaded: ``_path`` has used them
        written = SaveWeights(path.name, save.ttl_seconds, not save.sampler, series, path.kind)
        record = await checkpoints.write(op, run, written, copy)
        if save.sampler:
            await _delete_older(run, series[_SERIES], checkpoints)
        if save_dir is not None:
            await _copy_out(record, path, save_dir, checkpoints, required=save.ttl_seconds is None)
        return succeeded({"twinkle_path": path.native, "checkpoint_dir": path.native})

    def _save_dir(self, run: RunRecord, save: NativeSave) -> Path | None:
        """Return the directory for copies of a run's checkpoints; None if it has none.

        The directory is checked again, since the operator may have changed ``allowed_dirs`` or the directory. If it is
        not allowed any more, a client's save is refused, and the server's own save of an evicted adapter is not copied.
        """
        if "save_dir" not in run.user_metadata:
            return None
        try:
            return existing_dir("save_dir", run.user_metadata["save_dir"], self._allowed_dirs)
        except InvalidInputError:
            if save.ttl_seconds is None:
                raise
            logger.warning("the last checkpoint of %s is not copied: its save_dir is not allowed any more", run.run_id)
            return None

    def _path(self, op: Op, save: NativeSave) -> CheckpointPath | None:
        """Return the path of a save; None if the adapter is not to be saved now. Runs in the compute thread."""
        if save.interval > 1 and not self.adapters.is_due(op.adapter_id, save.interval):
            return None
        if save.sampler:  # a path of its own each time: what a sampler was made from never changes
            return CheckpointPath(op.adapter_id, "sampler_weights", f"{save.name or 'latest'}-{op.seq}")
        name = save.name or f"checkpoint-step-{self.adapters.group(op.adapter_id).cur_step}"
        return CheckpointPath(op.adapter_id, "weights", name)

    async def _load(self, op: Op, run: RunRecord, load: NativeLoad, checkpoints: CheckpointFiles) -> Outcome:
        if load.path.startswith(("twinkle://", "tinker://")):
            path = CheckpointPath.parse(load.path, "name")
            directory, shown = await checkpoints.readable(path, run, "name", path.native), path.native
        else:
            directory, shown = allowed_path("name", load.path, self._allowed_dirs), load.path

        def resume() -> tuple[dict[str, int], list[str]]:
            load_it = partial(self.adapters.resume, op.adapter_id, directory, optimizer=load.optimizer)
            return without_server_paths(load_it, directory, shown)

        progress, missing = await self._compute.run(resume)
        if load.verb != "resume_from_checkpoint":
            return answered(None)
        return succeeded({"result": progress, **({"missing": missing} if missing else {})})


async def _delete_older(run: RunRecord, series: str, checkpoints: CheckpointFiles) -> None:
    """Delete all but the last two checkpoints of a series: those that a run saved for sampling under one name.

    A training loop publishes after every step; the version before the last may still be in use.
    """
    of_run = await checkpoints.store.checkpoints.of_run(run.run_id)
    kept = [each for each in of_run if each.user_metadata.get(_SERIES) == series]
    for old in sorted(kept, key=lambda each: each.created_at)[:-_KEPT_OF_SERIES]:
        await delete_checkpoint(checkpoints.store, checkpoints.files, checkpoints.threads, old, "checkpoint_replace")


async def _copy_out(
    record: CheckpointRecord, path: CheckpointPath, save_dir: Path, checkpoints: CheckpointFiles, *, required: bool
) -> None:
    """Copy a checkpoint into a run's ``save_dir``. If that fails, raise UserError, or log it where not ``required``."""
    target = save_dir / directory_name(record.run_id) / record.kind / record.name

    def copy() -> None:
        if os.path.realpath(target.parent) != str(target.parent):  # made by somebody else, and it may lead anywhere
            raise NotADirectoryError(f"{target.parent.relative_to(save_dir)} has a symbolic link")
        copy_whole(checkpoints.files.root / record.directory, target, private=False)

    try:
        await checkpoints.threads.in_thread(record.tenant_id, copy)
    except OSError as error:
        reason = error.strerror or str(error)
        said = f"save_dir: {path.native} is saved, but could not be copied into {str(save_dir)!r}: {reason}"
        if required:
            raise UserError(said) from error
        logger.warning("%s", said)


# --- measurements; inside a window of accumulated gradients verbs have no effect, and are not measured --------------


def _measure_pass(measurements: RunMeasurements, item: TrainItem, outputs: Mapping[str, Any]) -> None:
    """Record a backward pass. A loss without a number of tokens is already a mean, and counts once."""
    if outputs.get("loss") is not None:
        count, tokens = float(outputs.get("num_tokens") or 0.0), sum(len(datum.tokens) for datum in item.data)
        measurements.passed(item.adapter_id, float(outputs["loss"]), count if count > 0 else 1.0, tokens)


def _measure_verb(measurements: RunMeasurements, op: Op, verb: str, group: "OptimizerGroup") -> None:
    if not group.at_boundary:
        return
    if verb in ("clip_grad_norm", "clip_grad_and_step"):
        measurements.clipped(op.adapter_id, group.last_grad_norm)
    if op.is_step:
        measurements.stepped(op.adapter_id, op.seq, group.last_lr[0] if group.last_lr else None)
    if verb == "zero_grad":
        measurements.dropped(op.adapter_id)
