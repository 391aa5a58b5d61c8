"""The objects that a worker holds, by id, and the state of the iteration over each."""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import GoneError, InvalidInputError, NotFoundError, UserError

_KEPT = 16


class UnknownProcessorError(NotFoundError):
    """No processor of the session has this id. Processors end with their session, its worker or the server."""

    def __init__(self, field: str) -> None:
        super().__init__("processor", field)
        self.field = field
        self.args = (
            f"{field}: no such processor in this session; processors end with their session, the session's worker or "
            "the server: create it again",
        )


class Pass:
    """One iteration over an object. Once it has ended or failed, it returns no item until it begins anew."""

    def __init__(self) -> None:
        self._items: Iterator[Any] | None = None
        self._over: Exception | None = None
        self._put_back: list[Any] = []  # the item that comes next, if it was put back

    def begin(self, thing: Any) -> None:
        self._items, self._over, self._put_back = iter(thing), None, []

    def forget(self) -> None:
        """Make the next item begin a new pass, because the object was changed."""
        self._items, self._over, self._put_back = None, None, []

    def next(self, thing: Any) -> Any:
        if self._put_back:
            return self._put_back.pop()
        if self._over is not None:
            raise self._over
        if self._items is None:
            self.begin(thing)
        assert self._items is not None
        # Set before the call: an iterator that has raised would only report its end the next time.
        self._over = InvalidInputError("__next__", "after an error", "__iter__ first, which begins a new pass")
        try:
            item = next(self._items)
        except StopIteration:
            self._over = GoneError("Iterator exhausted")
            raise self._over from None
        self._over = None
        return item

    def put_back(self, item: Any) -> None:
        """Make :meth:`next` return ``item``, which it returned last, once more."""
        self._put_back = [item]


class NoRoomError(Exception):
    """A batch of ``size`` bytes does not fit into the room that other sessions leave within the limits."""

    def __init__(self, size: int) -> None:
        super().__init__(f"no room for a batch of {size} bytes")
        self.size = size


class KeptBatches:
    """The last 16 batches of each loader of a session as JSON, by loader and number, counted over the loader's life.

    All kept batches of the session together have a limit in bytes: the oldest are dropped to make room for new ones.
    ``most_of_one``: the most bytes of one batch.
    """

    def __init__(self, most_of_one: int) -> None:
        self._most_of_one = most_of_one
        self._texts: OrderedDict[tuple[str, int], str] = OrderedDict()  # oldest first
        self._served: Counter[str] = Counter()
        self.limit = 2**62  # bytes that other sessions leave; the server sends it with every request
        self.used = 0

    def add(self, loader: str, text: str) -> int:
        number, size = self._served[loader], len(text)  # JSON as we write it is ASCII
        if size > self._most_of_one:
            raise UserError(f"result: {size} bytes of JSON, allowed: at most {self._most_of_one}")
        if size > self.limit:
            raise NoRoomError(size)
        self._served[loader] += 1
        while self._texts and self.used + size > self.limit:
            self._drop(*next(iter(self._texts)))
        self._texts[loader, number] = text
        self.used += size
        for old in self._numbers(loader)[:-_KEPT]:
            self._drop(loader, old)
        return number

    def get(self, loader: str, number: int) -> str:
        if (loader, number) in self._texts:
            return self._texts[loader, number]
        kept, served = self._numbers(loader), self._served[loader]
        if 0 <= number < served:
            first = f"now from {kept[0]}" if kept else "now none"
            raise GoneError(
                f"batch {number} is not kept any more: the last {_KEPT} are, {first}, or fewer if "
                "limits.max_referenced_batch_bytes_per_tenant or max_referenced_batch_bytes leaves no room"
            )
        allowed = f"0 to {served - 1}, the batches served" if served else "none: no batch was served yet"
        raise InvalidInputError("number", number, allowed)

    def forget(self, loader: str) -> None:
        self._served.pop(loader, None)
        for number in self._numbers(loader):
            self._drop(loader, number)

    def _numbers(self, loader: str) -> list[int]:
        return [number for owner, number in self._texts if owner == loader]

    def _drop(self, loader: str, number: int) -> None:
        self.used -= len(self._texts.pop((loader, number)))


@dataclass(frozen=True)
class Live:
    """One object of a session. ``processor_type`` and ``class_name`` are names of the catalog."""

    processor_id: str
    processor_type: str
    class_name: str
    thing: Any
    course: Pass = field(default_factory=Pass)


class LiveObjects:
    """All objects of a session by id, and the batches that its loaders keep."""

    def __init__(self, batches: KeptBatches) -> None:
        self.batches = batches
        self._by_id: dict[str, Live] = {}

    def ids(self) -> list[str]:
        return list(self._by_id)

    def add(self, processor_type: str, class_name: str, thing: Any) -> Live:
        live = Live(f"pid:{secrets.token_hex(16)}", processor_type, class_name, thing)
        self._by_id[live.processor_id] = live
        return live

    def get(self, field: str, processor_id: object) -> Live:
        live = self._by_id.get(processor_id) if isinstance(processor_id, str) else None
        if live is None:
            raise UnknownProcessorError(field)
        return live

    def remove(self, live: Live) -> None:
        del self._by_id[live.processor_id]
        self.batches.forget(live.processor_id)
