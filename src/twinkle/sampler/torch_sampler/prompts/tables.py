"""The layout of a prompt pass as integer tables, in one array that is copied to the device at once.

A pass computes spans of several sequences, one after the other; its rows are the tokens of all spans. Captured graphs
read everything that differs between passes from these tables, whose places in the array depend on the bucket alone.
Rows after the last span are padding: they write their keys and values to a reserved cache block.

Shapes: T rows of a bucket, S spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinkle.model.types import IntArray
from twinkle.sampler.torch_sampler.cache import BLOCK, blocks_for
from twinkle.sampler.torch_sampler.cached_attention import Span

ATTENTION_ROWS = 64  # rows of one span that an attention program takes
HEAD_ROWS = 16  # last rows of one version that a LoRA program of the head takes
MOST_SPANS = 64
MOST_VERSIONS = 16  # of a pass
MOST_BLOCKS = 2**15  # cache blocks of all spans together
TILE = 4  # columns of a tile

Int32Array = NDArray[np.int32]
SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # rows of the buckets


@dataclass(frozen=True)
class Bucket:
    """A size of passes, and the places of its tables in the array.

    ids, positions, slots and versions have one entry for each row; a slot is block × BLOCK + offset in the cache, and
    rows without a version have the number MOST_VERSIONS. ``last`` has the rows from which tokens are drawn. An
    attention tile has the columns first row, end of the span, index of the first row's token, and place of the
    sequence's first block in ``blocks``. A LoRA tile has the columns number of the version, first row, and end of the
    version's rows; those of the head count rows of ``last``. Unused tiles are zero.
    """

    rows: int

    @property
    def lora_rows(self) -> int:
        """Return how many rows of one version a LoRA program takes: few in small passes, to use the whole device."""
        return 32 if self.rows <= 512 else 64

    @cached_property
    def places(self) -> dict[str, slice]:
        """Return where each table is in the array. ``blocks`` is the last, so that its unused end is not copied."""
        rows, attention, lora = self.rows, -(-self.rows // ATTENTION_ROWS), -(-self.rows // self.lora_rows)
        sizes = {
            "ids": rows,
            "positions": rows,
            "slots": rows,
            "versions": rows,
            "last": MOST_SPANS,
            "attention": TILE * (attention + MOST_SPANS - 1),
            "lora": TILE * (lora + MOST_VERSIONS - 1),
            "head": TILE * MOST_SPANS,
            "blocks": MOST_BLOCKS,
        }
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = slice(start, start + size)
            start += -(-size // TILE) * TILE  # every table begins at a multiple of 16 bytes
        return places

    @property
    def size(self) -> int:
        return self.places["blocks"].stop

    def empty(self, padding_block: int) -> Int32Array:
        """Return the tables of a pass without spans, as far as ``blocks``."""
        tables = np.zeros(self.places["blocks"].start, np.int32)
        tables[self.places["slots"]] = padding_block * BLOCK
        tables[self.places["versions"]] = MOST_VERSIONS
        return tables


@dataclass(frozen=True)
class Layout:
    """The spans of a pass, in order, and the spans from whose last row tokens are drawn.

    versions: the number of each span's version, from 0 on, with equal numbers side by side; −1 is the base model.
    """

    spans: Sequence[Span]
    versions: Sequence[int]
    drawing: Sequence[int] = ()

    @cached_property
    def lengths(self) -> IntArray:
        return np.array([span.stop - span.start for span in self.spans], np.int64)

    @cached_property
    def firsts(self) -> IntArray:
        """Return the first row of each span."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def _version_rows(self) -> IntArray:
        """Return the versions in order, each with how many consecutive rows it has: (versions, 2)."""
        return _runs(np.array(self.versions, np.int64), self.lengths)

    def fits(self, bucket: Bucket) -> bool:
        if len(self.spans) > MOST_SPANS or max(self.versions) >= MOST_VERSIONS or self.rows > bucket.rows:
            return False
        numbers, rows = self._version_rows.T
        tiles = -(-rows[numbers >= 0] // bucket.lora_rows)
        room = bucket.places["lora"].stop - bucket.places["lora"].start
        return TILE * tiles.sum() <= room and sum(blocks_for(span.stop) for span in self.spans) <= MOST_BLOCKS

    def tables(self, bucket: Bucket, tokens: Sequence[IntArray], padding_block: int) -> Int32Array:
        """Return the tables of a pass that computes these tokens, one array for each span."""
        lengths_S, firsts_S, count = self.lengths, self.firsts, self.rows
        starts_S = np.array([span.start for span in self.spans], np.int64)
        versions_S, drawing = np.array(self.versions, np.int64), np.array(self.drawing, np.int64)
        blocks = [np.array(span.blocks[: blocks_for(span.stop)], np.int32) for span in self.spans]
        sizes_S = np.array([len(each) for each in blocks], np.int64)
        block_firsts_S, flat = np.cumsum(sizes_S) - sizes_S, np.concatenate(blocks)
        shifts_S = np.array([span.shift for span in self.spans], np.int64)
        indices = np.arange(count) + np.repeat(starts_S - firsts_S, lengths_S)
        slots = flat[np.repeat(block_firsts_S, lengths_S) + indices // BLOCK] * BLOCK + indices % BLOCK

        tables, places = np.concatenate([bucket.empty(padding_block), flat]), bucket.places
        for name, values in (
            ("ids", np.concatenate(tokens)),
            ("positions", indices + np.repeat(shifts_S, lengths_S)),
            ("slots", slots),
            ("versions", np.repeat(np.where(versions_S < 0, MOST_VERSIONS, versions_S), lengths_S)),
            ("last", (firsts_S + lengths_S - 1)[drawing]),
            ("attention", _attention_tiles(firsts_S, lengths_S, starts_S, block_firsts_S)),
            ("lora", _lora_tiles(self._version_rows, bucket.lora_rows)),
            ("head", _lora_tiles(_runs(versions_S[drawing], np.ones_like(drawing)), HEAD_ROWS)),
        ):
            start = places[name].start
            assert values.size <= places[name].stop - start, "the caller has asked fits()"
            tables[start : start + values.size] = values.reshape(-1)
        return tables


def _attention_tiles(firsts_S: IntArray, lengths_S: IntArray, starts_S: IntArray, blocks_S: IntArray) -> IntArray:
    span, step = _split(lengths_S, ATTENTION_ROWS)
    ends_S = firsts_S + lengths_S
    return np.stack([firsts_S[span] + step, ends_S[span], starts_S[span] + step, blocks_S[span]], 1)


def _lora_tiles(version_rows: IntArray, tile_rows: int) -> IntArray:
    numbers, lengths = version_rows.T
    ends = np.cumsum(lengths)
    with_lora = numbers >= 0
    group, step = _split(lengths[with_lora], tile_rows)
    first = (ends - lengths)[with_lora][group] + step
    return np.stack([numbers[with_lora][group], first, ends[with_lora][group], np.zeros_like(first)], 1)


def _runs(numbers: IntArray, counts: IntArray) -> IntArray:
    """Join neighbours with the same number, and add up their counts: (n, 2)."""
    begins = np.flatnonzero(np.diff(numbers, prepend=-2))
    totals = np.add.reduceat(counts, begins) if len(begins) else counts
    return np.stack([numbers[begins], totals], 1)


def _split(lengths: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Cut ranges of these lengths into tiles of at most ``most``: return each tile's range, and its start in there."""
    counts = -(-lengths // most)
    owner = np.repeat(np.arange(len(lengths)), counts)
    return owner, (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
