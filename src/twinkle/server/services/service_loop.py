"""The loop of a service, and the tasks that it starts beside its loop.

A loop runs until its service stops. If it ends before, that is a bug, and accepted requests would wait for ever. So the
end is logged at once, health shows it, and the runtime waits for :meth:`ServiceLoop.broken` and ends the process: the
next process does everything again that was acknowledged.
"""

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class ServiceLoop:
    """``name``: what stops when the loop does, for the log. Belongs to one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()

    def start(self, loop: Coroutine[object, object, None]) -> None:
        self._task = asyncio.create_task(loop)
        self._task.add_done_callback(self._ended)

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def failed(self) -> bool:
        """Return whether it ended by an error."""
        return self._broken.is_set()

    async def ended(self) -> None:
        """Return when it has ended, well or not."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def broken(self) -> str:
        """Return the name of what has stopped, once it has ended by an error."""
        await self._broken.wait()
        return self._name

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # with the event loop
            logger.warning("%s was cancelled", self._name)
        elif task.exception() is not None:
            logger.critical("%s has stopped by an error of ours", self._name, exc_info=task.exception())
            self._broken.set()


class BackgroundTasks:
    """Tasks that a service has started and finishes before it ends. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def finish(self) -> None:
        """Return when all tasks have ended. An error was logged when its task ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work failed", exc_info=task.exception())
