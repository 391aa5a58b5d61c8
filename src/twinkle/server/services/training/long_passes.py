"""Passes that take long. They run in steps, and batches of other tenants get their turns between and within these.

One long pass at a time takes a step. Before each step the service loop gets two turns. Where a step can be interrupted,
on a CPU, training of others and sampling may each use as much time inside a pass as its tenant: the time of the pass,
and of short passes of the same tenant that came between.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from twinkle.server.backends.compute_thread import Compute, Lane, compute_thread
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.training.execution import Execution, Steps
from twinkle.server.types import Op, Outcome

_TURNS = 2  # of the loop at a time: a pass, and the optimizer step that waits for it
_MOST = 4  # at once: each holds what it has computed so far


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
        run = _LongRun(self._compute, tenant_id)
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

    def __init__(self, compute: Compute, tenant_id: str) -> None:
        self.own_seconds = 0.0
        self.limit: int | None = None  # how much the next step may hold, set on the event loop before it
        self._compute = compute
        self._tenant_id = tenant_id
        self._resumed_at = 0.0
        self._short_seconds = 0.0  # of the same tenant's short passes, within this one's steps
        self._others_seconds = {Lane.TRAINING: 0.0, Lane.SAMPLING: 0.0}  # within its steps

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
        """Run one piece of each lane, unless that lane has had more time inside this pass than this pass's tenant."""
        self._count_own_time()
        self._count(Lane.TRAINING, self._compute.run_waiting(Lane.STEPS))
        for lane in self._others_seconds:
            tenant_seconds = self.own_seconds + self._short_seconds
            if self._others_seconds[lane] > tenant_seconds:
                continue
            if seconds := self._compute.run_waiting(lane):
                self._count(lane, seconds)
            else:
                self._others_seconds[lane] = tenant_seconds  # idle time earns nothing
        self._resumed_at = time.perf_counter()

    def _count(self, lane: Lane, seconds: Mapping[str, float]) -> None:
        own = seconds.get(self._tenant_id, 0.0)
        self._short_seconds += own
        self._others_seconds[lane] += sum(seconds.values()) - own

    def _count_own_time(self) -> None:
        now = time.perf_counter()
        self.own_seconds += now - self._resumed_at
        self._resumed_at = now
