"""Cuts requests into micro-batches: plain Python over lengths, without torch.

Sequences are taken in the order of their stack, loss and request, so that each stack's rows are one contiguous range
and each request's rows are one group. Sequences beyond the token budget go into the next micro-batch. The gradients of
micro-batches are added up, so the sum does not depend on where the cuts are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True)
class SequenceRef:
    """One sequence of the call: datum number ``datum`` of request number ``item``."""

    item: int
    datum: int
    length: int
    width: int = 1  # targets per token

    @property
    def cells(self) -> int:
        return self.length * self.width


@dataclass(frozen=True)
class MicroBatch:
    """The sequences that one pass computes together."""

    sequences: tuple[SequenceRef, ...]
    recompute: bool = False  # activation checkpointing

    @cached_property
    def by_item(self) -> Mapping[int, tuple[SequenceRef, ...]]:
        """Return the sequences of each request in row order; the sequences of a request are neighbours."""
        return {item: tuple(run) for item, run in groupby(self.sequences, key=lambda sequence: sequence.item)}

    @property
    def tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    @property
    def items(self) -> tuple[int, ...]:
        """Return the numbers of the requests in this micro-batch, in row order."""
        return tuple(self.by_item)


@dataclass(frozen=True)
class Budget:
    """How many tokens a forward and backward pass may have.

    ``tokens``: with all activations kept. ``tokens_recomputed``: with activation checkpointing, which takes less memory
    per token. ``cells``: the most targets of all tokens together, where tokens have several; each takes some 40 bytes.
    Logits that a request asked for count as targets here. ``logits``: the most of them that one sequence may have.
    ``most_tokens``: how many tokens fit in memory with all activations kept; ``tokens`` is less if a lower limit is
    configured. ``longest_sequence``: a sequence of this length is accepted although only part of the memory is free at
    the moment.
    """

    tokens: int
    tokens_recomputed: int
    cells: int = 2**20
    most_tokens: int = 0
    longest_sequence: int = 0
    logits: int = 0

    def leaves_room(self, batch: MicroBatch, *, train: bool, padded: bool) -> bool:
        """Return whether this micro-batch uses at most half of the memory for activations."""
        most = max(self.tokens, self.most_tokens) if train and not batch.recompute else self.tokens_recomputed
        rows = len(batch.sequences) * max(each.length for each in batch.sequences) if padded else batch.tokens
        return 2 * rows <= most

    def half(self) -> "Budget":
        """Return the budget for other calls while a batch that :meth:`leaves_room` is interrupted.

        The longest sequence that is accepted stays the same.
        """
        most = max(self.tokens, self.most_tokens) // 2
        return Budget(
            max(1, min(self.tokens, most)),
            max(1, self.tokens_recomputed // 2),
            self.cells,
            most,
            self.longest,
            self.logits // 2,
        )

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence that is accepted."""
        return max(self.tokens, self.tokens_recomputed, self.longest_sequence)


def plan(
    sequences: Sequence[SequenceRef],
    budget: Budget,
    *,
    padded: bool = False,
    length_class: Callable[[int], int] = lambda length: 0,
    fits: Callable[[frozenset[int]], bool] = lambda items: True,
    at_least: int = 1,
) -> list[MicroBatch]:
    """Fill micro-batches in the given order; sequences above ``budget.tokens`` get batches with recomputed activations.

    padded: every sequence takes as many rows as the longest of its batch.
    length_class: sequences of different classes never share a batch, because some RoPE variants depend on the longest
    position of a batch.
    fits: returns whether the adapters of these requests can be on the device together.
    at_least: aim at this many micro-batches of each kind, where there are enough sequences: a pipeline needs several.
    """
    by_kind: dict[tuple[bool, int], list[SequenceRef]] = {}
    for sequence in sequences:
        by_kind.setdefault((sequence.length > budget.tokens, length_class(sequence.length)), []).append(sequence)
    return [
        MicroBatch(tuple(part), recompute)
        for (recompute, _), kind in sorted(by_kind.items(), key=lambda entry: entry[0])
        for part in _fill(
            kind, budget.tokens_recomputed if recompute else budget.tokens, budget.cells, padded, fits, at_least
        )
    ]


def schedules(
    batches: Sequence[MicroBatch], most: int, fits: Callable[[frozenset[int]], bool]
) -> list[tuple[MicroBatch, ...]]:
    """Group consecutive micro-batches that run through a pipeline together: at most ``most``, with all their adapters.

    fits: see :func:`plan`. A micro-batch fits alone.
    """
    groups: list[list[MicroBatch]] = []
    items: frozenset[int] = frozenset()
    for batch in batches:
        joined = items | frozenset(batch.items)
        if not groups or len(groups[-1]) == most or not fits(joined):
            groups.append([])
            joined = frozenset(batch.items)
        groups[-1].append(batch)
        items = joined
    return [tuple(group) for group in groups]


def _fill(
    sequences: Sequence[SequenceRef],
    limit: int,
    cells: int,
    padded: bool,
    fits: Callable[[frozenset[int]], bool],
    at_least: int,
) -> Iterator[list[SequenceRef]]:
    """Yield batches of about equal size.

    Only a batch of a single sequence may exceed the limits of tokens and cells.
    """
    most_cells = max(cells, limit)  # with one target per token, only the limit of tokens matters
    at_least = min(at_least, len(sequences))
    count = max(-(-sum(sequence.length for sequence in sequences) // limit), at_least)
    even = -(-sum(sequence.length for sequence in sequences) // count)
    current: list[SequenceRef] = []
    items: frozenset[int] = frozenset()
    total = longest = wide = yielded = 0
    for place, sequence in enumerate(sequences):
        total += sequence.length
        wide += sequence.cells
        longest = max(longest, sequence.length)
        rows = (len(current) + 1) * longest if padded else total
        joined = items if sequence.item in items else items | {sequence.item}
        # A batch may become larger than the others by its last sequence; in a pipeline by half of it, because there
        # the others wait for the largest.
        over = sequence.length if at_least == 1 else sequence.length // 2
        full = rows > limit or wide > most_cells or total - over >= even
        full = full or len(sequences) - place < at_least - yielded  # each of the rest must be a batch of its own
        full = full or (joined is not items and not fits(joined))
        if current and full:
            yield current
            current, joined = [], frozenset({sequence.item})
            total = longest = sequence.length
            wide = sequence.cells
            yielded += 1
        current.append(sequence)
        items = joined
    if current:
        yield current


def cut(batch: MicroBatch, tokens: int | None) -> list[MicroBatch]:
    """Split a batch into batches of at most ``tokens`` tokens; None leaves it as it is.

    A single sequence that is longer becomes a batch by itself.
    """
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
    """Return the same sequences in a form that needs less memory: two batches, or one sequence recomputed.

    Returns [] if the batch is a single sequence that is recomputed already.
    """
    if len(batch.sequences) > 1:
        middle = len(batch.sequences) // 2
        parts = batch.sequences[:middle], batch.sequences[middle:]
        return [MicroBatch(part, batch.recompute) for part in parts]
    return [] if batch.recompute else [MicroBatch(batch.sequences, recompute=True)]
