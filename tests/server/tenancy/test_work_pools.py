"""Threads for requests: tenants take turns, and no tenant gets all threads of a kind."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from twinkle.errors import ShuttingDownError
from twinkle.server.tenancy.work_pools import FairPool, WorkPools


class Held:
    """Work that lasts until it is released; ``running`` lists what has started, in order."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        gate = self._gates.setdefault(name, threading.Event())

        def run() -> str:
            self.running.append(name)
            gate.wait(60)
            return name

        return run

    def let_go(self, *names: str) -> None:
        for name in names or list(self._gates):
            self._gates[name].set()

    async def until_running(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while not set(names) <= set(self.running):
                await asyncio.sleep(0.005)


def test_a_tenant_never_has_all_threads() -> None:
    async def main() -> None:
        pool, held = FairPool("test", threads=4, at_once=2), Held()
        greedy = [asyncio.create_task(pool.in_thread("greedy", held.work(f"g{n}"))) for n in range(50)]
        await held.until_running("g0", "g1")
        honest = asyncio.create_task(pool.in_thread("honest", held.work("h")))
        await held.until_running("h")  # while 48 pieces of the greedy tenant wait before it
        assert sorted(held.running) == ["g0", "g1", "h"]
        assert pool.waiting == 48
        held.let_go()
        assert await honest == "h"
        assert await asyncio.gather(*greedy) == [f"g{n}" for n in range(50)]

    asyncio.run(main())


def test_tenants_take_turns() -> None:
    async def main() -> list[str]:
        pool, held = FairPool("test", threads=1, at_once=1), Held()
        tasks = [asyncio.create_task(pool.in_thread("a", held.work(f"a{n}"))) for n in range(4)]
        await held.until_running("a0")
        tasks += [asyncio.create_task(pool.in_thread("b", held.work(f"b{n}"))) for n in range(2)]
        await asyncio.sleep(0)
        held.let_go()
        await asyncio.gather(*tasks)
        return held.running

    assert asyncio.run(main()) == ["a0", "a1", "b0", "a2", "b1", "a3"]


def test_work_that_nobody_waits_for_still_counts() -> None:
    """A client that hangs up and asks again gets no additional threads."""

    async def main() -> None:
        pool, held = FairPool("test", threads=4, at_once=2), Held()
        first = [asyncio.create_task(pool.in_thread("a", held.work(f"a{n}"))) for n in range(2)]
        await held.until_running("a0", "a1")
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        again = asyncio.create_task(pool.in_thread("a", held.work("again")))
        waits = asyncio.create_task(pool.in_thread("a", held.work("gone")))
        await asyncio.sleep(0.05)
        assert held.running == ["a0", "a1"]
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert pool.waiting == 1
        held.let_go()
        assert await again == "again"
        assert "gone" not in held.running

    asyncio.run(main())


def test_the_end_refuses_what_waits() -> None:
    async def main() -> None:
        pools, held = WorkPools(), Held()
        tasks = [asyncio.create_task(pools.text.in_thread("a", held.work(f"a{n}"))) for n in range(20)]
        await held.until_running("a0", "a1")
        pools.release_waiters()
        refused = await asyncio.gather(*tasks[2:], return_exceptions=True)
        assert {type(error) for error in refused} == {ShuttingDownError}
        with pytest.raises(ShuttingDownError):
            await pools.text.in_thread("b", held.work("b"))
        held.let_go()
        assert await asyncio.gather(*tasks[:2]) == ["a0", "a1"]
        assert await pools.saving.in_thread("a", lambda: "saved") == "saved"  # adapters can still be saved

    asyncio.run(main())
