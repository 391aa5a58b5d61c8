"""The journal: appended blobs can be read back, a truncated append does no harm, a full disk changes nothing."""

import errno
import os
import stat
from pathlib import Path

import pytest

from twinkle.server.state.database.journal import Journal
from twinkle.server.state.errors import JournalError, StorageFullError, StoreClosedError
from twinkle.server.types import BlobRef

HEADER = 16  # bytes


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_blobs_are_read_back_and_survive_a_restart(tmp_path):
    blobs = [b"", b"x", b"body" * 1000, bytes(range(256)) * 4000]
    journal = Journal(tmp_path)
    refs = journal.append(blobs[:2]) + journal.append(blobs[2:])
    assert [journal.read(ref) for ref in refs] == blobs
    assert [ref.length for ref in refs] == [len(blob) for blob in blobs]
    journal.close()
    assert [Journal(tmp_path).read(ref) for ref in refs] == blobs


def test_more_blobs_than_one_system_call_takes(tmp_path):
    journal = Journal(tmp_path)
    blobs = [str(number).encode() for number in range(2500)]
    assert [journal.read(ref) for ref in journal.append(blobs)] == blobs


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: real(fd, [parts[0][:5]]))
    journal = Journal(tmp_path)
    first, second = journal.append([b"first", b"second"])
    assert (journal.read(first), journal.read(second)) == (b"first", b"second")


def test_files_are_private(tmp_path):
    directory = tmp_path / "journal"
    Journal(directory).append([b"x"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(directory)] == [0o600]


def test_full_segments_are_closed_and_a_blob_larger_than_a_segment_fits(tmp_path):
    journal = Journal(tmp_path, segment_bytes=100)
    refs = [journal.append([b"x" * size])[0] for size in (40, 40, 500, 10)]
    assert [ref.segment for ref in refs] == [1, 2, 3, 4]
    assert [journal.read(ref) for ref in refs] == [b"x" * size for size in (40, 40, 500, 10)]
    assert journal.segments() == [1, 2, 3, 4]
    assert journal.closed_segments() == [1, 2, 3]


def test_a_restart_begins_a_new_segment_and_an_idle_one_leaves_no_file(tmp_path):
    journal = Journal(tmp_path)
    (old,) = journal.append([b"old"])
    journal.close()
    Journal(tmp_path).close()
    again = Journal(tmp_path)
    (new,) = again.append([b"new"])
    assert (old.segment, new.segment) == (1, 2)
    assert again.segments() == [1, 2]


@pytest.mark.parametrize("kept", [1, HEADER - 1, HEADER, HEADER + 1, HEADER + 99])
def test_an_interrupted_append_is_left_alone(tmp_path, kept):
    journal = Journal(tmp_path)
    (whole,) = journal.append([b"whole"])
    (torn,) = journal.append([b"t" * 100])
    journal.close()
    path = files(tmp_path)[0]
    os.truncate(path, torn.offset + kept)

    reopened = Journal(tmp_path)
    assert reopened.read(whole) == b"whole"
    with pytest.raises(JournalError):
        reopened.read(torn)


def test_damage_is_an_error_and_does_not_hide_what_follows(tmp_path):
    journal = Journal(tmp_path)
    refs = journal.append([b"first", b"second", b"third"])
    journal.close()
    path = files(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[refs[1].offset + HEADER] ^= 1
    content[refs[0].offset] ^= 1
    path.write_bytes(content)

    reopened = Journal(tmp_path)
    assert reopened.read(refs[2]) == b"third"
    for ref in refs[:2]:
        with pytest.raises(JournalError, match="damaged"):
            reopened.read(ref)


def test_a_damaged_length_does_not_cost_what_follows(tmp_path):
    journal = Journal(tmp_path)
    refs = journal.append([b"first", b"second"])
    journal.close()
    path = files(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[refs[0].offset + 12] ^= 1  # in the length field, so the file seems to end in the middle of this blob
    path.write_bytes(content)
    assert Journal(tmp_path).read(refs[1]) == b"second"


def test_a_reference_to_another_place_is_an_error(tmp_path):
    journal = Journal(tmp_path)
    (ref,) = journal.append([b"0123456789"])
    for wrong in (
        BlobRef(ref.segment, ref.offset, 5),
        BlobRef(ref.segment, ref.offset + 1, ref.length),
        BlobRef(ref.segment, 9999, ref.length),
        BlobRef(ref.segment + 1, ref.offset, ref.length),
    ):
        with pytest.raises(JournalError):
            journal.read(wrong)


def test_only_named_segments_are_deleted(tmp_path):
    journal = Journal(tmp_path, segment_bytes=50)
    refs = [journal.append([b"x" * 40])[0] for _ in range(4)]
    journal.delete_segments([1, 3])
    assert journal.segments() == [2, 4]
    assert journal.read(refs[1]) == b"x" * 40
    with pytest.raises(JournalError, match="gone"):
        journal.read(refs[0])
    with pytest.raises(AssertionError):
        journal.delete_segments([4])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("written", [0, 5, HEADER + 3])
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path, monkeypatch, code, written):
    journal = Journal(tmp_path)
    (before,) = journal.append([b"before"])
    size = files(tmp_path)[0].stat().st_size
    real = os.writev

    def full(fd, data):
        raise OSError(code, os.strerror(code))

    def nearly_full(fd, parts):
        return real(fd, [b"".join(parts)[:written]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", nearly_full if written else full)
        patch.setattr(os, "write", full)
        with pytest.raises(StorageFullError) as caught:
            journal.append([b"one", b"two"])
        assert caught.value.errno == code
        assert files(tmp_path)[0].stat().st_size == size

    (after,) = journal.append([b"after"])
    assert (journal.read(before), journal.read(after)) == (b"before", b"after")


def test_a_disk_too_full_for_a_new_segment(tmp_path, monkeypatch):
    journal = Journal(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(StorageFullError):
            journal.append([b"x"])
    (ref,) = journal.append([b"y"])
    assert (ref.segment, journal.read(ref)) == (1, b"y")


def test_if_a_failed_append_cannot_be_taken_back_its_segment_is_left(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append([b"before"])
    real = os.writev

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda fd, parts: real(fd, [parts[0]]))
        patch.setattr(os, "write", fail)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match="broken"):
            journal.append([b"lost"])
    (after,) = journal.append([b"after"])
    assert (after.segment, journal.read(after)) == (2, b"after")


def test_a_reader_changes_nothing(tmp_path):
    journal = Journal(tmp_path)
    (ref,) = journal.append([b"blob"])
    with files(tmp_path)[0].open("ab") as file:
        file.write(b"TWJ1")  # as if a writer were in the middle of an append
    reader = Journal(tmp_path, writable=False)
    assert reader.read(ref) == b"blob"
    assert files(tmp_path)[0].read_bytes().endswith(b"TWJ1")
    for forbidden in (lambda: reader.append([b"x"]), reader.closed_segments, lambda: reader.delete_segments([1])):
        with pytest.raises(StoreClosedError):
            forbidden()
