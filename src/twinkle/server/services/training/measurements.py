"""Measures training: loss, tokens, learning rate and gradient norm of each window that an optimizer step closes.

A window is the passes between two optimizer steps. Its loss is a mean: the sum of the losses of its forward_backward
passes, divided by a count that depends on the loss:

- Tinker's cross_entropy: the absolute weights of its targets; every target counts 1 where there are no weights
- Tinker's other losses: the targets whose advantage is not zero, so that prompts do not count
  (all targets where there are no advantages); a preference loss is a mean already, and counts 1 for each pass
- the library's losses: the tokens that the loss itself counts, or the passes if the loss is a mean already

The compute thread collects the numbers; a task on the event loop writes them a second later, many at once. A crash may
lose that second: steps that are replayed are measured again, but steps that a snapshot covers are not.
"""

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from twinkle.model.csr import listed
from twinkle.model.types import Datum
from twinkle.server.backends.compute_thread import compute_thread, event_loop
from twinkle.server.state.errors import DatabaseUnavailableError, StorageFullError
from twinkle.server.state.records.run_metrics import RunMetrics
from twinkle.server.types import MeasuredStep, TrainPass

logger = logging.getLogger(__name__)

_WRITE_SECONDS = 1.0
_MOST_PENDING = 65_536  # steps kept while the database is unavailable; beyond that the oldest are dropped


@dataclass
class _Window:
    loss: float = 0.0
    count: float = 0.0
    tokens: int = 0
    grad_norm: float | None = None


class RunMeasurements:
    """Collects the measurements of one model's adapters, and writes them to the database."""

    def __init__(self, run_metrics: RunMetrics) -> None:
        self._run_metrics = run_metrics
        self._windows: dict[str, _Window] = {}
        self._pending: deque[MeasuredStep] = deque()
        self._writing: asyncio.Task[None] | None = None

    # --- in the compute thread ----------------------------------------------------------------------------------------

    @compute_thread
    def passed(self, run_id: str, loss: float, count: float, tokens: int) -> None:
        """Add a forward_backward pass to the open window. ``count``: what the sum ``loss`` is divided by for a mean."""
        window = self._windows.setdefault(run_id, _Window())
        window.loss += loss
        window.count += count
        window.tokens += tokens

    @compute_thread
    def clipped(self, run_id: str, norm: float) -> None:
        """Note the norm of the window's gradient before it was clipped."""
        self._windows.setdefault(run_id, _Window()).grad_norm = norm

    @compute_thread
    def stepped(self, run_id: str, seq: int, learning_rate: float | None, grad_norm: float | None = None) -> None:
        """Close the window with an optimizer step. ``grad_norm``: before clipping; None: the norm from ``clipped``."""
        window = self._windows.pop(run_id, _Window())
        values = {
            "loss": window.loss / window.count if window.count > 0 else None,
            "tokens": float(window.tokens),
            "learning_rate": learning_rate,
            "grad_norm": window.grad_norm if grad_norm is None else grad_norm,
        }
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._pending.append(MeasuredStep(run_id, seq, time.time(), known))

    @compute_thread
    def dropped(self, run_id: str) -> None:
        """Forget what was measured of the open window, because its gradient is gone."""
        self._windows.pop(run_id, None)

    # --- on the event loop --------------------------------------------------------------------------------------------

    @event_loop
    def write_soon(self) -> None:
        """Start the task that writes measured steps, if there are any and it does not run yet."""
        if self._pending and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write_until_done())

    async def _write_until_done(self) -> None:
        while self._pending:
            await asyncio.sleep(_WRITE_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Write all measured steps to the database.

        While the disk is full or the database is unavailable, the latest 65,536 steps are kept for the next call.
        """
        steps = [self._pending.popleft() for _ in range(len(self._pending))]
        if not steps:
            return
        try:
            await self._run_metrics.add_steps(steps)
        except (StorageFullError, DatabaseUnavailableError) as error:
            logger.error("measurements of %d steps could not be written to the database yet: %s", len(steps), error)
            room = max(0, _MOST_PENDING - len(self._pending))
            self._pending.extendleft(reversed(steps[len(steps) - min(room, len(steps)) :]))

    async def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        await self.write()


def counted(asked: TrainPass) -> float:
    """Return the count by which the summed loss of a pass is divided; 1 for a preference loss, a mean already."""
    return 1.0 if asked.preference is not None else sum(_counted(datum, asked.loss) for datum in asked.data)


def _counted(datum: Datum, loss: str) -> float:
    if loss == "cross_entropy" and datum.weights is not None:
        return float(np.abs(listed(datum.weights)).sum())
    if loss != "cross_entropy" and "advantages" in datum.extras:
        return float(np.count_nonzero(listed(datum.extras["advantages"])))
    return float(datum.targets.size)
