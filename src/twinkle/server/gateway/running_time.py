"""How long this process has run without a break, so that a client's silence can be judged fairly.

A process that was stopped (SIGSTOP, a paused container, a suspended machine) received no heartbeats, and after the wall
clock was set, nobody knows how long a client has been silent. A client counts as silent only over a time in which this
process was running without a break.
"""

import asyncio
import time
from collections.abc import Callable

_TICK_SECONDS = 5.0


class RunningTime:
    """Detects breaks: a tick that comes late, or a wall clock that does not match the tick.

    Belongs to one event loop.
    """

    def __init__(
        self,
        shortest: float,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Choose the time between ticks by ``shortest``, the shortest silence in seconds that is to be judged."""
        self._clock = clock
        self._monotonic = monotonic
        self._tick = min(_TICK_SECONDS, shortest / 4)
        self._last: tuple[float, float] | None = None  # wall and monotonic time of the last tick
        self._since = monotonic()
        self._interrupted = False

    async def watch(self) -> None:
        """Tick until cancelled. Without this task no break is detected."""
        while True:
            self.tick()
            await asyncio.sleep(self._tick)

    def tick(self) -> None:
        """Compare the wall clock and the monotonic clock with the last tick, and note a break if one of them jumped."""
        wall, monotonic = self._clock(), self._monotonic()
        if self._last is not None:
            passed = wall - self._last[0], monotonic - self._last[1]
            # A suspended machine shows on the wall clock only, a stopped process on both clocks. A negative difference
            # means that the wall clock was set back.
            if max(passed) > 3 * self._tick or passed[0] < -self._tick:
                self._interrupted = True
                self._since = monotonic
        self._last = wall, monotonic

    def take_interruption(self) -> bool:
        """Return whether there was a break since the last call of this method."""
        if self._last is not None:
            self.tick()  # after a break, the ticking task may not have run yet
        interrupted, self._interrupted = self._interrupted, False
        return interrupted

    def ran_for(self, seconds: float) -> bool:
        """Return whether the process has run for this many seconds without a break."""
        if self._last is not None:
            self.tick()
        return self._monotonic() - self._since >= seconds
