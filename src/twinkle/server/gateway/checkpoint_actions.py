"""Deleting a checkpoint, changing its expiry and making it public, for its owner; and deleting expired ones."""

import time
from functools import partial

from twinkle.errors import NotFoundError
from twinkle.server.ids import CheckpointPath
from twinkle.server.services.checkpoints.access import expired
from twinkle.server.services.checkpoints.save_and_load import delete_checkpoint
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import CheckpointRecord


class CheckpointActions:
    """The owner's operations on checkpoints, and the deletion of expired checkpoints by maintenance.

    For the owner's operations, another tenant's checkpoint, public or not, raises the same NotFoundError as one that
    does not exist.
    """

    def __init__(self, store: Store, files: DataDir, threads: FairPool) -> None:
        self._store = store
        self._files = files
        self._threads = threads

    async def delete(self, path: CheckpointPath, tenant_id: str) -> None:
        await self._delete(await self._own(path, tenant_id, even_expired=True), "checkpoint_delete")

    async def delete_expired(self, now: float) -> None:
        for record in await self._store.checkpoints.expired(now):
            await self._delete(record, "checkpoint_expire")

    async def _delete(self, record: CheckpointRecord, event: str) -> None:
        await delete_checkpoint(self._store, self._files, self._threads, record, event)
        run = await self._store.runs.get(record.run_id)
        if run is not None and run.state != "live":  # the run saves no more checkpoints to this directory
            await self._threads.in_thread(record.tenant_id, partial(self._files.remove_empty, record.directory))

    async def set_ttl(self, path: CheckpointPath, tenant_id: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire ``ttl_seconds`` from now; None: it never expires."""
        await self._own(path, tenant_id)
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds
        if not await self._store.checkpoints.set_expiry(path.run_id, path.kind, path.name, expires_at):
            raise NotFoundError("checkpoint", str(path))

    async def set_public(self, path: CheckpointPath, tenant_id: str, public: bool) -> None:
        """Let every tenant of this server read a checkpoint, or only its owner. Nothing is uploaded anywhere."""
        await self._own(path, tenant_id)
        if not await self._store.checkpoints.set_public(path.run_id, path.kind, path.name, public):
            raise NotFoundError("checkpoint", str(path))

    async def _own(self, path: CheckpointPath, tenant_id: str, *, even_expired: bool = False) -> CheckpointRecord:
        """Return a checkpoint of the tenant; NotFoundError for others, and for expired ones unless ``even_expired``."""
        record = await self._store.checkpoints.get(path.run_id, path.kind, path.name)
        if record is None or record.tenant_id != tenant_id or (expired(record) and not even_expired):
            raise NotFoundError("checkpoint", str(path))
        return record
