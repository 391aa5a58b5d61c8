"""Cuts requests into micro-batches: plain Python over lengths, without torch.

Sequences are taken in the order of their stack, loss and request, so that each stack's rows are one contiguous range
and each request's rows one group. What exceeds the token budget goes into the next micro-batch; gradients add up to the
same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True)
class SequenceRef:
    """One sequence of the call: the datum ``datum`` of the request ``item``."""

    item: int
    datum: int
    length: int
    width: int = 1  # targets a token

    @property
    def cells(self) -> int:
        return self.length * self.width


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass computes."""

    sequences: tuple[SequenceRef, ...]
    recompute: bool = False  # activation checkpointing

    @cached_property
    def by_item(self) -> Mapping[int, tuple[SequenceRef, ...]]:
        """The sequences of each request in this micro-batch, in row order: those of a request are neighbours."""
        return {item: tuple(run) for item, run in groupby(self.sequences, key=lambda sequence: sequence.item)}

    @property
    def tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    @property
    def items(self) -> tuple[int, ...]:
        """The requests in this micro-batch, in row order."""
        return tuple(self.by_item)


@dataclass(frozen=True)
class Budget:
    """Tokens a forward and backward pass may hold, with all activations kept and with them recomputed.

    ``cells``: targets of all those tokens, where there are several a token. Each takes some 40 bytes.
    ``most_tokens``: how many fit in memory with all activations kept; ``tokens`` may be fewer, as configured.
    ``longest_sequence``: that is accepted all the same, where only a part of the memory is free for now.
    """

    tokens: int
    tokens_recomputed: int
    cells: int = 2**20
    most_tokens: int = 0
    longest_sequence: int = 0

    def leaves_room(self, batch: MicroBatch, *, train: bool, padded: bool) -> bool:
        """Whether half of the memory for activations is left beside this micro-batch."""
        most = max(self.tokens, self.most_tokens) if train and not batch.recompute else self.tokens_recomputed
        rows = len(batch.sequences) * max(each.length for each in batch.sequences) if padded else batch.tokens
        return 2 * rows <= most

    def half(self) -> "Budget":
        """What is left for others beside a batch that leaves room. Sequences may be as long as before."""
        most = max(self.tokens, self.most_tokens) // 2
        return Budget(
            max(1, min(self.tokens, most)), max(1, self.tokens_recomputed // 2), self.cells, most, self.longest
        )

    @property
    def longest(self) -> int:
        return max(self.tokens, self.tokens_recomputed, self.longest_sequence)


def plan(
    sequences: Sequence[SequenceRef],
    budget: Budget,
    *,
    padded: bool = False,
    length_class: Callable[[int], int] = lambda length: 0,
    fits: Callable[[frozenset[int]], bool] = lambda items: True,
) -> list[MicroBatch]:
    """Fill micro-batches in the given order.

    padded: every sequence takes as many rows as the longest of its batch.
    length_class: sequences of different classes never share a batch (RoPE that looks at the longest position).
    fits: whether the adapters of these requests can be on the device together.
    """
    by_kind: dict[tuple[bool, int], list[SequenceRef]] = {}
    for sequence in sequences:
        by_kind.setdefault((sequence.length > budget.tokens, length_class(sequence.length)), []).append(sequence)
    return [
        MicroBatch(tuple(part), recompute)
        for (recompute, _), kind in sorted(by_kind.items(), key=lambda entry: entry[0])
        for part in _fill(kind, budget.tokens_recomputed if recompute else budget.tokens, budget.cells, padded, fits)
    ]


def _fill(
    sequences: Sequence[SequenceRef], limit: int, cells: int, padded: bool, fits: Callable[[frozenset[int]], bool]
) -> Iterator[list[SequenceRef]]:
    """Batches of about equal size, none above the limit of tokens; above that of cells at most a sequence alone."""
    most_cells = max(cells, limit)  # with one target a token, tokens alone decide
    count = -(-sum(sequence.length for sequence in sequences) // limit)
    even = -(-sum(sequence.length for sequence in sequences) // count)
    current: list[SequenceRef] = []
    items: frozenset[int] = frozenset()
    total = longest = wide = 0
    for sequence in sequences:
        total += sequence.length
        wide += sequence.cells
        longest = max(longest, sequence.length)
        rows = (len(current) + 1) * longest if padded else total
        joined = items if sequence.item in items else items | {sequence.item}
        full = rows > limit or wide > most_cells or total - sequence.length >= even
        full = full or (joined is not items and not fits(joined))
        if current and full:
            yield current
            current, joined = [], frozenset({sequence.item})
            total = longest = sequence.length
            wide = sequence.cells
        current.append(sequence)
        items = joined
    if current:
        yield current


def cut(batch: MicroBatch, tokens: int | None) -> list[MicroBatch]:
    """The same sequences in batches of at most so many tokens each, or one sequence that is longer; None: as it is."""
    if tokens is None:
        return [batch]
    parts: list[list[SequenceRef]] = []
    total = 0
    for sequence in batch.sequences:
        total += sequence.length
        if not parts or total > tokens:
            parts.append([])
            total = sequence.length
        parts[-1].append(sequence)
    return [MicroBatch(tuple(part), batch.recompute) for part in parts]


def halves(batch: MicroBatch) -> list[MicroBatch]:
    """The same sequences with less memory: two batches, or one sequence recomputed; [] when nothing is left to try."""
    if len(batch.sequences) > 1:
        middle = len(batch.sequences) // 2
        parts = batch.sequences[:middle], batch.sequences[middle:]
        return [MicroBatch(part, batch.recompute) for part in parts]
    return [] if batch.recompute else [MicroBatch(batch.sequences, recompute=True)]
