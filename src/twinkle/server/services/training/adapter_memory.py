"""Adapters in host memory: how much there may be of them, and which one goes to disk when there is too much.

An adapter on disk is in its snapshot, weights, optimizer and open gradient alike; it comes back with its next op, and
its tenant cannot tell. Where the device is a CPU, adapters on the device are in host memory, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from twinkle.errors import OverloadedError, UserError
from twinkle.model.types import LoraSpec
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.services.training.live_adapter import LiveAdapter, Place
from twinkle.server.types import Budget

__all__ = ["AdapterMemory"]


class AdapterMemory:
    """Of the adapters of one base model. Belongs to one event loop."""

    def __init__(self, trainer: TrainingBackend, limit: int) -> None:
        self.limit = limit
        self._trainer = trainer
        self._stuck = False  # there was too much, and nothing could leave

    @property
    def budget(self) -> Budget:
        return Budget("host_adapters", self._trainer.host_bytes(), self.limit)

    def size_of(self, spec: LoraSpec) -> int:
        """Return the host memory that an adapter of this shape takes at most; 0 for one that can never be."""
        try:
            return self._trainer.host_bytes_of(spec)
        except UserError:
            return 0

    def growth(self, spec: LoraSpec) -> int:
        """Return by how much memory grows with one more adapter, others having gone to disk where they must."""
        return max(0, min(self.size_of(spec), self.limit - self._trainer.host_bytes()))

    def lacks(self, size: int = 0) -> bool:
        """Whether ``size`` more bytes would pass the limit. One adapter may be there however large it is."""
        used = self._trainer.host_bytes()
        return used > 0 and used + size > self.limit

    def check(self) -> None:
        """Raise OverloadedError if no more adapters can be taken: the present ones cannot go to disk."""
        budget = self.budget
        if self._stuck and budget.used > budget.limit:
            raise OverloadedError(
                "bytes of adapters in host memory", budget.used, budget.limit, "max_host_adapter_bytes"
            )

    def next_to_leave(
        self, adapters: Iterable[LiveAdapter], may_leave: Callable[[LiveAdapter], bool]
    ) -> LiveAdapter | None:
        """Return the adapter that goes to disk next: of the tenant with most adapters here, the longest unused."""
        here = [adapter for adapter in adapters if adapter.place is Place.TRAINER]
        counts = Counter(adapter.run.tenant_id for adapter in here)
        candidates = [adapter for adapter in here if may_leave(adapter)]
        self._stuck = not candidates
        return min(candidates, key=lambda a: (-counts[a.run.tenant_id], a.used_at), default=None)
