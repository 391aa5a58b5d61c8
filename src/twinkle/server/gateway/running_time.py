"""Whether this process has run without a break: only then is a client's silence the client's own.

A process that was stopped (SIGSTOP, a paused container, a suspended machine) heard nobody, and a wall clock that was
set tells nothing about how long a client has been silent. Silence is therefore judged only over a time in which this
process was running all the while.
"""

import asyncio
import time
from collections.abc import Callable

_TICK_SECONDS = 5.0


class RunningTime:
    """Notices breaks by ticks that come late, or at a wall-clock time where they do not belong. One event loop."""

    def __init__(
        self,
        shortest: float,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shortest``: seconds of the shortest silence that anybody will judge. Breaks well below it do not matter."""
        self._clock = clock
        self._monotonic = monotonic
        self._tick = min(_TICK_SECONDS, shortest / 4)
        self._last: tuple[float, float] | None = None  # wall and monotonic time of the last tick
        self._since = monotonic()
        self._interrupted = False

    async def watch(self) -> None:
        """Tick until cancelled. Without this no break is ever noticed."""
        while True:
            self.tick()
            await asyncio.sleep(self._tick)

    def tick(self) -> None:
        """Compare both clocks with the last tick. The wall clock may also have been set back."""
        wall, monotonic = self._clock(), self._monotonic()
        if self._last is not None:
            passed = wall - self._last[0], monotonic - self._last[1]
            # A machine that was suspended shows on the wall clock only, a stopped process on both clocks.
            if max(passed) > 3 * self._tick or passed[0] < -self._tick:
                self._interrupted = True
                self._since = monotonic
        self._last = wall, monotonic

    def take_interruption(self) -> bool:
        """Return whether there was a break since this was last asked."""
        if self._last is not None:
            self.tick()  # after a break the ticking task may not have had its turn yet
        interrupted, self._interrupted = self._interrupted, False
        return interrupted

    def ran_for(self, seconds: float) -> bool:
        """Return whether the process has run for so long without a break."""
        if self._last is not None:
            self.tick()
        return self._monotonic() - self._since >= seconds
