"""Long passes, which run in steps; other batches, above all of other tenants, run between the steps and, on a CPU,
within them.

One long pass at a time takes a step. Before each step of a long pass in the background the service loop may run two
batches. Where a step can be interrupted, as on a CPU, other tenants' training may use as much time within the steps of
a long pass as the tenant of the pass uses: the time of the pass itself, plus that of the same tenant's short passes in
between. Sampling gets its share of the time there, as in the middle of all passes.
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

_TURNS = 2  # batches of the loop before each step: a pass, and the optimizer step that follows it
_MOST = 4  # long batches in the background at once: each holds the memory of its results so far


class LoopTurns:
    """Counts the turns of the service loop, so that a long pass can wait for some of them between two steps.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._idle = True  # the loop has no batch to run, or does not run at all
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Note that the loop looks for a batch."""
        self._idle = False

    def end(self, *, idle: bool) -> None:
        """Note that a batch has ended or, if ``idle``, that there is none."""
        self._turns += not idle
        self._idle = idle
        self._changed.set()

    async def others(self) -> None:
        """Wait until the loop has run two more batches or has none to run. The loop itself must not await this."""
        until = self._turns + _TURNS
        while not self._idle and self._turns < until:
            self._changed.clear()
            await self._changed.wait()


class LongPasses:
    """Runs the long passes of one training service. Belongs to the event loop."""

    def __init__(self, compute: Compute, scheduler: Scheduler, execution: Execution, turns: LoopTurns) -> None:
        self._compute = compute
        self._scheduler = scheduler
        self._execution = execution
        self._turns = turns
        self.beside = asyncio.Semaphore(_MOST)  # held by each long batch that runs in the background
        self._step = asyncio.Lock()  # held by the long batch that takes a step

    async def run(self, ops: Sequence[Op], tenant_id: str, *, beside: bool) -> tuple[list[Outcome], float]:
        """Run a long batch; return its outcomes and the seconds of its own steps, without other work within them.

        ``beside``: it runs in the background, and the service loop does not wait for it.
        """
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
    """One long batch: the size of its next step, and the time that it and others have used so far."""

    def __init__(self, compute: Compute, tenant_id: str) -> None:
        self.own_seconds = 0.0
        self.limit: int | None = None  # the most tokens of the next step, set on the event loop before the step
        self._compute = compute
        self._tenant_id = tenant_id
        self._resumed_at = 0.0
        self._short_seconds = 0.0  # time of the same tenant's short passes within the steps of this batch
        self._others_seconds = 0.0  # time of other tenants' training within the steps

    @compute_thread
    def step(self, steps: Steps) -> list[Outcome] | None:
        """Take one step; return the outcomes after the last step, else None."""
        self._resumed_at = time.perf_counter()
        try:
            return next(steps)
        finally:
            self._count_own_time()

    @compute_thread
    def give_way(self) -> None:
        """Let other work that waits run in the middle of a step: an optimizer step, then a piece of training, then
        sampling until it has had its share.

        Training is skipped if that of other tenants has used more time within this pass than the tenant of the pass.
        """
        self._count_own_time()
        self._count(self._compute.run_waiting(Lane.STEPS))
        tenant_seconds = self.own_seconds + self._short_seconds
        if self._others_seconds <= tenant_seconds:
            if seconds := self._compute.run_waiting(Lane.TRAINING):
                self._count(seconds)
            else:
                self._others_seconds = tenant_seconds  # without work, no time is saved up for later
        self._compute.let_sampling_run()
        self._resumed_at = time.perf_counter()

    def _count(self, seconds: Mapping[str, float]) -> None:
        own = seconds.get(self._tenant_id, 0.0)
        self._short_seconds += own
        self._others_seconds += sum(seconds.values()) - own

    def _count_own_time(self) -> None:
        now = time.perf_counter()
        self.own_seconds += now - self._resumed_at
        self._resumed_at = now
