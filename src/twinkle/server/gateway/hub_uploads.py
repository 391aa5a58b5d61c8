"""Uploads of checkpoints to a hub, which run in the background."""

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from twinkle.errors import NotFoundError, QuotaError, TwinkleError, UnknownCheckpointError
from twinkle.server.tenancy.work_pools import FairPool
from twinkle_client.protocol.verbs import UploadStatusResponse

logger = logging.getLogger(__name__)

_REMEMBERED = 1024  # uploads of all tenants; beyond that the oldest is forgotten, once it is done
_MESSAGE = 1000  # characters of an error message
_UNFINISHED = 4  # uploads of one tenant that run or wait for a thread


@dataclass
class _Upload:
    tenant_id: str
    key: str | None
    directory: Path
    address: str
    task: asyncio.Task[str]

    def message_for_tenant(self, error: BaseException) -> str:
        """Return the error's text, with the checkpoint's address in place of its directory, cut to 1000 characters.

        Of an error that is not a TwinkleError, the text shows only the name of its type.
        """
        if not isinstance(error, TwinkleError):
            return f"the upload failed ({type(error).__name__}); try again, or ask the operator of the server"
        text = str(error)
        for place in (self.directory, self.directory.resolve()):
            text = text.replace(str(place), self.address)
        return text[:_MESSAGE]


class HubUploads:
    """The uploads of all tenants. They are in memory only: a restart forgets them.

    If there are more than 1024, the oldest are forgotten, too, once they are done.
    """

    def __init__(self, threads: FairPool) -> None:
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        self._threads = threads

    def start(
        self, tenant_id: str, key: str | None, directory: Path, address: str, repo_id: str, token: str | None
    ) -> str:
        """Start an upload and return its id. QuotaError if the tenant has too many uploads that are not done.

        ``key``: an idempotency key; if the tenant has an upload with this key, its id is returned and none is started.
        ``address``: the checkpoint's path as the tenant knows it, which replaces the directory in messages.
        """
        own = {name: upload for name, upload in self._uploads.items() if upload.tenant_id == tenant_id}
        for name, upload in own.items():
            if key is not None and upload.key == key:
                return name
        running = sum(not upload.task.done() for upload in own.values())
        if running >= _UNFINISHED:
            raise QuotaError("uploads at once", running, _UNFINISHED, "hub_uploads_per_tenant")
        request_id = f"upload_{secrets.token_hex(8)}"
        push = partial(_push, repo_id, directory, address, token)
        task = asyncio.create_task(self._threads.in_thread(tenant_id, push))
        self._uploads[request_id] = _Upload(tenant_id, key, directory, address, task)
        while len(self._uploads) > _REMEMBERED and next(iter(self._uploads.values())).task.done():
            self._uploads.popitem(last=False)
        return request_id

    def status(self, tenant_id: str, request_id: str) -> UploadStatusResponse:
        upload = self._uploads.get(request_id)
        if upload is None or upload.tenant_id != tenant_id:
            raise NotFoundError("upload", request_id)
        if not upload.task.done():
            return UploadStatusResponse(request_id=request_id, status="running")
        error = upload.task.exception()
        if error is None:
            return UploadStatusResponse(request_id=request_id, status="completed")
        if not isinstance(error, TwinkleError):
            logger.error("upload %s failed", request_id, exc_info=error)
        return UploadStatusResponse(request_id=request_id, status="failed", error=upload.message_for_tenant(error))


def _push(repo_id: str, directory: Path, address: str, token: str | None) -> str:
    from twinkle.hub import HubOperation

    if not directory.is_dir():
        raise UnknownCheckpointError(address)  # deleted while the upload waited for a thread
    return HubOperation.push_to_hub(repo_id, str(directory), token=token, private=True)
