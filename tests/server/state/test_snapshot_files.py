"""Snapshots and copies, with all their parent directories, are on disk before what they replace may be deleted."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.servers.recorded_disk import Disk
from twinkle.errors import CheckpointError
from twinkle.model.types import AdapterSnapshot, LoraSpec
from twinkle.server.state.files import data_dir as files
from twinkle.server.state.files.data_dir import DataDir, copy_whole, read_snapshot, write_snapshot

SNAPSHOT = AdapterSnapshot(
    spec=LoraSpec(8),
    step=3,
    layout="digest",
    weights=np.arange(4, dtype=np.float32),
    exp_avg=np.ones(4, np.float32),
    exp_avg_sq=np.zeros(4, np.float32),
    gradient=np.full(4, 0.5, np.float32),
)
FILES = {"checksums.json", "weights.npy", "exp_avg.npy", "exp_avg_sq.npy", "gradient.npy", "meta.json", "native.pt"}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_snapshot_is_on_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    directory = DataDir(tmp_path).snapshot("s:train:0", 7)
    write_snapshot(directory, SNAPSHOT, b"state")
    before = disk.flushed(before=True)
    assert {path.name for path in before[:-1]} == FILES
    assert before[-1] == before[0].parent  # the directory is flushed after its files
    # Also the path to it: every new directory, and the existing one that contains it.
    assert disk.flushed(before=False) == [directory.parent, tmp_path / "snapshots", tmp_path]
    assert {path.name for path in directory.iterdir()} == FILES
    np.testing.assert_array_equal(read_snapshot(directory).weights, SNAPSHOT.weights)


def test_the_second_one_of_a_run_flushes_what_it_changed(tmp_path: Path, disk: Disk) -> None:
    data = DataDir(tmp_path)
    write_snapshot(data.snapshot("s:train:0", 7), SNAPSHOT, None)
    disk.events.clear()
    second = data.snapshot("s:train:0", 8)
    write_snapshot(second, SNAPSHOT, None)
    assert disk.flushed(before=False) == [second.parent]


def test_a_snapshot_that_cannot_be_flushed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    directory = DataDir(tmp_path).snapshot("s:train:0", 7)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        write_snapshot(directory, SNAPSHOT, None)
    assert list(directory.parent.iterdir()) == []
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_snapshot(directory)


def test_a_copy_is_on_disk_with_all_that_is_in_it(tmp_path: Path, disk: Disk) -> None:
    source, target = tmp_path / "source", tmp_path / "run" / "weights" / "copy"
    (source / "more").mkdir(parents=True)
    (source / "adapter").write_bytes(b"1")
    (source / "more" / "file").write_bytes(b"2")
    copy_whole(source, target)
    assert {path.name for path in disk.flushed(before=True)[:-1]} == {"adapter", "more", "file", "checksums.json"}
    assert disk.flushed(before=False) == [target.parent, tmp_path / "run", tmp_path]
    assert (target / "more" / "file").read_bytes() == b"2"


def test_a_copy_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error's own number: a missing source is a different error than a full disk."""
    with pytest.raises(FileNotFoundError):
        copy_whole(tmp_path / "gone", tmp_path / "copy")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "adapter").write_bytes(b"1")

    def full(_source: str, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.shutil, "copy2", full)
    with pytest.raises(OSError, match="No space") as error:
        copy_whole(tmp_path / "source", tmp_path / "copy")
    assert error.value.errno == 28
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
