"""Ops: acceptance, outcomes, replay, pruning."""

import asyncio
import errno
import os
from dataclasses import replace

import pytest

from tests.support.servers.state_samples import (
    accept,
    begin,
    digest,
    integrity_error,
    op,
    opened,
    run,
    session,
    with_store,
)
from twinkle.server.state.errors import JournalError, StorageFullError, StoreClosedError
from twinkle.server.state.store import Store
from twinkle.server.types import Encoding, OpKind, Outcome, SnapshotRecord

ADAPTER = "s1:train:1"

pytestmark = pytest.mark.usefixtures("backend")


def done(body: bytes = b"{}") -> Outcome:
    return Outcome(Encoding.JSON, body)


def test_an_op_its_body_and_its_outcome_come_back_also_after_reopening(tmp_path):
    body = os.urandom(100_000)
    outcome = Outcome(Encoding.PROTOBUF, os.urandom(50_000))

    async def write(store: Store):
        await begin(store)
        accepted = await accept(store, op(1, body, kind=OpKind.FORWARD_BACKWARD), now=123.0)
        assert accepted.created
        record = accepted.record
        assert (record.kind, record.digest, record.accepted_at) == (OpKind.FORWARD_BACKWARD, digest(body), 123.0)
        assert (record.outcome, record.encoding, record.failed) == (None, None, False)
        assert await store.ops.get(ADAPTER, 1) == record
        assert await store.ops.outcome(ADAPTER, 1) is None
        await accept(store, op(2))
        await store.ops.record_outcomes([(ADAPTER, 1, outcome), (ADAPTER, 2, Outcome.failure("no", "user"))], now=124.0)
        await check(store)

    async def check(store: Store):
        record = await store.ops.get(ADAPTER, 1)
        assert await store.ops.body(record) == body
        assert await store.ops.outcome(ADAPTER, 1) == outcome
        assert await store.ops.outcome(ADAPTER, 2) == Outcome.failure("no", "user")
        assert (record.encoding, record.failed) == (Encoding.PROTOBUF, False)
        assert (await store.ops.get(ADAPTER, 2)).failed

    with_store(tmp_path, write)
    with_store(tmp_path, check)


def test_a_number_is_accepted_once(tmp_path):
    async def check(store: Store):
        await begin(store)
        first = await accept(store, op(1, b"first"))
        again = await accept(store, op(1, b"first"), now=200.0)
        other = await accept(store, op(1, b"other"))
        assert (again.created, again.record) == (False, first.record)
        assert (other.created, other.record.digest) == (False, digest(b"first"))
        assert await store.ops.body(other.record) == b"first"
        at_once = await asyncio.gather(*(accept(store, op(2, str(n).encode())) for n in range(50)))
        assert [accepted.created for accepted in at_once] == [True] + [False] * 49
        assert {accepted.record.digest for accepted in at_once} == {digest(b"0")}

    with_store(tmp_path, check)


def test_a_run_and_its_first_op_are_accepted_together_and_once(tmp_path):
    create = op(0, b"create", kind=OpKind.CREATE)

    async def check(store: Store):
        with pytest.raises(integrity_error(), match=r"(?i)foreign key"):
            await store.ops.accept_run(run(1), create, digest(b"create"), 1.0)
        assert await store.ops.get(ADAPTER, 0) is None
        await store.sessions.create(session())
        first = await store.ops.accept_run(run(1), create, digest(b"create"), 1.0)
        assert (first.created, first.run) == (True, run(1))
        assert await store.ops.get(ADAPTER, 0) == first.record
        again = await store.ops.accept_run(run(1, note="again"), create, digest(b"create"), 2.0)
        assert (again.created, again.run, again.record) == (False, first.run, first.record)
        await store.snapshots.set(SnapshotRecord(ADAPTER, 0, "d", None, 3.0))
        await store.ops.record_outcomes([(ADAPTER, 0, done())], now=2.0)
        await store.ops.prune(100.0, delivered_seconds=10.0, finished_seconds=10.0)
        pruned = await store.ops.accept_run(run(1), create, digest(b"create"), 200.0)
        assert (pruned.created, pruned.run, pruned.record) == (False, first.run, None)

    with_store(tmp_path, check)


def test_the_first_outcome_stands(tmp_path):
    async def check(store: Store):
        await begin(store)
        await accept(store, op(1))
        await store.ops.record_outcomes([(ADAPTER, 1, done(b"first"))], now=1.0)
        await store.ops.record_outcomes([(ADAPTER, 1, done(b"second")), (ADAPTER, 99, done())], now=2.0)
        assert await store.ops.outcome(ADAPTER, 1) == done(b"first")
        assert await store.ops.get(ADAPTER, 99) is None

    with_store(tmp_path, check)


def test_ops_since_a_number_are_in_sequence_order(tmp_path):
    async def check(store: Store):
        await begin(store, 1, 2)
        for seq in (9, 10, 2, 1, 8):
            await accept(store, op(seq))
        await accept(store, op(7, adapter_id="s1:train:2"))
        assert [record.seq for record in await store.ops.since(ADAPTER, 1)] == [2, 8, 9, 10]
        assert await store.ops.since(ADAPTER, 10) == ()

    with_store(tmp_path, check)


async def _five_ops(store: Store) -> None:
    """Add five ops: all finished at 100, the first two delivered at 200; a snapshot covers the first four."""
    await begin(store)
    for seq in range(1, 6):
        await accept(store, op(seq, bytes([seq]) * 100))
    await store.ops.record_outcomes([(ADAPTER, seq, done(bytes([seq]) * 100)) for seq in range(1, 6)], now=100.0)
    await store.ops.mark_delivered([(ADAPTER, 1), (ADAPTER, 2)], now=200.0)
    await store.ops.mark_delivered([(ADAPTER, 1)], now=290.0)
    await store.snapshots.set(SnapshotRecord(ADAPTER, 4, "d", None, 150.0))


def test_pruning_drops_what_is_covered_and_delivered_or_old(tmp_path):
    async def check(store: Store):
        async def left() -> list[int]:
            return [record.seq for record in await store.ops.since(ADAPTER, 0)]

        await _five_ops(store)
        assert (await store.ops.prune(300.0, delivered_seconds=101.0, finished_seconds=1000.0)).rows == 0
        assert await left() == [1, 2, 3, 4, 5]
        assert (await store.ops.prune(300.0, delivered_seconds=60.0, finished_seconds=1000.0)).rows == 2
        assert await left() == [3, 4, 5]
        assert (await store.ops.prune(300.0, delivered_seconds=60.0, finished_seconds=150.0)).rows == 2
        assert await left() == [5]  # no snapshot covers it
        assert await store.ops.outcome(ADAPTER, 5) == done(bytes([5]) * 100)

    with_store(tmp_path, check)


def test_what_is_not_finished_is_kept_while_the_adapter_lives(tmp_path):
    async def check(store: Store):
        await _five_ops(store)
        await accept(store, op(6), now=100.0)
        await store.snapshots.set(SnapshotRecord(ADAPTER, 9, "d", None, 150.0))
        await store.ops.prune(1e9, delivered_seconds=0.0, finished_seconds=0.0)
        assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == [6]

    with_store(tmp_path, check)


@pytest.mark.parametrize("state", ["failed", "parked"])
def test_ops_of_an_adapter_that_is_gone_are_dropped_when_nobody_asks_any_more(tmp_path, state):
    async def check(store: Store):
        await _five_ops(store)
        await accept(store, op(6), now=100.0)
        await store.snapshots.delete(ADAPTER)
        await store.runs.set_state(ADAPTER, state)
        await store.ops.prune(300.0, delivered_seconds=60.0, finished_seconds=1000.0)
        assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == [3, 4, 5, 6]
        await store.ops.prune(300.0, delivered_seconds=60.0, finished_seconds=100.0)
        assert await store.ops.since(ADAPTER, 0) == ()

    with_store(tmp_path, check)


def test_segments_are_deleted_when_nobody_needs_them(tmp_path):
    """Bodies are deleted with the snapshot, outcomes with their rows, and never one that is needed."""

    def segments(kind: str) -> int:
        return len(list((tmp_path / "journal" / kind).iterdir()))

    async def check(store: Store):
        await begin(store)
        for seq in range(1, 21):
            await accept(store, op(seq, bytes([seq]) * 100))
            await store.ops.record_outcomes([(ADAPTER, seq, done(bytes([seq]) * 90))], now=100.0)
        assert (segments("bodies"), segments("outcomes")) == (20, 20)
        await store.snapshots.set(SnapshotRecord(ADAPTER, 15, "d", None, 1.0))
        await store.ops.mark_delivered([(ADAPTER, seq) for seq in range(1, 11)], now=100.0)

        pruned = await store.ops.prune(200.0, delivered_seconds=50.0, finished_seconds=1e6)
        assert (pruned.rows, pruned.body_segments, pruned.outcome_segments) == (10, 15, 10)
        assert (segments("bodies"), segments("outcomes")) == (5, 10)
        for seq in range(11, 21):
            assert await store.ops.outcome(ADAPTER, seq) == done(bytes([seq]) * 90)
        for record in await store.ops.since(ADAPTER, 15):
            assert await store.ops.body(record) == bytes([record.seq]) * 100
        with pytest.raises(JournalError, match="gone"):
            await store.ops.body(await store.ops.get(ADAPTER, 12))

    with_store(tmp_path, check, segment_bytes=110)


def test_an_answered_forward_pass_is_never_replayed_and_its_body_goes(tmp_path):
    native = "session_" + "0" * 32 + "-default"

    async def check(store: Store):
        await begin(store)
        await store.runs.add(replace(run(2), run_id=native))
        for adapter in (ADAPTER, native):
            for seq, kind in enumerate([OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.FORWARD, OpKind.FORWARD], 1):
                await accept(store, replace(op(seq, bytes(900), kind=kind), adapter_id=adapter))
            await store.ops.record_outcomes([(adapter, seq, done()) for seq in (1, 2, 3)], now=5.0)
        # A native forward pass has effects; a pass without an outcome still has to run.
        assert [record.seq for record in await store.ops.since(native, 0)] == [1, 2, 3, 4]
        assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == [2, 4]
        assert await store.ops.final_since(ADAPTER, 0) == [1, 3]
        assert await store.ops.final_since(ADAPTER, 1) == [3]
        pruned = await store.ops.prune(6.0, delivered_seconds=100.0, finished_seconds=100.0)
        assert (pruned.rows, pruned.body_segments) == (0, 2)  # of ops 1 and 3 of ADAPTER
        assert pruned.freed_bytes == 2 * 916
        assert await store.ops.bytes_by_tenant() == {run(1).tenant_id: 6 * 900 + 6 * 2}

    with_store(tmp_path, check, segment_bytes=900)


def test_a_snapshot_covers_forward_passes_without_being_written_again(tmp_path):
    async def check(store: Store):
        await begin(store)
        kinds = [OpKind.FORWARD_BACKWARD, *[OpKind.FORWARD] * 3]
        for seq, kind in enumerate(kinds, 1):
            await accept(store, op(seq, kind=kind))
        await store.ops.record_outcomes([(ADAPTER, seq, done()) for seq in (1, 2, 3)], now=5.0)
        assert not await store.snapshots.advance(ADAPTER, 3, None)  # there is no snapshot yet
        await store.snapshots.set(SnapshotRecord(ADAPTER, 0, "d", None, 3.0))
        assert not await store.snapshots.advance(ADAPTER, 3, None)  # op 1 changed the adapter
        await store.snapshots.set(SnapshotRecord(ADAPTER, 1, "d", None, 3.0))
        assert not await store.snapshots.advance(ADAPTER, 4, None)  # op 4 has not ended
        assert await store.snapshots.advance(ADAPTER, 3, 2)
        assert await store.snapshots.get(ADAPTER) == SnapshotRecord(ADAPTER, 3, "d", 2, 3.0)
        assert [record.seq for record in await store.ops.since(ADAPTER, 3)] == [4]

    with_store(tmp_path, check)


def test_pruning_while_ops_arrive_never_loses_a_body(tmp_path):
    async def check(store: Store):
        await begin(store)
        stop = False

        async def prune_all_the_time() -> None:
            while not stop:
                await store.ops.prune(1e6, delivered_seconds=0.0, finished_seconds=0.0)
                await asyncio.sleep(0)

        pruning = asyncio.create_task(prune_all_the_time())
        for start in range(0, 600, 20):
            wanted = range(start + 1, start + 21)
            await asyncio.gather(*(accept(store, op(seq, str(seq).encode() * 20)) for seq in wanted))
            for record in await store.ops.since(ADAPTER, start):
                assert await store.ops.body(record) == str(record.seq).encode() * 20
            await store.ops.record_outcomes([(ADAPTER, seq, done()) for seq in wanted], now=1.0)
            await store.snapshots.set(SnapshotRecord(ADAPTER, start + 20, "d", None, 1.0))
        stop = True
        await pruning
        await store.ops.prune(1e6, delivered_seconds=0.0, finished_seconds=0.0)
        assert await store.ops.since(ADAPTER, 0) == ()
        assert len(list((tmp_path / "journal" / "bodies").iterdir())) <= 1

    with_store(tmp_path, check, segment_bytes=300)


def test_the_time_in_which_a_server_was_down_does_not_count_against_outcomes(tmp_path):
    async def check(store: Store):
        await begin(store)
        for seq in (1, 2):
            await accept(store, op(seq))
        await store.ops.record_outcomes([(ADAPTER, 1, done()), (ADAPTER, 2, done())], now=1.0)
        await store.ops.mark_delivered([(ADAPTER, 1)], now=2.0)
        await store.snapshots.set(SnapshotRecord(ADAPTER, 2, "d", None, 3.0))
        await store.ops.extend_deadlines_after_downtime(5000.0)
        await store.ops.prune(5009.0, delivered_seconds=10.0, finished_seconds=100.0)
        assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == [1, 2]
        await store.ops.prune(5011.0, delivered_seconds=10.0, finished_seconds=100.0)
        assert [record.seq for record in await store.ops.since(ADAPTER, 0)] == [2]
        await store.ops.prune(5101.0, delivered_seconds=10.0, finished_seconds=100.0)
        assert await store.ops.since(ADAPTER, 0) == ()

    with_store(tmp_path, check)


def test_a_full_disk_fails_the_call_and_registers_nothing(tmp_path, monkeypatch):
    real = os.writev

    def only_small(fd, parts):
        if sum(map(len, parts)) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, parts)

    async def check(store: Store):
        await begin(store)
        await accept(store, op(1))
        monkeypatch.setattr(os, "writev", only_small)
        results = await asyncio.gather(
            *(accept(store, op(seq, b"x" * (5000 if seq == 5 else 5))) for seq in range(2, 9)), return_exceptions=True
        )
        assert [seq for seq, result in enumerate(results, start=2) if isinstance(result, StorageFullError)] == [5]
        with pytest.raises(StorageFullError):
            await store.ops.record_outcomes([(ADAPTER, 1, done(b"y" * 5000))], now=1.0)
        assert await store.ops.get(ADAPTER, 5) is None
        assert (await store.ops.get(ADAPTER, 1)).outcome is None
        monkeypatch.undo()
        assert (await accept(store, op(5, b"x" * 5000))).created
        for record in await store.ops.since(ADAPTER, 1):
            assert len(await store.ops.body(record)) == (5000 if record.seq == 5 else 5)

    with_store(tmp_path, check)


def test_without_the_lock_nothing_is_journalled_or_pruned(tmp_path):
    async def main():
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as tool:
            await begin(server)
            accepted = await accept(server, op(1, b"body"))
            assert await tool.ops.body(accepted.record) == b"body"
            with pytest.raises(StoreClosedError):
                await accept(tool, op(2))
            with pytest.raises(StoreClosedError):
                await tool.ops.prune(1e9, 0.0, 0.0)

    asyncio.run(main())


def test_a_large_body_does_not_hold_up_the_event_loop(tmp_path):
    body = os.urandom(20_000_000)

    async def check(store: Store):
        await begin(store)
        task = asyncio.create_task(accept(store, op(1, body)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert await store.ops.body(task.result().record) == body
        assert turns > 20  # turns of the event loop while checksum and write were running

    with_store(tmp_path, check)
