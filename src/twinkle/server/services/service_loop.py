"""The loop of a service, and the background tasks that a service starts beside its loop.

A loop runs until its service stops. If it ends with an error, that is a bug, and accepted requests would wait for ever.
So the end is logged at once and shown by health checks, and the runtime, which waits for :meth:`ServiceLoop.broken`,
ends the process. The next process recovers the adapters and runs the accepted ops that have not ended.
"""

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class ServiceLoop:
    """Runs a service loop as a task, and notices when it ends with an error. ``name`` is how log lines call the
    service.

    Belongs to one event loop.
    """

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
        """Return whether the loop ended with an error."""
        return self._broken.is_set()

    async def ended(self) -> None:
        """Wait until the loop has ended, with or without an error."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def broken(self) -> str:
        """Wait until the loop has ended with an error, and return the name of its service."""
        await self._broken.wait()
        return self._name

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # because the event loop ends
            logger.warning("%s was cancelled", self._name)
        elif task.exception() is not None:
            logger.critical("%s has stopped because of an internal error", self._name, exc_info=task.exception())
            self._broken.set()


class BackgroundTasks:
    """The background tasks of a service, which it finishes before it ends. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def finish(self) -> None:
        """Wait until the tasks that run now have ended. The error of a task that failed is logged when it ends."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work failed", exc_info=task.exception())
