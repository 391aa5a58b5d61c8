"""Usage by tenant and day, disk space, and limits that are checked in the transaction that writes."""

import asyncio
import time
from dataclasses import replace

import pytest

from tests.support.servers.state_samples import (
    begin,
    checkpoint,
    delete_checkpoint,
    opened,
    sampling_session,
    session,
    with_store,
)
from twinkle.errors import QuotaError, StorageQuotaError
from twinkle.server.gateway.usage_recorder import UsageRecorder
from twinkle.server.state.records.usage import DailyUsage
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.usage import Usage, UsageCounts

pytestmark = pytest.mark.usefixtures("backend")

DAY = 86_400.0


def test_counts_add_up_by_tenant_and_day_whoever_writes_them(tmp_path):
    async def main():
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as second:
            for store in (server, second):
                await store.usage.add({("alice", "2026-01-31"): UsageCounts(trained_tokens=5, requests=1)})
            await server.usage.add(
                {
                    ("alice", "2026-02-01"): UsageCounts(1, 2, 3, 4, 5),
                    ("bob", "2026-02-01"): UsageCounts(optim_steps=1),
                }
            )
            await server.usage.add({})
            first = DailyUsage("alice", "2026-01-31", UsageCounts(trained_tokens=10, requests=2), 0)
            second_day = DailyUsage("alice", "2026-02-01", UsageCounts(1, 2, 3, 4, 5), 0)
            bob = DailyUsage("bob", "2026-02-01", UsageCounts(optim_steps=1), 0)
            assert await second.usage.list("2026-01-01", "2026-03-01") == (first, second_day, bob)
            assert await second.usage.list("2026-01-01", "2026-02-01") == (first,)
            assert await second.usage.list("2026-02-01", "2026-02-02", "bob") == (bob,)

    asyncio.run(main())


def test_totals_go_on_and_each_count_is_written_once(tmp_path):
    """A count belongs to the day on which it happened, even if it is written on a later day."""
    now = 20_000 * DAY

    async def test(store: Store):
        nonlocal now
        tenants = Tenants()
        tenants.usage = Usage(clock=lambda: now)
        recorder = UsageRecorder(store, tenants)
        tenants.usage.add("alice", UsageCounts(trained_tokens=3, optim_steps=1, requests=2))
        now += DAY
        tenants.usage.add("alice", UsageCounts(sampled_tokens=4, prompt_tokens=2, requests=1))
        for _ in range(2):
            await recorder.flush_usage()
        assert tenants.usage.totals() == {"alice": UsageCounts(3, 4, 2, 1, 3)}
        days = await store.usage.list("0000", "9999")
        assert [each.counts for each in days] == [
            UsageCounts(trained_tokens=3, optim_steps=1, requests=2),
            UsageCounts(sampled_tokens=4, prompt_tokens=2, requests=1),
        ]

    with_store(tmp_path, test)


def test_what_cannot_be_written_is_kept_for_the_next_time(tmp_path):
    async def main():
        tenants = Tenants()
        tenants.usage.add("alice", UsageCounts(requests=1))
        async with opened(tmp_path) as closed:
            pass
        with pytest.raises(Exception, match="closed"):
            await UsageRecorder(closed, tenants).flush_usage()
        tenants.usage.add("alice", UsageCounts(requests=1))
        async with opened(tmp_path) as store:
            await UsageRecorder(store, tenants).flush_usage()
            (day,) = await store.usage.list("0000", "9999")
            assert day.counts == UsageCounts(requests=2)

    asyncio.run(main())


def test_disk_space_is_what_lies_there(tmp_path):
    """A sampler made from a checkpoint keeps its files, even if the checkpoint was deleted."""

    async def test(store: Store):
        await begin(store)
        kept, named = replace(checkpoint("a"), size_bytes=10), replace(checkpoint("b"), size_bytes=20)
        for each in (kept, named):
            await store.checkpoints.add(each)
        pinned = sampling_session(1, version_id="v", directory=named.directory, size_bytes=20)
        await store.sampling_sessions.create(pinned)
        await store.sampling_sessions.create(replace(pinned, sampling_session_id="s1:sample:2", number=2))
        own = sampling_session(3, version_id="s1:sample:3", directory="samplers/3", size_bytes=5)
        await store.sampling_sessions.create(own)
        assert await store.usage.storage() == {"alice": 35}
        await delete_checkpoint(store, named)
        assert await store.usage.storage_of("alice") == 35
        assert await store.usage.storage_of("bob") == 0
        (project,) = await store.usage.stored_by_project("alice")
        assert (project.project_id, project.checkpoints, project.size_bytes) == (None, 1, 10)
        for size, most in ((35, 35), (70, 70), (10, 70)):
            await store.usage.note_storage("2026-01-31", {"alice": size})
            assert [each.storage_bytes for each in await store.usage.list("0000", "9999")] == [most]

    with_store(tmp_path, test)


def test_no_more_is_kept_than_may_be_however_many_save_at_once(tmp_path):
    async def test(store: Store):
        await begin(store)

        async def save(number: int) -> bool:
            record = replace(checkpoint(f"c{number}", request_id=f"r{number}"), size_bytes=10)
            version = f"s1:sample:{number}"
            own = sampling_session(number, version_id=version, directory=version, size_bytes=10)
            try:
                if number % 2:
                    await store.checkpoints.add(record, most_bytes=55)
                else:
                    await store.sampling_sessions.create(own, most_bytes=55)
            except StorageQuotaError:
                return False
            return True

        assert sum(await asyncio.gather(*map(save, range(40)))) == 5
        assert await store.usage.storage_of("alice") == 50
        kept = (await store.checkpoints.list("alice", 100)).items[0]
        larger = replace(kept, size_bytes=15, directory="larger")  # the replaced checkpoint does not count
        assert await store.checkpoints.add(larger, overwrite=True, most_bytes=55) == kept

    with_store(tmp_path, test)


def test_no_more_sessions_are_active_than_may_be_however_many_come_at_once(tmp_path):
    async def test(store: Store):
        async def create(number: int) -> bool:
            try:
                await store.sessions.create(session(f"s{number}"), f"key {number}", most=7)
            except QuotaError:
                return False
            return True

        assert sum(await asyncio.gather(*map(create, range(25)))) == 7
        page = await store.sessions.list("alice", 100)
        assert page.total == 7
        await store.sessions.create(session("other", tenant_id="bob"), most=7)
        await store.sessions.end(page.items[0].session_id, "finished", time.time())
        assert await create(100)
        assert not await create(101)

    with_store(tmp_path, test)


def test_operators_are_answered_once(tmp_path):
    async def main():
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as tool:
            first = await tool.operator_requests.ask("evict", "run 1", 10.0)
            second = await tool.operator_requests.ask("evict", "run 2", 20.0)
            assert await server.operator_requests.open() == (first, second)
            await server.operator_requests.answer(first.request_id, "gone", failed=False)
            assert await server.operator_requests.open() == (second,)
            assert await tool.operator_requests.get(first.request_id) == replace(first, answer="gone")
            await tool.operator_requests.withdraw(second.request_id)
            await server.operator_requests.forget(before=15.0)
            assert await server.operator_requests.get(first.request_id) is None
            assert await server.operator_requests.get(second.request_id) is None

    asyncio.run(main())
