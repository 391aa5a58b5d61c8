"""What every server process does by the clock, and the tasks that live as long as the process."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 15.0


async def run_maintenance(first: Awaitable[None], work: Callable[[float], Awaitable[None]]) -> None:
    """Do ``first`` now, then ``work`` every ``INTERVAL_SECONDS``, with the time of day. It never ends by itself.

    A failure is logged and the next round tries again: a full disk or a database that is away for a minute must not
    end the expiry of sessions for good.
    """
    pending = first
    while True:
        try:
            await pending
        except Exception:
            logger.exception("maintenance failed")
        await asyncio.sleep(INTERVAL_SECONDS)
        pending = work(time.time())


class ProcessTasks:
    """Tasks of one process that run until they are cancelled together."""

    def __init__(self, *work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(each) for each in work]

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
