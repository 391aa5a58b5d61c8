"""From where an adapter is brought back after a restart: from its snapshot, or from its creation on."""

import asyncio
import logging
import time

from twinkle.errors import CheckpointError
from twinkle.server.state.errors import Damage, DamagedRecordError, JournalError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord, SnapshotRecord

logger = logging.getLogger(__name__)


async def usable_snapshot(store: Store, files: DataDir, run: RunRecord) -> SnapshotRecord | None:
    """Return the snapshot to begin at; None: the journal has everything since the adapter was created.

    A snapshot is read, and so checked, when its adapter is first used. It is checked here only where the journal could
    take its place: of a young adapter. DamagedRecordError: there is neither.
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
        await store.damage.note(damage)
        # As long as its record covers them, the bodies of its ops would be taken for needless and deleted.
        await store.snapshots.delete(run.run_id)
        return None
    return snapshot


async def _check_journal(store: Store, run: RunRecord, snapshot: CheckpointError) -> None:
    """Raise DamagedRecordError if the journal does not reach back to the adapter's creation.

    Rows of ops outlive their bodies, which go with the oldest segment files once a snapshot covers them.
    """
    creation = await store.ops.get(run.run_id, 0)
    try:
        if creation is not None:
            await store.ops.body(creation)
            return
    except JournalError:
        pass  # it is gone, which is no damage: the snapshot was to be enough
    raise DamagedRecordError("its snapshot on the server's disk is damaged") from snapshot
