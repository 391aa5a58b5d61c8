"""Streams of completions, and queues in which tenants take turns."""

import asyncio

from twinkle.server.ids import SEQ_IDS_PER_CLIENT
from twinkle.server.scheduling.fair_queue import FairQueue
from twinkle.server.services.sampling.completions import Completions
from twinkle.server.tenancy.rate_limit import RecentRate

SESSION = "s:sample:0"


def ids(found) -> list[str]:
    return [completion.request_id.rpartition(":")[2] for completion in found]


def test_a_stream_goes_on_where_its_client_was() -> None:
    async def main() -> None:
        streams = Completions()
        for number in range(3):
            streams.add(f"{SESSION}:{number}", 10 * number, 0.0)
        first = await streams.after(SESSION, 0, 0, 10, 0.0)
        assert [(one.request_id, one.size) for one in first] == [(f"{SESSION}:{n}", 10 * n) for n in range(3)]
        again = await streams.after(SESSION, 0, 0, 10, 0.0)  # repeated, because the answer was lost
        assert again == first
        assert ids(await streams.after(SESSION, 0, first[1].place, 10, 0.0)) == ["2"]
        assert ids(await streams.after(SESSION, 0, 0, 10, 0.0)) == ["2"]  # acknowledged completions are gone

    asyncio.run(main())


def test_clients_and_sessions_have_streams_of_their_own() -> None:
    async def main() -> None:
        streams = Completions()
        copy = 7 * SEQ_IDS_PER_CLIENT
        for request_id in (f"{SESSION}:5", f"{SESSION}:{copy + 1}", "s:sample:1:0"):
            streams.add(request_id, None, 0.0)
        assert ids(await streams.after(SESSION, 0, 0, 0, 0.0)) == ["5"]
        assert ids(await streams.after(SESSION, 7, 0, 0, 0.0)) == [str(copy + 1)]
        assert ids(await streams.after("s:sample:1", 0, 0, 0, 0.0)) == ["0"]
        assert await streams.after("s:sample:1", 1, 0, 0, 0.0) == []

    asyncio.run(main())


def test_a_poll_waits_for_the_next_one() -> None:
    async def main() -> None:
        streams = Completions()
        polls = [asyncio.create_task(streams.after(SESSION, 0, 0, 60, 0.0)) for _ in range(3)]
        await asyncio.sleep(0)
        streams.add(f"{SESSION}:1", 1, 0.0)
        for found in await asyncio.gather(*polls):
            assert ids(found) == ["1"]
        waiting = asyncio.create_task(streams.after(SESSION, 3, 0, 60, 0.0))
        await asyncio.sleep(0)
        streams.close()
        assert await waiting == []
        assert await streams.after(SESSION, 4, 0, 60, 0.0) == []  # no poll waits any more

    asyncio.run(main())


def test_places_grow_from_one_server_to_the_next() -> None:
    async def main() -> None:
        places = []
        for _ in range(2):
            streams = Completions()
            streams.add(f"{SESSION}:1", 1, 0.0)
            places.append((await streams.after(SESSION, 0, 0, 0, 0.0))[0].place)
            await asyncio.sleep(0.001)
        assert 0 < places[0] < places[1] < 2**63

    asyncio.run(main())


def test_what_nobody_comes_for_is_forgotten() -> None:
    async def main() -> None:
        streams = Completions(kept_seconds=100)
        streams.add(f"{SESSION}:1", 1, 0.0)
        streams.add(f"{SESSION}:2", 1, 90.0)
        streams.sweep(150.0, lambda _: False)
        assert ids(await streams.after(SESSION, 0, 0, 0, 150.0)) == ["2"]
        streams.sweep(300.0, lambda _: False)
        assert not streams.has_stream(SESSION, 0)

    asyncio.run(main())


def test_what_was_fetched_without_being_told_is_forgotten() -> None:
    async def main() -> None:
        streams = Completions(kept_seconds=100)
        for number in range(4):
            streams.add(f"{SESSION}:{number}", 1, 0.0)
        assert streams.numbers(SESSION, 0) == [0, 1, 2, 3]
        streams.sweep(1.0, {f"{SESSION}:0", f"{SESSION}:1", f"{SESSION}:3"}.__contains__)
        assert streams.numbers(SESSION, 0) == [2, 3]  # 3 is forgotten once 2 is
        assert streams.numbers(SESSION, 1) == []

    asyncio.run(main())


def test_tenants_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("a", f"a{number}", f"a{number}")
    queue.push("b", "b0", "b0")
    queue.push("c", "c0", "c0")
    queue.push("c", "c1", "c1")
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a1")
    assert not queue.remove("d", "a0")
    assert len(queue) == 6
    assert [queue.pop() for _ in range(6)] == ["a0", "b0", "c0", "a2", "c1", "a3"]
    assert len(queue) == 0


def test_a_rate_is_of_the_last_minute() -> None:
    rate = RecentRate(0.0)
    assert rate.rate(50, 0.5) == 50.0  # the first second counts as a whole one
    assert rate.rate(100, 10.0) == 10.0
    for seconds in range(15, 301, 15):
        rate.record(100 * seconds, seconds)
    assert rate.rate(30_000, 300) == 100.0
    assert rate.rate(30_000, 360) == 50.0  # nothing was added since
    for seconds in range(315, 361, 15):
        rate.record(30_000, seconds)
    assert rate.rate(30_000, 360) == 0.0
