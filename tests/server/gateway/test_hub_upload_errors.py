"""The errors of a failed upload: they say whose mistake it was and reveal nothing of the server's directories."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from twinkle.errors import UploadError
from twinkle.hub import HubOperation
from twinkle.server.gateway.hub_uploads import HubUploads
from twinkle.server.tenancy.work_pools import WorkPools

ADDRESS = "twinkle://s-1/weights/ck"


def told(directory: Path) -> str:
    async def scenario() -> str:
        uploads = HubUploads(WorkPools().hub)
        request_id = uploads.start("t", None, directory, ADDRESS, "hf://org/name", "token")
        while (status := uploads.status("t", request_id)).status == "running":
            await asyncio.sleep(0.01)
        assert status.status == "failed"
        assert status.error is not None
        return status.error

    return asyncio.run(scenario())


def test_a_checkpoint_that_was_deleted_while_it_waited(tmp_path: Path) -> None:
    error = told(tmp_path / "checkpoints" / "gone")
    assert ADDRESS in error
    assert str(tmp_path) not in error


def raising(error: Callable[[Path], Exception], directory: Path) -> Callable[..., str]:
    def push(*_arguments: object, **_options: object) -> str:
        raise error(directory)

    return push


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            lambda place: UploadError(f"cannot upload to hf://org/name: OSError: {place}/x is gone"),
            f"{ADDRESS}/x is gone",
        ),
        (lambda place: UploadError("cannot upload to hf://org/name: 401"), "401"),
        (lambda place: PermissionError(13, "Permission denied", str(place)), "the upload failed (PermissionError)"),
        (lambda place: RuntimeError(f"{place.parent}/cache"), "the upload failed (RuntimeError)"),
    ],
)
def test_errors_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[Path], Exception], said: str
) -> None:
    directory = tmp_path / "ck"
    directory.mkdir()
    monkeypatch.setattr(HubOperation, "push_to_hub", raising(error, directory))
    message = told(directory)
    assert said in message
    assert str(tmp_path) not in message


def test_a_data_directory_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library may name the directory behind the link."""
    (tmp_path / "disk" / "ck").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(
        HubOperation, "push_to_hub", raising(lambda place: UploadError(str(place)), tmp_path / "disk" / "ck")
    )
    assert told(tmp_path / "data" / "ck") == ADDRESS
