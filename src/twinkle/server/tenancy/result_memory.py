"""The memory of results, of all services in one process: how much there is, and which result leaves it first.

A result is counted from the moment it exists until it is gone, fetched or not. When there are too many bytes, the
tenant with most of them loses its oldest results from memory: first those that it has fetched, then those that the
journal can give back. What is being sent to a client stays until that has ended.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from twinkle.errors import OverloadedError, QuotaError
from twinkle.server.types import Budget

__all__ = ["HeldResult", "ResultMemory"]

_KEY = "max_result_bytes"


@dataclass(eq=False)
class HeldResult:
    """One result in memory. ``drop`` makes its owner let go of it; it is called on the event loop."""

    tenant_id: str
    size: int
    drop: Callable[[], None]
    sending: int = 0  # how many answers are being written from it


@dataclass
class _Share:
    """The results of one tenant that may leave memory, oldest first."""

    fetched: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)
    on_disk: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)  # and not fetched yet
    bytes: int = 0

    def add(self, result: HeldResult, *, fetched: bool) -> None:
        self.remove(result)
        (self.fetched if fetched else self.on_disk)[id(result)] = result
        self.bytes += result.size

    def remove(self, result: HeldResult) -> None:
        for results in (self.fetched, self.on_disk):
            if results.pop(id(result), None) is not None:
                self.bytes -= result.size

    def first(self) -> HeldResult | None:
        for results in (self.fetched, self.on_disk):
            for result in results.values():
                if not result.sending:
                    return result
        return None


class ResultMemory:
    """Belongs to one event loop. ``limit`` in bytes."""

    def __init__(self, limit: int = 2**62) -> None:
        self.limit = limit
        self._bytes: Counter[str] = Counter()  # by tenant
        self._sending: Counter[str] = Counter()  # of these, in answers that are being written
        self._shares: dict[str, _Share] = {}

    @property
    def used(self) -> int:
        return self._bytes.total()

    @property
    def budget(self) -> Budget:
        return Budget("results", self.used, self.limit)

    def add(self, result: HeldResult) -> None:
        """Count a result, which cannot leave yet, and make room for it."""
        self._bytes[result.tenant_id] += result.size
        self.shrink_to(self.limit)

    def may_leave(self, result: HeldResult, *, fetched: bool) -> None:
        """Note that nothing is lost when the result leaves memory: it was fetched, or the journal has it."""
        self._shares.setdefault(result.tenant_id, _Share()).add(result, fetched=fetched)
        self.shrink_to(self.limit)

    def remove(self, result: HeldResult) -> None:
        """Stop counting a result that its owner has let go of."""
        self._bytes[result.tenant_id] -= result.size
        share = self._shares.get(result.tenant_id)
        if share is not None:
            share.remove(result)
            if not share.bytes:
                del self._shares[result.tenant_id]
        if not self._bytes[result.tenant_id]:
            del self._bytes[result.tenant_id]

    def begin_sending(self, result: HeldResult) -> None:
        if not result.sending:
            self._sending[result.tenant_id] += result.size
        result.sending += 1

    def end_sending(self, result: HeldResult) -> None:
        result.sending -= 1
        if not result.sending:
            self._count_sent(result.tenant_id, result.size)
        self.shrink_to(self.limit)

    def check(self, tenant_id: str) -> None:
        """Raise if no more results can be taken: QuotaError for a tenant's own share, OverloadedError for all."""
        share, own = self.limit // 2, self._bytes[tenant_id]
        if own >= share and self._must_stay(tenant_id) >= share:
            raise QuotaError("bytes of results", own, share, _KEY)
        if self.used >= self.limit and sum(map(self._must_stay, list(self._bytes))) >= self.limit:
            raise OverloadedError("bytes of results", self.used, self.limit, _KEY)

    @contextmanager
    def reading(self, tenant_id: str, size: int) -> Iterator[None]:
        """Count ``size`` bytes that come back from disk to be sent; OverloadedError while too many are being sent.

        A tenant has half of the memory at most. It is told 503, not 429, which SDKs take for the end of a future.
        """
        for sending, limit in ((self._sending[tenant_id], self.limit // 2), (self._sending.total(), self.limit)):
            if sending and sending + size > limit:
                raise OverloadedError("bytes of results being sent", sending, limit, _KEY, retry_after=1)
        self._sending[tenant_id] += size
        try:
            yield
        finally:
            self._count_sent(tenant_id, size)

    def shrink_to(self, limit: int) -> int:
        """Let results go until ``limit`` bytes are left, or nothing may leave any more; return the bytes that left."""
        before = used = self.used
        if used <= limit:
            return 0
        # Tenants with most bytes first; one with nothing to give is not asked again.
        candidates = {tenant_id: self._bytes[tenant_id] for tenant_id in self._shares}
        while used > limit and candidates:
            tenant_id = max(candidates, key=candidates.__getitem__)
            share = self._shares.get(tenant_id)
            result = None if share is None else share.first()
            if result is None:
                del candidates[tenant_id]
                continue
            result.drop()
            candidates[tenant_id] -= result.size
            used -= result.size
        return before - used

    def _count_sent(self, tenant_id: str, size: int) -> None:
        self._sending[tenant_id] -= size
        if not self._sending[tenant_id]:
            del self._sending[tenant_id]

    def _must_stay(self, tenant_id: str) -> int:
        share = self._shares.get(tenant_id)
        return self._bytes[tenant_id] - (0 if share is None else share.bytes)
