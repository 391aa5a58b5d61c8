"""Passes that take long. They run in steps, and batches of other tenants get their turns between and within these.

One long pass at a time takes a step. Before each step the service loop gets two turns. Where a step can be interrupted,
on a CPU, training and sampling of others may each use as much time inside a pass as the pass itself.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from twinkle.server.backends.compute_thread import Compute, Lane, compute_thread
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.training.execution import Execution, Steps
from twinkle.server.types import Op, Outcome

_TURNS = 2  # of the loop at a time: a pass, and the optimizer step that waits for it
_MOST = 4  # at once: each holds what it has computed so far
_SOON = 0.02  # seconds until the loop has sent the optimizer step that waits for a pass


class LoopTurns:
    """Turns of the service loop, for passes that run in steps beside it: between two steps the others come first."""

    def __init__(self) -> None:
        self._turns = 0
        self._idle = True  # the loop has nothing to do, or does not run
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Note that the loop looks for work."""
        self._idle = False

    def end(self, *, idle: bool) -> None:
        """Note that a batch has ended, or (``idle``) that there is none."""
        self._turns += not idle
        self._idle = idle
        self._changed.set()

    async def others(self) -> None:
        """Return when the loop has nothing to do, or had its turns. Not to be awaited by the loop itself."""
        until = self._turns + _TURNS
        while not self._idle and self._turns < until:
            self._changed.clear()
            await self._changed.wait()


class LongPasses:
    """Runs the long passes of one model service. Belongs to the event loop."""

    def __init__(self, compute: Compute, scheduler: Scheduler, execution: Execution, turns: LoopTurns) -> None:
        self._compute = compute
        self._scheduler = scheduler
        self._execution = execution
        self._turns = turns
        self.beside = asyncio.Semaphore(_MOST)  # held by a batch of long passes that runs beside the loop
        self._step = asyncio.Lock()  # whose turn it is to take a step

    async def run(self, ops: Sequence[Op], tenant_id: str, *, beside: bool) -> tuple[list[Outcome], float]:
        """Return the outcomes and the seconds of this pass alone. ``beside``: the service loop does not wait for it."""
        run = _LongRun(self._compute)
        steps = self._execution.passes_in_steps(ops, lambda: run.limit, run.give_way)
        outcomes: list[Outcome] | None = None
        while outcomes is None:
            async with self._step if beside else nullcontext():
                if beside:
                    await self._turns.others()
                run.limit = self._scheduler.step_tokens(tenant_id)
                outcomes = await self._compute.run(partial(run.step, steps))
        return outcomes, run.own_seconds


class _LongRun:
    """One long batch: how large its steps are, and how much time it and others had so far."""

    def __init__(self, compute: Compute) -> None:
        self.own_seconds = 0.0
        self.limit: int | None = None  # how much the next step may hold, set on the event loop before it
        self._compute = compute
        self._resumed_at = 0.0
        self._others_seconds = dict.fromkeys(Lane, 0.0)  # within its steps
        self._others_turns = dict.fromkeys(Lane, 0)  # that they may still have before it goes on

    @compute_thread
    def step(self, steps: Steps) -> list[Outcome] | None:
        """Take one step; None while there is more to do."""
        self._resumed_at = time.perf_counter()
        try:
            return next(steps)
        finally:
            self._count_own_time()

    @compute_thread
    def give_way(self) -> None:
        """Run what waits in each lane, unless that lane has had more time inside this pass than the pass itself."""
        self._count_own_time()
        for lane in Lane:
            if self._others_seconds[lane] <= self.own_seconds:
                self._others_turns[lane] = _TURNS if lane is Lane.TRAINING else 1
            patience = 0.0
            while self._others_turns[lane] and (seconds := self._compute.run_waiting(lane, patience)):
                self._others_turns[lane] -= 1
                self._others_seconds[lane] += seconds
                patience = _SOON
            if self._others_turns[lane]:  # idle time earns nothing
                self._others_seconds[lane] = max(self._others_seconds[lane], self.own_seconds)
        self._resumed_at = time.perf_counter()

    def _count_own_time(self) -> None:
        now = time.perf_counter()
        self.own_seconds += now - self._resumed_at
        self._resumed_at = now
