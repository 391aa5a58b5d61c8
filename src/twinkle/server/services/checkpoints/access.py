"""Which tenant may read a checkpoint, and the names of checkpoints and their kinds in listings, samplers and errors."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from twinkle.errors import CheckpointError, InvalidInputError, UnknownCheckpointError, UserError
from twinkle.server.ids import CheckpointPath
from twinkle.server.state.store import Store
from twinkle.server.types import CheckpointKind, CheckpointRecord

T = TypeVar("T")

# The names of the kinds in listings.
LISTED_KINDS: Mapping[CheckpointKind, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


async def readable_checkpoint(store: Store, path: CheckpointPath, tenant_id: str) -> CheckpointRecord:
    """Return the record of a checkpoint that the tenant may read: its own, or a public one.

    UnknownCheckpointError: the checkpoint does not exist, has expired, or is another tenant's and not public.
    """
    record = await store.checkpoints.get(path.run_id, path.kind, path.name)
    if record is None or not (record.public or record.tenant_id == tenant_id) or expired(record):
        raise UnknownCheckpointError(path.as_sent)
    return record


async def loadable_checkpoint(
    store: Store, path: CheckpointPath, tenant_id: str, field: str = "path"
) -> CheckpointRecord:
    """Return the record of a checkpoint that the tenant may read and the server can load.

    Raise InvalidInputError, which names ``field``, for an exported checkpoint: its files are written for other tools.
    """
    record = await readable_checkpoint(store, path, tenant_id)
    if record.kind == "external_weights":
        raise InvalidInputError(field, str(path), "a checkpoint of kind weights or sampler_weights")
    return record


def version_of(record: CheckpointRecord) -> str:
    """Return the version id of a checkpoint's weights. It contains the request id of the save, because a checkpoint's
    name may be used again for other weights, while a version never changes.
    """
    return f"{CheckpointPath(record.run_id, record.kind, record.name)}@{record.request_id}"


def without_server_paths(work: Callable[[], T], directory: Path, path: str) -> T:
    """Run ``work``. A UserError whose message has the server's ``directory`` becomes a CheckpointError with ``path`` in
    its place.
    """
    try:
        return work()
    except UserError as error:
        if str(directory) not in str(error):
            raise
        raise CheckpointError(str(error).replace(str(directory), path)) from error


def expired(record: CheckpointRecord) -> bool:
    return record.expires_at is not None and record.expires_at <= time.time()
