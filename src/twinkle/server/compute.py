"""The one thread that owns the model. Training batches and sampling turns take it first come, first served."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Compute:
    """Runs blocking work off the event loop, one piece at a time and in order.

    The loop of each service has at most one piece waiting here, so that training and sampling alternate: a long rollout
    does not keep an optimizer step waiting for longer than one turn, nor the reverse. Saves and loads come in between.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=True)
