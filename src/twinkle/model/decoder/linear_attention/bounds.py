"""Where the sequences of a packed row begin, in the forms that layers with state along the sequence need.

The delta rule is computed in chunks of C rows. A sequence has ⌈length / C⌉ of them; the last one is filled up. Chunks
are ordered by their number in their sequence, and among equal numbers the sequence with most chunks comes first. So the
chunks of one step of the recurrence are neighbours, and the sequences that go on after a step are its first ones.

Shapes: T rows, N sequences, C rows of a chunk.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from twinkle.model.decoder.transfer import to_device

_LARGEST_CHUNK = 64
_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class Bounds:
    """The sequences of a packed row, and their chunks."""

    lengths: tuple[int, ...]
    chunk: int  # C
    active: tuple[int, ...]  # for each step, how many sequences have a chunk with this number
    order: tuple[int, ...]  # the numbers of the sequences, that with most chunks first
    starts: tuple[int, ...]  # the first row of each sequence
    places_T: Tensor  # int64: the place of each row among the rows of all chunks
    ends_N1: Tensor  # int64: 0, then cumulative lengths
    positions_T: Tensor  # int32: the number of each row in its sequence
    _firsts: dict[int, Tensor] = field(default_factory=dict)  # see clear_first

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> "Bounds":
        chunk = min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, 1 << (max(lengths) - 1).bit_length()))
        sizes_N = np.array(lengths)
        chunks_N = -(-sizes_N // chunk)
        order_N = np.argsort(-chunks_N, kind="stable")
        active = [int((chunks_N > step).sum()) for step in range(int(chunks_N.max()))]
        first_chunks = np.array([0, *accumulate(active)])  # of each step
        rank_N = order_N.argsort()
        ends = np.concatenate([[0], sizes_N.cumsum()])
        sequence_T = np.repeat(np.arange(len(lengths)), sizes_N)
        positions_T = np.arange(ends[-1]) - ends[sequence_T]
        places_T = (first_chunks[positions_T // chunk] + rank_N[sequence_T]) * chunk + positions_T % chunk
        return cls(
            lengths,
            chunk,
            tuple(active),
            tuple(order_N.tolist()),
            tuple(ends[:-1].tolist()),
            to_device(torch.from_numpy(places_T), device),
            to_device(torch.from_numpy(ends), device),
            to_device(torch.from_numpy(positions_T.astype(np.int32)), device),
        )

    @property
    def chunks(self) -> int:
        """Return the number of chunks of all sequences."""
        return sum(self.active)

    def clear_first(self, rows_SF: Tensor, back: int) -> Tensor:
        """Clear, in place, what rows get of the row ``back`` before them where that one is of another sequence.

        The first of ``rows_SF`` belongs to row number ``back``.
        """
        if back not in self._firsts:
            starts_N1, lengths_N1 = (np.array(each)[1:, None] for each in (self.starts, self.lengths))
            steps_B = np.arange(back)
            rows = (starts_N1 + steps_B - back)[np.broadcast_to(steps_B, (len(starts_N1), back)) < lengths_N1]
            self._firsts[back] = to_device(torch.from_numpy(rows[rows >= 0]), self.places_T.device)
        return rows_SF.index_fill_(0, self._firsts[back], 0)
