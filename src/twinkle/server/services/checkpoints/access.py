"""Who may read which checkpoint, and what a checkpoint is called where."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from twinkle.errors import CheckpointError, InvalidInputError, UnknownCheckpointError, UserError
from twinkle.server.ids import CheckpointPath
from twinkle.server.state.store import Store
from twinkle.server.types import CheckpointKind, CheckpointRecord

T = TypeVar("T")

# What listings call a kind.
LISTED_KINDS: Mapping[CheckpointKind, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


async def readable_checkpoint(store: Store, path: CheckpointPath, tenant_id: str) -> CheckpointRecord:
    """Another tenant's checkpoint answers exactly like one that does not exist, unless it is public."""
    record = await store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or not (record.public or record.tenant_id == tenant_id) or expired(record):
        raise UnknownCheckpointError(str(path))
    return record


async def loadable_checkpoint(
    store: Store, path: CheckpointPath, tenant_id: str, field: str = "path"
) -> CheckpointRecord:
    """The same, of files that are ours to read again: those of exported ones are written for others."""
    record = await readable_checkpoint(store, path, tenant_id)
    if record.kind == "external_weights":
        raise InvalidInputError(field, str(path), "a checkpoint of kind weights or sampler_weights")
    return record


def version_of(record: CheckpointRecord) -> str:
    """What a sampler calls these weights: a checkpoint's name may be used again, a version never changes."""
    return f"{CheckpointPath(record.run_id, record.kind, record.name)}@{record.request_id}"


def without_server_paths(work: Callable[[], T], directory: Path, path: str) -> T:
    """Errors about files name the tenant's address of them, not ours."""
    try:
        return work()
    except UserError as error:
        if str(directory) not in str(error):
            raise
        raise CheckpointError(str(error).replace(str(directory), path)) from error


def expired(record: CheckpointRecord) -> bool:
    return record.expires_at is not None and record.expires_at <= time.time()
