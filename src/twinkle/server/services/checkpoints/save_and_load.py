"""Ops that read or write files: saving, publishing for sampling, exporting, loading.

A checkpoint exists once its record is in the database; the record is written after the files. An op that is replayed
after a crash finds its own record, or writes the same files again.
"""

import errno
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from twinkle.errors import CheckpointError, InvalidInputError, StorageQuotaError, UnsupportedError
from twinkle.sampler.types import Sampler, TakesFiles
from twinkle.server.ids import CheckpointPath, sampling_session_id
from twinkle.server.services.checkpoints.access import loadable_checkpoint, without_server_paths
from twinkle.server.services.checkpoints.export import prepare_export, prepare_full_export
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.execution import failure_of
from twinkle.server.services.training.run_kind import Copy
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.files.data_dir import DataDir, make_parents, seal_written, size_of
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool, TenantTurns
from twinkle.server.types import (
    CheckpointRecord,
    LoadWeights,
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
_EVICTION = 0  # the sequence number of the save that the server itself makes when it evicts a run


class Checkpoints:
    """Runs the ops of one model that read or write files. Belongs to the event loop."""

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self._model = context.model
        self.store = context.store
        self._compute = context.compute
        self.files = context.files
        self._writing = TenantTurns()  # limits a tenant's concurrent saves, each of which holds a copy of an adapter
        self.threads = context.tenants.pools.saving
        self._publishing: set[str] = set()  # ids of sampling sessions that are being created

    async def run(self, op: Op, run: RunRecord) -> Outcome:
        """Run an op and return its outcome. An error becomes a failed outcome; nothing is raised."""
        try:
            match op.payload:
                case SaveWeights():
                    return await self._save(op, run, op.payload)
                case PublishSampler(session_seq):
                    return await self._publish(op, run, session_seq)
                case LoadWeights():
                    return await self._load(op, run, op.payload)
                case Refused(message):
                    return Outcome.failure(message, "user")
                case other:
                    return await self.context.kinds.by_payload[type(other)].run_with_files(op, run, self)
        except Exception as error:  # noqa: BLE001 - an edge of the service: an error fails its own op alone
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                error = StorageFullError("the server's disk is full: nothing was saved, training goes on")
            return failure_of(error, op.request_id)

    async def save_before_eviction(self, run: RunRecord, why: str, keep_seconds: float) -> str | None:
        """Save the last state of an adapter as a checkpoint; then remove the adapter from the trainer, even if the save
        failed. Only a run that trains all parameters stays there then, so that its save can be tried again.

        Return a note for the tenant that says how to continue from the checkpoint; None if the save failed.
        """
        name = await self._name_for_eviction(run)
        path = CheckpointPath(run.run_id, "weights", name)
        kind = self.context.kinds.find(run.run_id)
        op = Op(run.run_id, _EVICTION, OpKind.SAVE, kind.eviction_save(name, int(keep_seconds)), b"")
        outcome = await self.run(op, run)

        def remove() -> None:
            kind.remove(run.run_id)
            if run.run_id in self._model.trainer.adapter_ids():
                self._model.trainer.remove_adapter(run.run_id)

        if not outcome.failed or run.lora is not None:
            await self._compute.run(remove)
        if outcome.failed:
            return None
        days = keep_seconds / 86400
        what = "its adapter is" if run.lora is not None else "its weights and its optimizer's state are"
        return f"{why}; {what} kept for {days:g} days: {kind.how_to_resume(path)}"

    async def _name_for_eviction(self, run: RunRecord) -> str:
        """Return a name that no checkpoint of the run has, or that an earlier try to evict it used: parked, or parked-2
        and so on.
        """
        for name in itertools.chain(["parked"], (f"parked-{number}" for number in itertools.count(2))):
            existing = await self.store.checkpoints.get(run.run_id, "weights", name)
            if existing is None or existing.request_id == f"{run.run_id}:{_EVICTION}":
                return name
        raise AssertionError("there are always more names")

    async def _save(self, op: Op, run: RunRecord, save: SaveWeights) -> Outcome:
        trainer = self._model.trainer
        if save.kind == "external_weights" and run.lora is None:
            copy = partial(prepare_full_export, trainer, op.adapter_id, save.recipients)
        elif save.kind == "external_weights":
            copy = partial(prepare_export, trainer, op.adapter_id, self._model.architecture, save.recipients)
        else:
            copy = partial(trainer.prepare_save, op.adapter_id, save.kind == "weights")
        return responses.saved(await self.write(op, run, save, copy))

    async def write(self, op: Op, run: RunRecord, save: SaveWeights, copy: Copy) -> CheckpointRecord:
        """Write a checkpoint's files and then its record, and return the record.

        Without ``overwrite``, an op that has written its record before returns that record, and InvalidInputError is
        raised if another op has used the name. StorageQuotaError: the tenant's storage is full.
        """
        path = CheckpointPath(run.run_id, save.kind, save.name)
        existing = await self.store.checkpoints.get(path.run_id, path.kind, path.name)
        if existing is not None and existing.request_id == op.request_id and not save.overwrite:
            return existing
        if existing is not None and not save.overwrite:
            hint = "; overwrite=True replaces it" if path.kind == "weights" else ""
            raise InvalidInputError("path", path.name, f"a new name ({path} exists{hint})")
        # The save before an eviction is made even if the tenant exceeds its storage limit.
        limits = self.context.tenants.limits(run.tenant_id)
        most = None if op.seq == _EVICTION else limits.max_checkpoint_bytes_per_tenant
        await self._check_space(run.tenant_id, most)
        directory = self.files.checkpoint(path, op.seq)
        async with self._writing.turn(run.tenant_id):
            write = await self._compute.run(copy)
            size = await self.threads.in_thread(run.tenant_id, partial(_write_files, write, directory))
        now = time.time()
        record = CheckpointRecord(
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            tenant_id=run.tenant_id,
            request_id=op.request_id,
            directory=self.files.relative(directory),
            created_at=now,
            size_bytes=size,
            expires_at=None if save.ttl_seconds is None else now + save.ttl_seconds,
            user_metadata=save.user_metadata,
        )
        try:
            replaced = await self.store.checkpoints.add(record, overwrite=True, most_bytes=most)
        except (StorageFullError, StorageQuotaError):
            # The files of a replayed op stay: the record from before the restart refers to them.
            if existing is None or existing.directory != record.directory:
                await self.threads.in_thread(run.tenant_id, partial(self.files.remove, record.directory))
            raise
        others = [] if replaced is None or replaced.directory == record.directory else [replaced.directory]
        if existing is not None and existing.request_id == op.request_id:
            # This op is replayed: the last process died after it wrote the record, and perhaps before it removed the
            # directory that the checkpoint replaced. Only then all directories of this checkpoint name are examined,
            # because there may be many that samplers still use.
            others = await self.threads.in_thread(run.tenant_id, partial(self.files.beside, directory))
        for other in others:
            pinned = await self.store.sampling_sessions.refer_to(other)
            if not pinned and not await self.store.checkpoints.lie_in(other):
                await self.threads.in_thread(run.tenant_id, partial(self.files.remove, other))
        return record

    async def _check_space(self, tenant_id: str, most: int | None) -> None:
        """Raise StorageQuotaError if the tenant uses ``most`` bytes or more (None: no limit). Called before files are
        written.

        The size of the new files is known only after that, and is checked when their record is added.
        """
        used = 0 if most is None else await self.store.usage.storage_of(tenant_id)
        if most is not None and used >= most:
            raise StorageQuotaError(used, 1, most)

    async def _publish(self, op: Op, run: RunRecord, session_seq: int) -> Outcome:
        """Publish the adapter's present weights as a new sampling session.

        The sampler gets them at once; the client is answered when their files and their record are written. They are
        not synced: like the journal's bodies they survive the death of this process, and a client in a loop does not
        wait for the disk.
        """
        sampler = self._model.sampler
        if sampler is None:
            raise UnsupportedError(f"{self._model.name} is served for training only; give the save a name")
        session = sampling_session_id(run.session_id, session_seq)
        record = SamplingSessionRecord(
            sampling_session_id=session,
            session_id=run.session_id,
            number=session_seq,
            tenant_id=run.tenant_id,
            base_model=run.base_model,
            model_name=run.model_name,
            model_path=None,
            version_id=session,
            directory=self.files.relative(self.files.sampler(session, run.number, op.seq)),
            created_at=time.time(),
            replica=run.replica,
        )
        taken = InvalidInputError("sampling_session_seq_id", session_seq, "a number not used before in this session")
        if session in self._publishing:
            raise taken
        self._publishing.add(session)
        try:
            made = await self.store.sampling_sessions.get(session)
            made = made or await self._make_version(record, op.adapter_id, sampler)
        finally:
            self._publishing.remove(session)
        if made.directory != record.directory:  # another op made this session, from other weights
            raise taken
        return responses.published(session)

    async def _make_version(
        self, record: SamplingSessionRecord, adapter_id: str, sampler: Sampler
    ) -> SamplingSessionRecord:
        """Publish the weights, write their files, and return the record that the database has for this session.

        If another op has created the session first, its record is returned. Then, as after an error, the version and
        files of this op are removed again.
        """
        version_id, directory = record.sampling_session_id, record.directory
        assert directory is not None, "a version has files"
        most = self.context.tenants.limits(record.tenant_id).max_checkpoint_bytes_per_tenant
        await self._check_space(record.tenant_id, most)

        def publish() -> Callable[[Path], None]:
            """Copy and publish the weights in the compute thread; return a function that writes the files.

            Writing takes far longer than the rest, so it happens in another thread.
            """
            write = self._model.trainer.prepare_save(adapter_id, optimizer=False, synced=False)
            sampler.publish(version_id, adapter_id)
            return write

        write = await self._compute.run(publish)
        made = None
        try:
            async with self._writing.turn(record.tenant_id):
                files = partial(_write_files, write, self.files.root / directory, synced=False)
                size = await self.threads.in_thread(record.tenant_id, files)
            record = replace(record, size_bytes=size)
            made = await self.store.sampling_sessions.create(record, most_bytes=most)
            if isinstance(sampler, TakesFiles) and made.directory == directory:
                await self._compute.run(partial(sampler.version_saved, version_id, str(self.files.root / directory)))
            return made
        finally:
            if made is None or made.directory != directory:
                await self._compute.run(partial(sampler.retire, version_id))
                await self.threads.in_thread(record.tenant_id, partial(self.files.remove, directory))

    async def _load(self, op: Op, run: RunRecord, load: LoadWeights) -> Outcome:
        """Load a checkpoint into the adapter. If the op creates the adapter and the load fails, the adapter is removed
        again.
        """
        path, trainer = CheckpointPath.parse(load.path), self._model.trainer
        directory = await self.readable(path, run, "path", str(path), optimizer=load.optimizer)

        def load_now() -> None:
            if op.kind.creates:
                trainer.create_adapter(op.adapter_id, run.spec)
            try:
                read = partial(trainer.load, op.adapter_id, directory, optimizer=load.optimizer)
                without_server_paths(read, directory, str(path))
                trainer.zero_grad(op.adapter_id)
            except BaseException:
                if op.kind.creates:
                    trainer.remove_adapter(op.adapter_id)
                raise

        await self._compute.run(load_now)
        return responses.loaded(str(path), op.adapter_id)

    async def readable(
        self, path: CheckpointPath, run: RunRecord, field: str, shown: str, *, optimizer: bool = False
    ) -> Path:
        """Return the directory of a checkpoint that the run's tenant may load.

        UnknownCheckpointError: the tenant may not read it. InvalidInputError: it is an exported one (the error names
        ``field``), it is of an adapter and the run trains all parameters or the reverse, or ``optimizer`` is True and
        its kind has no optimizer state. CheckpointError: it is damaged (the error calls it ``shown``).
        """
        record = await loadable_checkpoint(self.store, path, run.tenant_id, field)
        source = await self.store.runs.get(record.run_id)
        if source is not None and (source.lora is None) is not (run.lora is None):
            own = "all parameters, because this run trains them" if run.lora is None else "an adapter, as this run is"
            raise InvalidInputError(field, shown, f"a checkpoint of {own}")
        if optimizer and path.kind != "weights":  # checked before the files are read
            raise InvalidInputError("optimizer", True, f"False: {path} holds no optimizer state")
        directory = self.files.root / record.directory

        def check() -> None:
            try:
                check_files(directory)
            except CheckpointError as error:
                message = str(error).replace(str(directory), shown)
                raise CheckpointError(f"{message}; load another checkpoint") from error

        await self.threads.in_thread(run.tenant_id, check)
        return directory


async def delete_checkpoint(
    store: Store, files: DataDir, threads: FairPool, record: CheckpointRecord, event: str
) -> None:
    """Delete a checkpoint. Its files stay while sampling sessions refer to them.

    ``event``: the name of this deletion in the audit log.
    """
    await store.checkpoints.begin_delete(record, event)
    if not await store.sampling_sessions.refer_to(record.directory):
        await threads.in_thread(record.tenant_id, partial(files.remove, record.directory))
    await store.checkpoints.finish_delete(record)


def _write_files(write: Callable[[Path], None], directory: Path, *, synced: bool = True) -> int:
    """Write a checkpoint's files and their checksums, and return their size in bytes.

    ``synced``: it returns when they are on the disk.

    A write error of the operating system is raised as it is, without the CheckpointError around it: that would be shown
    to the tenant as its own mistake, with the server's directory in the message.
    """
    make_parents(directory)
    try:
        write(directory)
    except CheckpointError as error:
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None
    seal_written(directory, synced=synced)
    return size_of(directory)
