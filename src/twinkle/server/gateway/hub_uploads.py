"""Checkpoints that are being pushed to a hub, each in the background."""

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

_REMEMBERED = 1024
_MESSAGE = 1000  # characters
_UNFINISHED = 4  # of one tenant: those that run and those that wait for a thread


@dataclass
class _Upload:
    tenant_id: str
    key: str | None
    directory: Path
    address: str
    task: asyncio.Task[str]

    def said(self, error: BaseException) -> str:
        """What its tenant is told. Where our files lie is not its business, and who knows what others' errors say."""
        if not isinstance(error, TwinkleError):
            return f"the upload failed ({type(error).__name__}); try again, or ask whoever runs the server"
        text = str(error)
        for place in (self.directory, self.directory.resolve()):
            text = text.replace(str(place), self.address)
        return text[:_MESSAGE]


class Uploads:
    """The uploads of all tenants, as long as the process lives."""

    def __init__(self, threads: FairPool) -> None:
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        self._threads = threads

    def start(
        self, tenant_id: str, key: str | None, directory: Path, address: str, repo_id: str, token: str | None
    ) -> str:
        """Returns its id. ``key``: the same upload asked for again. ``address``: the tenant's of the directory."""
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
        return UploadStatusResponse(request_id=request_id, status="failed", error=upload.said(error))


def _push(repo_id: str, directory: Path, address: str, token: str | None) -> str:
    from twinkle.hub import HubOperation

    if not directory.is_dir():
        raise UnknownCheckpointError(address)  # deleted while this waited
    return HubOperation.push_to_hub(repo_id, str(directory), token=token, private=True)
