"""The tables of prompt passes, compared with the same tables made by plain loops."""

from collections.abc import Iterator

import numpy as np
import pytest

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.cached_attention import Span
from twinkle.sampler.torch_sampler.prompts.tables import (
    ATTENTION_ROWS,
    HEAD_ROWS,
    MOST_BLOCKS,
    MOST_SPANS,
    MOST_VERSIONS,
    SIZES,
    TILE,
    Bucket,
    Layout,
)

PADDING = 7


def random_layout(seed: int, most_rows: int) -> tuple[Layout, list[np.ndarray]]:
    """Return spans with random beginnings, lengths, blocks and versions, and their tokens."""
    random = np.random.default_rng(seed)
    spans, tokens, rows = [], [], 0
    for _ in range(random.integers(1, MOST_SPANS + 1)):
        start, length = int(random.integers(0, 200) * random.integers(0, 2)), int(random.integers(1, 150))
        if rows + length > most_rows:
            break
        rows += length
        blocks = random.integers(1, 1000, -(-(start + length) // BLOCK) + random.integers(0, 3)).tolist()
        spans.append(Span(start, start + length, blocks, int(random.integers(-3, 1)) * min(start, 7)))
        tokens.append(random.integers(0, 1000, length))
    versions = np.sort(random.integers(-1, MOST_VERSIONS, len(spans)))
    numbers = {version: number for number, version in enumerate(dict.fromkeys(versions[versions >= 0].tolist()))}
    ordered = [*(numbers[version] for version in versions.tolist() if version >= 0), *[-1] * int((versions < 0).sum())]
    drawing = sorted(random.choice(len(spans), random.integers(0, len(spans) + 1), replace=False).tolist())
    return Layout(spans, ordered, drawing), tokens


def lora_tiles(versions: list[int], tile_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tiles of rows with these versions."""
    for version in dict.fromkeys(versions):
        first, end = versions.index(version), len(versions) - versions[::-1].index(version)
        if version >= 0:
            yield from ((version, row, end, 0) for row in range(first, end, tile_rows))


@pytest.mark.parametrize("seed", range(40))
def test_tables_equal_plain_loops(seed: int) -> None:
    layout, tokens = random_layout(seed, 3000)
    bucket = next(Bucket(rows) for rows in SIZES if layout.fits(Bucket(rows)))
    found = layout.tables(bucket, tokens, PADDING)
    table = {name: found[place] for name, place in bucket.places.items()}

    positions = [index + span.shift for span in layout.spans for index in range(span.start, span.stop)]
    slots = [
        span.blocks[index // BLOCK] * BLOCK + index % BLOCK
        for span in layout.spans
        for index in range(span.start, span.stop)
    ]
    padding = bucket.rows - len(positions)
    assert table["ids"].tolist() == [*np.concatenate(tokens).tolist(), *[0] * padding]
    assert table["positions"].tolist() == positions + [0] * padding
    assert table["slots"].tolist() == slots + [PADDING * BLOCK] * padding

    attention, first, first_block, last, owners = [], 0, 0, [], []
    for number, (span, version) in enumerate(zip(layout.spans, layout.versions, strict=True)):
        length = span.stop - span.start
        for step in range(0, length, ATTENTION_ROWS):
            attention.append([first + step, first + length, span.start + step, first_block])
        used = -(-span.stop // BLOCK)
        assert table["blocks"][first_block : first_block + used].tolist() == list(span.blocks[:used])
        first, first_block, owners = first + length, first_block + used, owners + [version] * length
        if number in layout.drawing:
            last.append(first - 1)
    assert len(table["blocks"]) == first_block  # nothing after the last block is copied
    for name, expected in (
        ("attention", attention),
        ("lora", [list(tile) for tile in lora_tiles(owners, bucket.lora_rows)]),
        ("head", [list(t) for t in lora_tiles([layout.versions[each] for each in layout.drawing], HEAD_ROWS)]),
    ):
        tiles = table[name].reshape(-1, TILE).tolist()
        assert tiles[: len(expected)] == expected, name
        assert not np.any(tiles[len(expected) :]), name
    assert table["last"][: len(last)].tolist() == last


def spans_of(*lengths: int) -> list[Span]:
    return [Span(0, length, list(range(1, 2 + length // BLOCK))) for length in lengths]


def test_what_fits_a_bucket() -> None:
    small, large = Bucket(64), Bucket(4096)
    assert Layout(spans_of(64), [0]).fits(small)
    assert not Layout(spans_of(65), [0]).fits(small)
    single = spans_of(*[1] * MOST_SPANS)
    assert Layout(single, [-1] * MOST_SPANS).fits(small)
    assert Layout(single, sorted([*range(MOST_VERSIONS)] * 4)).fits(small)
    assert not Layout([*single, *spans_of(1)], [-1] * (MOST_SPANS + 1)).fits(large)
    assert not Layout(single, list(range(MOST_SPANS))).fits(large)
    far = Span(16 * MOST_BLOCKS - 16, 16 * MOST_BLOCKS, [1] * MOST_BLOCKS)
    assert Layout([far], [-1]).fits(small)
    assert not Layout([far, *spans_of(1)], [-1, -1]).fits(large)


@pytest.mark.parametrize("rows", [*SIZES, 100, 1000])
def test_the_largest_layouts_fit(rows: int) -> None:
    """As many versions as a pass may have, each with a span whose last tile is usually not full."""
    bucket = Bucket(rows)
    lengths = np.full(MOST_VERSIONS, rows // MOST_VERSIONS)
    lengths[: rows % MOST_VERSIONS] += 1
    layout = Layout(spans_of(*lengths.tolist()), list(range(MOST_VERSIONS)), list(range(MOST_VERSIONS)))
    assert layout.fits(bucket)
    layout.tables(bucket, [np.zeros(length, np.int64) for length in lengths], PADDING)
    starts = [place.start for place in bucket.places.values()]
    assert all(start % TILE == 0 for start in starts)
