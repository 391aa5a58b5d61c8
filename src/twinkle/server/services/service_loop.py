"""The loop of a service. It runs until it is told to end; if it ends before, that is a bug, and nobody may overlook it.

What was accepted would wait for ever then. So it is said in the log at once, health tells it, and whoever hosts the
service waits for :meth:`Pump.broken` and ends the process: with the next one everything acknowledged is done again.
"""

import asyncio
import logging
from collections.abc import Coroutine

__all__ = ["Pump"]

logger = logging.getLogger(__name__)


class Pump:
    """``name``: what stops when it does, for the log. Belongs to one event loop."""

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
        """Whether it ended by an error."""
        return self._broken.is_set()

    async def ended(self) -> None:
        """Returns when it has ended, well or not."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def broken(self) -> str:
        """Returns when it has ended by an error, if ever: what has stopped."""
        await self._broken.wait()
        return self._name

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # with the event loop
            logger.warning("%s was cancelled", self._name)
        elif task.exception() is not None:
            logger.critical("%s has stopped by an error of ours", self._name, exc_info=task.exception())
            self._broken.set()
