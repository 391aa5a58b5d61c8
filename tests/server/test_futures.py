"""Promises: waiting, delivering, forgetting."""

import asyncio

from twinkle.server.futures import PROMISE_BYTES, Futures
from twinkle.server.types import Encoding, Outcome

DONE = Outcome(Encoding.JSON, b"{}")


def test_waiting_ends_with_the_outcome_and_not_before() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        assert await futures.wait("a", 0.01, now=0) is None
        waiters = [asyncio.create_task(futures.wait("a", 60, now=1)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        futures.settle("a", DONE, now=1)
        assert await asyncio.gather(*waiters) == [DONE] * 3
        assert await futures.wait("a", 0, now=2) is DONE  # again: an answer may get lost
        assert futures.take_delivered() == ["a"]
        assert futures.take_delivered() == []

    asyncio.run(main())


def test_the_first_outcome_stands() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        futures.settle("a", DONE, now=0)
        futures.settle("a", Outcome(Encoding.JSON, b"other"), now=1)
        assert await futures.wait("a", 0, now=2) is DONE

    asyncio.run(main())


def test_closing_lets_everybody_go() -> None:
    async def main() -> None:
        futures = Futures()
        futures.promise("a", "tenant")
        waiter = asyncio.create_task(futures.wait("a", 60, now=0))
        await asyncio.sleep(0)
        futures.close()
        assert await asyncio.wait_for(waiter, 5) is None
        assert await asyncio.wait_for(futures.wait("a", 60, now=0), 5) is None

    asyncio.run(main())


def test_what_was_fetched_goes_sooner_than_what_was_not() -> None:
    async def main() -> None:
        futures = Futures(delivered_seconds=10, unfetched_seconds=100)
        for name in ("fetched", "unfetched", "pending"):
            futures.promise(name, "tenant")
        futures.settle("fetched", DONE, now=0)
        futures.settle("unfetched", DONE, now=0)
        await futures.wait("fetched", 0, now=0)
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
        await futures.wait("again", 0, now=200)
        assert (futures.delivered("again"), futures.delivered("acknowledged")) == (True, False)
        futures.acknowledge("acknowledged")
        futures.forget("again")
        futures.sweep(now=1000)
        assert not futures.delivered("again")
        assert futures.unfetched_bytes("tenant") == 0
        assert not futures._unfetched_bytes, "nothing is kept of a tenant of whom nothing is kept"

    asyncio.run(main())
