"""A batch in steps lets the loop go first: for a pass and its optimizer step, and no longer."""

import asyncio

from twinkle.server.services.training.runner import LoopTurns


def test_an_idle_loop_is_not_waited_for() -> None:
    async def main() -> None:
        turns = LoopTurns()
        await asyncio.wait_for(turns.others(), 5)
        turns.begin()
        turns.end(idle=True)
        await asyncio.wait_for(turns.others(), 5)

    asyncio.run(main())


def test_two_turns_and_no_more() -> None:
    async def main() -> None:
        turns = LoopTurns()
        turns.begin()
        waiting = asyncio.create_task(turns.others())
        for _ in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            turns.end(idle=False)
            turns.begin()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(main())


def test_a_loop_that_runs_dry_ends_the_wait() -> None:
    async def main() -> None:
        turns = LoopTurns()
        turns.begin()
        waiting = asyncio.create_task(turns.others())
        await asyncio.sleep(0)
        turns.end(idle=True)
        await asyncio.wait_for(waiting, 5)

    asyncio.run(main())
