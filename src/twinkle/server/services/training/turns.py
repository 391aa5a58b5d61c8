"""Turns of the pump, for batches that run in steps beside it: between two steps the others come first."""

import asyncio

__all__ = ["PumpTurns"]

_TURNS = 2  # of the pump between two steps: a pass, and the optimizer step that waits for it


class PumpTurns:
    """Counts the batches that the pump ran to their end. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = 0
        self._idle = True  # the pump has nothing to do, or does not run
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """The pump looks for work."""
        self._idle = False

    def end(self, *, idle: bool) -> None:
        """A batch has ended, or (``idle``) there is none."""
        self._turns += not idle
        self._idle = idle
        self._changed.set()

    async def others(self) -> None:
        """Returns when the pump has nothing to do, or had its turns. Not to be awaited by the pump itself."""
        until = self._turns + _TURNS
        while not self._idle and self._turns < until:
            self._changed.clear()
            await self._changed.wait()
