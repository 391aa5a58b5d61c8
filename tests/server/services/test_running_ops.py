"""Which ops ran when a process died: the notes on disk, and which op is blamed."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest

from twinkle.server.services.running_ops import RunningOps


def died_in(path: Path, *batches: list[str], ended: int = 0, told_to_end: bool = False) -> None:
    """Write the notes of a process that ran batches and died; the first ``ended`` batches had finished."""

    async def work() -> tuple[RunningOps, bytes]:
        running = RunningOps(path)
        for number, batch in enumerate(batches):
            block = running.noted(batch)
            await block.__aenter__()
            if number < ended:
                await block.__aexit__(None, None, None)
        if told_to_end:
            await running.stopping()
        written(running)
        return running, path.read_bytes()

    running, left = asyncio.run(work())
    written(running)
    path.write_bytes(left)  # restores them: the loop's orderly end has also ended the batches


def written(running: RunningOps) -> None:
    """Wait for the writing thread."""
    running._writer.submit(lambda: None).result()


def deaths(path: Path, *request_ids: str) -> list[int]:
    async def work() -> list[int]:
        running = RunningOps(path)
        return [running.deaths(each) for each in request_ids]

    return asyncio.run(work())


def test_only_what_ran_is_suspected(tmp_path):
    path = tmp_path / "running" / "mock"
    died_in(path, ["a:1", "b:1"], ["a:2", "b:2"], ended=1)
    assert deaths(path, "a:1", "b:1", "a:2", "b:2") == [0, 0, 1, 1]


def test_the_second_death_names_the_culprit_alone(tmp_path):
    path = tmp_path / "mock"
    died_in(path, ["a:1", "b:1"])
    died_in(path, ["a:1"], ["b:1"], ended=1)  # suspected ops run one after another
    assert deaths(path, "a:1", "b:1") == [0, 2]


def test_who_was_told_to_end_died_of_nothing(tmp_path):
    path = tmp_path / "mock"
    died_in(path, ["a:1"], told_to_end=True)
    assert deaths(path, "a:1") == [0]


def test_a_line_that_was_cut_short_is_a_batch_that_never_began(tmp_path):
    path = tmp_path / "mock"
    path.write_text("d c:1 1\n+ 1 a:1\n- 1\n+ 2 b:1 b:")
    assert deaths(path, "a:1", "b:1", "c:1") == [0, 0, 1]


def test_decoding_leaves_a_suspect(tmp_path):
    path = tmp_path / "mock"
    died_in(path, ["a:1"])

    async def work() -> None:
        running = RunningOps(path)
        async with running.noted(["a:1"], decoding=True):
            pass
        assert running.deaths("a:1") == 1

    asyncio.run(work())
    assert deaths(path, "a:1") == [1]


def test_suspects_are_alone_in_a_batch(tmp_path):
    path = tmp_path / "mock"
    died_in(path, ["b:1", "b:2"])

    async def work() -> list[list[str]]:
        batch = ["a:1", "b:1", "b:2", "c:1", "c:2"]
        return [batch[part] for part in RunningOps(path).apart(batch)]

    assert asyncio.run(work()) == [["a:1"], ["b:1"], ["b:2"], ["c:1", "c:2"]]


def test_the_file_stays_small(tmp_path):
    path = tmp_path / "mock"

    async def work() -> None:
        running = RunningOps(path)
        async with running.noted(["slow:1"]):
            for number in range(20_000):
                async with running.noted([f"a-rather-long-name-of-an-adapter:train:0:{number}"] * 4):
                    pass
            written(running)
            assert path.stat().st_size < 2**21
        await running.close()

    asyncio.run(work())
    assert path.stat().st_size == 0


def test_a_slow_disk_stops_no_other_work(tmp_path, monkeypatch):
    """A batch waits for the line that it begins with, or its compute thread does. The event loop goes on, and so do
    batches that end.
    """
    path, disk = tmp_path / "mock", threading.Event()
    write, seen = os.write, []

    def slow(fd: int, data: bytes) -> int:
        assert disk.wait(60)
        return write(fd, data)

    async def batch(running: RunningOps, name: str) -> None:
        async with running.noted([name]):
            seen.append((name, path.read_text()))

    async def work() -> None:
        running = RunningOps(path)
        async with running.noted(["first:1"]):
            monkeypatch.setattr(os, "write", slow)
        waiting = asyncio.create_task(batch(running, "second:1"))
        async with running.noted(["in the compute thread:1"], waits=False) as line:
            await asyncio.sleep(0.05)
            assert seen == []
            assert not line.done()
            disk.set()
            await asyncio.to_thread(line.result, 60)
        await waiting
        await running.close()
        await running.close()
        async with running.noted(["third:1"]):  # nothing is written any more
            pass

    asyncio.run(work())
    assert [name for name, _ in seen] == ["second:1"]
    assert "+ 3 second:1\n" in seen[0][1]
    assert path.read_bytes() == b""


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_batch_that_is_given_up_before_it_began_neither_adds_a_death_nor_forgives_one(earlier, tmp_path, monkeypatch):
    path, disk = tmp_path / "mock", threading.Event()
    write = os.write
    if earlier:
        died_in(path, ["a:1"])

    async def work() -> bytes:
        running = RunningOps(path)
        monkeypatch.setattr(os, "write", lambda fd, data: disk.wait(60) and write(fd, data))
        block = running.noted(["a:1"])
        entering = asyncio.create_task(block.__aenter__())
        await asyncio.sleep(0.05)
        entering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await entering
        assert running.deaths("a:1") == earlier
        disk.set()
        written(running)
        return path.read_bytes()

    path.write_bytes(asyncio.run(work()))
    assert deaths(path, "a:1") == [earlier]
