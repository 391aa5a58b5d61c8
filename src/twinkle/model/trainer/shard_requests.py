"""Divide the requests of a call over ranks so that each rank has about the same number of tokens.

This is for a caller that has all sequences of a call in one process. Every rank gets every request, with some of its
sequences or none, as a :class:`~twinkle.model.Trainer` with several ranks expects. All sequences of a request with an
objective go to one rank, since an objective can only be evaluated on the whole request.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twinkle.model.objectives.objective import evaluate
from twinkle.model.objectives.validation import check_item
from twinkle.model.types import Datum, TrainFailure, TrainItem, TrainResult

_ANY = 2**62  # stands for limits that the ranks have checked already


@dataclass(frozen=True)
class RequestShards:
    """Which rank computes which sequences. ``owners`` has, for each request, the rank of each of its sequences."""

    items: tuple[TrainItem, ...]
    owners: tuple[tuple[int, ...], ...]
    count: int

    @classmethod
    def by_tokens(cls, items: Sequence[TrainItem], count: int) -> "RequestShards":
        """Assign sequences to ranks, longest first, each to the rank that has the fewest tokens so far.

        Malformed sequences count as length 0; the rank that gets them reports the error.
        """
        units = [(length, index, numbers) for index, item in enumerate(items) for length, numbers in _units(item)]
        ranks = [(0, rank) for rank in range(count)]
        owners = [[0] * _size(item) for item in items]
        for length, index, numbers in sorted(units, key=lambda unit: -unit[0]):
            tokens, rank = heapq.heappop(ranks)
            for number in numbers:
                owners[index][number] = rank
            heapq.heappush(ranks, (tokens + length, rank))
        return cls(tuple(items), tuple(map(tuple, owners)), count)

    def share(self, rank: int) -> list[TrainItem]:
        """Return the requests with the sequences of this rank."""
        return [_part(item, owners, rank) for item, owners in zip(self.items, self.owners, strict=True)]

    def work(self) -> tuple[int, int]:
        """Return how much there is to compute: all tokens, and the sum of the squares of the sequences' lengths."""
        lengths = [_length(datum) for item in self.items if _size(item) for datum in item.data]
        return sum(lengths), sum(length**2 for length in lengths)

    def join(self, results: Sequence[Sequence[TrainResult | TrainFailure]]) -> list[TrainResult | TrainFailure]:
        """Combine the results of all ranks into one result or failure per request."""
        return [self._joined(index, [each[index] for each in results]) for index in range(len(self.items))]

    def _joined(self, index: int, results: Sequence[TrainResult | TrainFailure]) -> TrainResult | TrainFailure:
        item, owners = self.items[index], self.owners[index]
        parts = [result for result in results if isinstance(result, TrainResult)]
        if len(parts) < len(results):
            return next(result for result in results if isinstance(result, TrainFailure))
        logprobs = [iter(part.logprobs) for part in parts]
        values = [iter(part.values) for part in parts]
        routes = [iter(part.routes) for part in parts]
        joined = TrainResult(
            [next(logprobs[owner]) for owner in owners],
            parts[owners[0]].metrics,
            tuple(next(values[owner]) for owner in owners) if item.statistics or item.output != "logps" else (),
            tuple(next(routes[owner]) for owner in owners) if item.records_routes else (),
        )
        if len(set(owners)) == 1 or item.output == "embeddings":  # of embeddings there is no named loss
            return joined
        # The loss reads neither images nor routes, and the ranks have checked them.
        plain = [replace(datum, images=(), routes=None) for datum in item.data]
        checked = check_item(replace(item, data=plain, records_routes=False), vocab_size=_ANY, max_length=_ANY)
        columns = [array.reshape(len(array), -1) for array in joined.logprobs]
        return replace(joined, metrics=evaluate(checked, columns))


def _part(item: TrainItem, owners: Sequence[int], rank: int) -> TrainItem:
    """Return a request with the sequences that one rank owns, and with their numbers in the whole request."""
    own = [number for number, owner in enumerate(owners) if owner == rank]
    return replace(item, data=[item.data[number] for number in own], numbers=tuple(own)) if owners else item


def _units(item: TrainItem) -> list[tuple[int, list[int]]]:
    """Return the units of a request that must stay on one rank: tokens, and the numbers of the sequences."""
    lengths = [_length(datum) for datum in item.data] if _size(item) else []
    if item.objective is not None:
        return [(sum(lengths), list(range(len(lengths))))]
    return [(length, [number]) for number, length in enumerate(lengths)]


def _size(item: TrainItem) -> int:
    return len(item.data) if isinstance(item.data, Sequence) else 0


def _length(datum: Datum) -> int:
    try:
        return int(np.asarray(datum.tokens).size) if isinstance(datum, Datum) else 0
    except (TypeError, ValueError):  # for example ragged lists
        return 0
