"""The record of the process that serves a data directory, and that there is only one at a time."""

from pathlib import Path

import pytest

from twinkle.server.runtime.process import ServerProcess, recorded, running
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.files.guards import DirectoryLock


def test_another_server_is_refused_before_it_does_anything(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    with recorded(directory) as record:
        here = running(directory)
        assert here is not None
        assert here.url is None
        with pytest.raises(DataDirInUseError, match="in use by another server"), recorded(directory):
            raise AssertionError("never reached")
        record("http://127.0.0.1:1")
        assert running(directory) == ServerProcess(here.pid, "http://127.0.0.1:1")
    assert running(directory) is None
    with recorded(directory):
        assert running(directory) is not None


def test_a_name_has_one_process(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path, name="lock.model-0")
    DirectoryLock(tmp_path, name="lock.model-1").release()
    with pytest.raises(DataDirInUseError):
        DirectoryLock(tmp_path, name="lock.model-0", wait_seconds=0.1)
    first.release()
    DirectoryLock(tmp_path, name="lock.model-0").release()
