"""Pushing a checkpoint of the server's to a hub: the server does it, and is asked now and then whether it has."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_client.client.json_body import encode
from twinkle_client.client.session import TwinkleClient, parsed
from twinkle_client.errors import ServerError
from twinkle_client.types import UploadStatusResponse, UploadToHubResponse

__all__ = ["Upload"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Upload:
    """``checkpoint_dir``: an address, or what ``save`` returned."""

    checkpoint_dir: str | Mapping[str, Any]
    hub_model_id: str
    hub_token: str | None
    async_upload: bool

    def to_the_end(self, client: TwinkleClient, path: str, poll_interval: float) -> None:
        """``path``: of the model's routes. Raises if the upload fails."""
        url = client.base_url + path
        answer = client.post(f"{path}/upload_to_hub", encode(self._body()), once=True)
        request_id = parsed(UploadToHubResponse, answer, url).request_id
        logger.info("upload of %s to %s has begun", self.checkpoint_dir, self.hub_model_id)
        while True:
            status = parsed(UploadStatusResponse, client.get(f"{path}/upload_status/{request_id}"), url)
            if status.status == "failed":
                raise ServerError(200, f"upload_to_hub failed: {status.error}", url)
            if status.status == "completed":
                return
            time.sleep(poll_interval)

    def _body(self) -> dict[str, Any]:
        checkpoint = self.checkpoint_dir
        return {
            "checkpoint_dir": str(checkpoint) if isinstance(checkpoint, str) else dict(checkpoint),
            "hub_model_id": self.hub_model_id,
            "hub_token": self.hub_token,
            "async_upload": self.async_upload,
        }
