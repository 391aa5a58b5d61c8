"""Ops that end in files: saving, publishing for sampling, loading.

A checkpoint exists once its record is in the database, and its record comes after its files. An op that runs again
after a crash finds its own record, or writes the same files anew.
"""

import asyncio
import errno
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from twinkle.errors import (
    CheckpointError,
    InvalidInputError,
    TwinkleError,
    UnknownCheckpointError,
    UnsupportedError,
)
from twinkle.server.backend import ServedModel
from twinkle.server.compute import Compute
from twinkle.server.execution import failure_of, unexpected
from twinkle.server.files import DataDir, size_of
from twinkle.server.ids import CheckpointPath, sampling_session_id
from twinkle.server.state import StorageFullError, Store
from twinkle.server.types import (
    CheckpointKind,
    CheckpointRecord,
    LoadWeights,
    Metadata,
    Op,
    OpKind,
    Outcome,
    PublishSampler,
    Refused,
    RunRecord,
    SamplingSessionRecord,
    SaveWeights,
)
from twinkle.server.wire import responses

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_PARKING = 0  # the place in the sequence of the save that we make ourselves


class Checkpoints:
    """Runs the ops of one model that read or write files."""

    def __init__(self, model: ServedModel, store: Store, compute: Compute, files: DataDir) -> None:
        self._model = model
        self._store = store
        self._compute = compute
        self._files = files
        self._publishing: set[str] = set()  # sampling sessions that come into being

    async def run(self, op: Op, run: RunRecord) -> Outcome:
        try:
            match op.payload:
                case SaveWeights():
                    return await self._save(op, run, op.payload)
                case PublishSampler(name=None):
                    return await self._publish_unnamed(op, run, op.payload)
                case PublishSampler():
                    return await self._publish_named(op, run, op.payload)
                case LoadWeights():
                    return await self._load(op, run, op.payload)
                case Refused(message):
                    return responses.failed(message, "user")
                case _:
                    raise AssertionError(f"{op.kind} has nothing to do with files")
        except OSError as error:
            if error.errno in _NO_SPACE:
                error = StorageFullError("the server's disk is full: nothing was saved, training goes on")
            return (
                failure_of(error, op.request_id)
                if isinstance(error, TwinkleError)
                else unexpected(error, op.request_id)
            )
        except TwinkleError as error:
            return failure_of(error, op.request_id)
        except Exception as error:  # noqa: BLE001 - the trainer loop is an edge
            return unexpected(error, op.request_id)

    async def park(self, run: RunRecord, why: str, keep_seconds: float) -> str | None:
        """Keep the last state of an adapter that leaves the device; returns how to go on from it, None if it failed."""
        name = await self._name_for_parking(run)
        path = CheckpointPath(run.run_id, "weights", name)
        op = Op(run.run_id, _PARKING, OpKind.SAVE, SaveWeights(name, int(keep_seconds), overwrite=True), b"")
        outcome = await self.run(op, run)
        await self._compute.run(lambda: self._remove(run.run_id))
        if outcome.failed:
            return None
        days = keep_seconds / 86400
        return (
            f"session {run.session_id} {why}; its adapter is kept for {days:g} days: "
            f"create_training_client_from_state_with_optimizer({str(path)!r}) goes on from it"
        )

    async def _name_for_parking(self, run: RunRecord) -> str:
        """One that the tenant did not give to a checkpoint of its own."""
        for name in itertools.chain(["parked"], (f"parked-{number}" for number in itertools.count(2))):
            existing = await self._store.checkpoints.get(run.run_id, "weights", name)
            if existing is None or existing.request_id == f"{run.run_id}:{_PARKING}":
                return name
        raise AssertionError("there are always more names")

    def _remove(self, run_id: str) -> None:
        if run_id in self._model.trainer.adapter_ids():
            self._model.trainer.remove_adapter(run_id)

    async def _save(self, op: Op, run: RunRecord, save: SaveWeights) -> Outcome:
        path = CheckpointPath(run.run_id, "weights", save.name)
        await self._write(op, run, path, save.overwrite, save.ttl_seconds, save.user_metadata, optimizer=True)
        return responses.saved(str(path))

    async def _publish_named(self, op: Op, run: RunRecord, publish: PublishSampler) -> Outcome:
        assert publish.name is not None
        path = CheckpointPath(run.run_id, "sampler_weights", publish.name)
        await self._write(op, run, path, False, publish.ttl_seconds, publish.user_metadata, optimizer=False)
        return responses.published(path=str(path))

    async def _write(
        self,
        op: Op,
        run: RunRecord,
        path: CheckpointPath,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Metadata,
        *,
        optimizer: bool,
    ) -> None:
        existing = await self._store.checkpoints.get(path.run_id, path.kind, path.name)
        if existing is not None and existing.request_id == op.request_id and not overwrite:
            return
        if existing is not None and not overwrite:
            hint = "; overwrite=True replaces it" if path.kind == "weights" else ""
            raise InvalidInputError("path", path.name, f"a new name ({path} exists{hint})")
        directory = self._files.checkpoint(path, op.seq)
        write = await self._compute.run(lambda: self._model.trainer.prepare_save(op.adapter_id, optimizer))
        await asyncio.to_thread(_write_files, write, directory)
        now = time.time()
        record = CheckpointRecord(
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            tenant_id=run.tenant_id,
            request_id=op.request_id,
            directory=self._files.relative(directory),
            created_at=now,
            size_bytes=size_of(directory),
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            user_metadata=user_metadata,
        )
        try:
            replaced = await self._store.checkpoints.add(record, overwrite=True)
        except StorageFullError:
            if existing is None or existing.directory != record.directory:  # an op that runs again may have its record
                await asyncio.to_thread(self._files.remove, record.directory)
            raise
        if replaced is None or replaced.directory == record.directory:
            return
        if not await self._store.sampling_sessions.refer_to(replaced.directory):  # they are pinned to what it holds
            await asyncio.to_thread(self._files.remove, replaced.directory)

    async def _publish_unnamed(self, op: Op, run: RunRecord, publish: PublishSampler) -> Outcome:
        """A sampling session of its own. On disk before the client hears of it, on the device at once."""
        assert publish.session_seq is not None
        if self._model.sampler is None:
            raise UnsupportedError(f"{self._model.name} is served for training only; give the save a name")
        session = sampling_session_id(run.session_id, publish.session_seq)
        record = SamplingSessionRecord(
            sampling_session_id=session,
            session_id=run.session_id,
            number=publish.session_seq,
            tenant_id=run.tenant_id,
            base_model=run.base_model,
            model_name=run.model_name,
            model_path=None,
            version_id=session,
            directory=self._files.relative(self._files.sampler(session, run.number, op.seq)),
            created_at=time.time(),
        )
        taken = InvalidInputError(
            "sampling_session_seq_id", publish.session_seq, "a number not used before in this session"
        )
        if session in self._publishing:
            raise taken
        self._publishing.add(session)
        try:
            made = await self._store.sampling_sessions.get(session) or await self._make_version(record, op.adapter_id)
        finally:
            self._publishing.remove(session)
        if made.directory != record.directory:  # of another op: its weights are not those that were asked for
            raise taken
        return responses.published(sampling_session_id=session)

    async def _make_version(self, record: SamplingSessionRecord, adapter_id: str) -> SamplingSessionRecord:
        """The record, or another one whose maker was faster: then, as when it fails, nothing of ours is left."""
        version_id, directory = record.sampling_session_id, record.directory
        assert directory is not None, "a version has files"
        write = await self._compute.run(lambda: self._publish(version_id, adapter_id))
        made = None
        try:
            await asyncio.to_thread(_write_files, write, self._files.root / directory)
            made = await self._store.sampling_sessions.create(record)
            return made
        finally:
            if made is None or made.directory != directory:
                await self._compute.run(lambda: self._retire(version_id))
                await asyncio.to_thread(self._files.remove, directory)

    def _publish(self, version_id: str, adapter_id: str) -> Callable[[Path], None]:
        """In the compute thread; what it returns writes the files, which takes far longer than all the rest."""
        sampler = self._model.sampler
        assert sampler is not None, "checked before"
        write = self._model.trainer.prepare_save(adapter_id, optimizer=False)
        sampler.publish(version_id, adapter_id)
        return write

    def _retire(self, version_id: str) -> None:
        assert self._model.sampler is not None, "checked before"
        self._model.sampler.retire(version_id)

    async def _load(self, op: Op, run: RunRecord, load: LoadWeights) -> Outcome:
        path = CheckpointPath.parse(load.path)
        record = await readable_checkpoint(self._store, path, run.tenant_id)
        if load.optimizer and record.kind != "weights":
            raise InvalidInputError("optimizer", True, f"False: {path} holds no optimizer state")
        directory = self._files.root / record.directory
        await self._compute.run(lambda: self._load_now(op.adapter_id, directory, load.optimizer, str(path)))
        return responses.loaded(str(path), op.adapter_id)

    def _load_now(self, adapter_id: str, directory: Path, optimizer: bool, path: str) -> None:
        without_server_paths(
            lambda: self._model.trainer.load(adapter_id, directory, optimizer=optimizer), directory, path
        )
        self._model.trainer.zero_grad(adapter_id)


def _write_files(write: Callable[[Path], None], directory: Path) -> None:
    """What cannot be written is no mistake of the tenant's, and our directories are not its business."""
    try:
        write(directory)
    except CheckpointError as error:
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None


async def readable_checkpoint(store: Store, path: CheckpointPath, tenant_id: str) -> CheckpointRecord:
    """Another tenant's checkpoint answers exactly like one that does not exist, unless it is public."""
    record = await store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or not (record.public or record.tenant_id == tenant_id) or expired(record):
        raise UnknownCheckpointError(str(path))
    return record


def version_of(record: CheckpointRecord) -> str:
    """What a sampler calls these weights: a checkpoint's name may be used again, a version never changes."""
    return f"{CheckpointPath(record.run_id, record.kind, record.name)}@{record.request_id}"


def without_server_paths(work: Callable[[], None], directory: Path, path: str) -> None:
    """Errors about files name the tenant's address of them, not ours."""
    try:
        work()
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(directory), path)) from error


def kind_of_checkpoint(kind: CheckpointKind) -> str:
    """What Tinker's listings call it."""
    return {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}[kind]


def expired(record: CheckpointRecord) -> bool:
    return record.expires_at is not None and record.expires_at <= time.time()
