"""Several processes of one server share a state: the shared lock, one journal for each writer, leases."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.servers.state_samples import begin, op, run, with_store
from twinkle.server.state.database.journal import Journal, JournalWriters
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.files.guards import DirectoryLock
from twinkle.server.state.records.coordination import Claim
from twinkle.server.state.store import Store
from twinkle.server.types import Encoding, Outcome

CHILD = """
import sys, time
from pathlib import Path
from twinkle.server.state.database.journal import Journal
from twinkle.server.state.database.journal import JournalWriters
writers = JournalWriters(Path(sys.argv[1]) / "writers")
journal = Journal(Path(sys.argv[1]) / "bodies", 100, writers=writers)
journal.append([b"theirs"])
print(writers.own, flush=True)
time.sleep(60)
"""


def test_members_share_what_a_server_has_alone(tmp_path):
    async def work() -> None:
        await (await Store.open(tmp_path)).close()
        one = await Store.open(tmp_path, shared=True)
        two = await Store.open(tmp_path, shared=True)
        with pytest.raises(DataDirInUseError):
            await Store.open(tmp_path)
        await one.close()
        with pytest.raises(DataDirInUseError):
            await Store.open(tmp_path)
        await two.close()
        await (await Store.open(tmp_path)).close()

    asyncio.run(work())


def test_a_server_alone_keeps_members_out(tmp_path):
    alone = DirectoryLock(tmp_path)
    with pytest.raises(DataDirInUseError):
        DirectoryLock(tmp_path, shared=True)
    alone.release()
    DirectoryLock(tmp_path, shared=True).release()


def test_each_member_reads_what_any_has_journalled(tmp_path):
    with_store(tmp_path, begin)

    async def work() -> None:
        one = await Store.open(tmp_path, shared=True)
        two = await Store.open(tmp_path, shared=True)
        for store, seq in ((one, 2), (two, 3)):
            mine = op(seq)
            await store.ops.accept(mine, mine.digest, 1.0)
            outcome = Outcome(Encoding.JSON, f"{seq}".encode())
            await store.ops.record_outcomes([(mine.adapter_id, seq, outcome)], 2.0)
        for store in (one, two):
            found = await store.ops.since(run(1).run_id, 1)
            assert [record.seq for record in found] == [2, 3]
            assert [await store.ops.body(record) for record in found] == [op(2).body, op(3).body]
            outcomes = [await store.ops.outcome(run(1).run_id, seq) for seq in (2, 3)]
            assert [outcome.body for outcome in outcomes if outcome] == [b"2", b"3"]
        await one.close()
        await two.close()
        alone = await Store.open(tmp_path)  # a single process finds all of it
        assert (await alone.ops.outcome(run(1).run_id, 3)) is not None
        await alone.close()

    asyncio.run(work())


def test_segments_of_a_living_writer_stay_and_those_of_a_dead_one_may_go(tmp_path: Path):
    ours = JournalWriters(tmp_path / "writers")
    journal = Journal(tmp_path / "bodies", 100, writers=ours)
    (mine,) = journal.append([b"ours"])
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    theirs = int(child.stdout.readline())
    assert theirs != ours.own
    assert not ours.is_dead(theirs)
    assert len(journal.segments()) == 2
    assert journal.closed_segments() == []
    child.kill()
    child.wait()
    assert ours.is_dead(theirs)
    (closed,) = journal.closed_segments()
    assert closed != mine.segment
    journal.delete_segments([closed])
    ours.forget_dead(journal.writers_left())
    assert [path.stem for path in (tmp_path / "writers").iterdir()] == [f"{ours.own:08d}"]
    assert journal.read(mine) == b"ours"


def test_writers_never_share_a_number(tmp_path: Path):
    made = [JournalWriters(tmp_path / "writers") for _ in range(5)]
    assert len({each.own for each in made}) == 5
    assert 0 not in {each.own for each in made}
    highest = max(each.own for each in made)
    for each in made:
        each.close()
    assert JournalWriters(tmp_path / "writers").own > highest


def test_leases(tmp_path):
    async def work(store: Store) -> None:
        now = time.time()
        assert await store.leases.claim("house", "a", now, 10) is Claim.TAKEN
        assert await store.leases.claim("house", "b", now + 1, 10) is Claim.REFUSED
        assert await store.leases.claim("other", "b", now + 1, 10) is Claim.TAKEN
        assert await store.leases.claim("house", "a", now + 5, 10) is Claim.RENEWED
        assert await store.leases.claim("house", "b", now + 14, 10) is Claim.REFUSED
        # late, but no other process took it
        assert await store.leases.claim("house", "a", now + 16, 10) is Claim.RENEWED
        assert await store.leases.claim("house", "b", now + 27, 10) is Claim.TAKEN
        await store.leases.give_up("house", "a")  # not the holder
        assert await store.leases.claim("house", "a", now + 28, 10) is Claim.REFUSED
        await store.leases.give_up("house", "b")
        assert await store.leases.claim("house", "a", now + 28, 10) is Claim.TAKEN

    with_store(tmp_path, work)
