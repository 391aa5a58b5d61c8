"""Futures: waiting, delivering, forgetting."""

import asyncio

import pytest

from twinkle.errors import OverloadedError, QuotaError
from twinkle.server.services.futures import PROMISE_BYTES, Futures
from twinkle.server.tenancy.memory import ResultMemory
from twinkle.server.types import Encoding, Outcome

DONE = Outcome(Encoding.JSON, b"{}")


async def fetch(futures: Futures, request_id: str, now: float, *, complete: bool = True) -> Outcome | None:
    """Fetch as a route does. ``complete``: the client reads to the end."""
    outcome = await futures.wait(request_id, 0)
    with futures.delivering(request_id, now) as delivery:
        delivery.complete = complete
    return outcome


def test_waiting_ends_with_the_outcome_and_not_before() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        assert await futures.wait("a", 0.01) is None
        waiters = [asyncio.create_task(futures.wait("a", 60)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        futures.settle("a", DONE, now=1)
        assert await asyncio.gather(*waiters) == [DONE] * 3
        assert await futures.wait("a", 0) is DONE  # again, because an answer may get lost
        assert futures.take_delivered() == [], "nobody has sent it to the end"
        await fetch(futures, "a", now=3)
        assert futures.take_delivered() == ["a"]
        assert futures.take_delivered() == []

    asyncio.run(main())


def test_the_first_outcome_stands() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        futures.settle("a", DONE, now=0)
        futures.settle("a", Outcome(Encoding.JSON, b"other"), now=1)
        assert await futures.wait("a", 0) is DONE

    asyncio.run(main())


def test_closing_lets_everybody_go() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        waiter = asyncio.create_task(futures.wait("a", 60))
        await asyncio.sleep(0)
        futures.close()
        assert await asyncio.wait_for(waiter, 60) is None
        assert await asyncio.wait_for(futures.wait("a", 60), 30) is None

    asyncio.run(main())


def test_what_was_fetched_goes_sooner_than_what_was_not() -> None:
    async def main() -> None:
        futures = Futures(delivered_seconds=10, unfetched_seconds=100)
        for name in ("fetched", "unfetched", "pending"):
            futures.promise(name, "tenant")
        futures.settle("fetched", DONE, now=0)
        futures.settle("unfetched", DONE, now=0)
        await fetch(futures, "fetched", now=0)
        assert futures.unfetched_bytes("tenant") == len(DONE.body) + PROMISE_BYTES
        futures.sweep(now=50)
        assert ("fetched" in futures, "unfetched" in futures) == (False, True)
        futures.sweep(now=150)
        assert "unfetched" not in futures
        assert "pending" in futures
        assert futures.unfetched_bytes("tenant") == 0
        for name in ("again", "acknowledged"):
            futures.promise(name, "tenant")
            futures.settle(name, DONE, now=200)
        await fetch(futures, "again", now=200)
        assert (futures.delivered("again"), futures.delivered("acknowledged")) == (True, False)
        futures.acknowledge("acknowledged")
        futures.forget("again")
        futures.sweep(now=1000)
        assert not futures.delivered("again")
        assert futures.unfetched_bytes("tenant") == 0
        assert not futures._unfetched_bytes, "nothing is kept of a tenant of whom nothing is kept"

    asyncio.run(main())


# --- memory -----------------------------------------------------------------------------------------------------------

BIG = Outcome(Encoding.PROTOBUF, bytes(10_000))
SIZE = len(BIG.body) + PROMISE_BYTES


def test_hanging_up_does_not_make_a_result_free() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        futures.settle("a", BIG, now=0)
        await fetch(futures, "a", now=1, complete=False)
        assert futures.unfetched_bytes("tenant") == SIZE
        assert not futures.delivered("a")
        await fetch(futures, "a", now=2)
        assert (futures.unfetched_bytes("tenant"), futures.memory.used) == (0, SIZE), "it is still in memory"
        futures.forget("a")
        assert futures.memory.used == 0

    asyncio.run(main())


def test_results_leave_memory_in_order_and_come_back_from_the_journal() -> None:
    async def main() -> None:
        on_disk, read = {}, []

        async def read_back(request_id: str) -> Outcome | None:
            read.append(request_id)
            return on_disk.get(request_id)

        futures = Futures(memory=ResultMemory(3 * SIZE), read_back=read_back)
        for name in ("unfetched", "fetched", "unrecorded", "new"):
            futures.promise(name, "tenant")
        for name in ("unfetched", "fetched"):
            futures.settle(name, BIG, now=0)
            on_disk[name] = BIG
            futures.recorded(name)
        await fetch(futures, "fetched", now=1)
        futures.settle("unrecorded", BIG, now=2)
        assert futures.memory.used == 3 * SIZE
        futures.settle("new", BIG, now=3)
        assert futures.memory.used == 3 * SIZE
        assert await futures.wait("unfetched", 0) is BIG
        assert read == [], "what was fetched has left first"
        assert await fetch(futures, "fetched", now=4) is BIG
        assert read == ["fetched"]
        assert futures.unfetched_bytes("tenant") == 3 * SIZE, "results that left memory count as unfetched all the same"
        futures.sweep(now=10_000)
        assert (futures.memory.used, futures.unfetched_bytes("tenant")) == (0, 0)

    asyncio.run(main())


def test_samples_that_were_fetched_leave_and_others_stay() -> None:
    async def main() -> None:
        futures = Futures(memory=ResultMemory(2 * SIZE))
        for number in range(4):
            futures.promise(str(number), "tenant")
            futures.settle(str(number), BIG, now=number)
            if number == 0:
                await fetch(futures, "0", now=0)
        assert "0" not in futures
        assert all(str(number) in futures for number in (1, 2, 3)), "nobody else has them"
        with pytest.raises(QuotaError, match="max_result_bytes"):
            futures.memory.check("tenant")
        with pytest.raises(OverloadedError, match="max_result_bytes"):
            futures.memory.check("other")
        for number in (1, 2, 3):
            await fetch(futures, str(number), now=9)
        futures.memory.check("tenant")

    asyncio.run(main())


def test_what_is_being_sent_stays_in_memory_and_reading_back_has_a_limit() -> None:
    async def main() -> None:
        async def read_back(_request_id: str) -> Outcome | None:
            return BIG

        futures = Futures(memory=ResultMemory(2 * SIZE), read_back=read_back)
        for name in ("a", "b", "c"):
            futures.promise(name, name)
            futures.settle(name, BIG, now=0)
            futures.recorded(name)
        assert futures.memory.used == 2 * SIZE
        assert await futures.wait("a", 0) is BIG  # read from disk
        with futures.delivering("a", 1) as delivery:
            assert await futures.wait("b", 0) is BIG
            with futures.delivering("b", 1):
                assert futures.memory.used == 2 * SIZE
                with pytest.raises(OverloadedError, match="max_result_bytes"):
                    await futures.wait("c", 0)
            delivery.complete = True
        assert await futures.wait("c", 0) is BIG
        assert futures.delivered("a")
        assert not futures.delivered("b")

    asyncio.run(main())


def test_the_tenant_with_most_bytes_makes_room() -> None:
    async def main() -> None:
        futures = Futures(memory=ResultMemory(4 * SIZE))
        for number, tenant in enumerate(["modest", "greedy", "greedy", "greedy", "greedy"]):
            futures.promise(str(number), tenant)
            futures.settle(str(number), BIG, now=number)
            await fetch(futures, str(number), now=number)
        assert "0" in futures
        assert "1" not in futures

    asyncio.run(main())
