"""The size of a cache for which none was asked, and the block tables of captured passes."""

import numpy as np

from twinkle.sampler.torch_sampler.cache import BLOCK, default_budget, default_places
from twinkle.sampler.torch_sampler.decode_graphs import block_table

GIB = 2**30
PER_BLOCK_8B = BLOCK * 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, width, bf16


def test_an_8b_model_alone_on_a_large_gpu_holds_512_sequences_of_1024_tokens() -> None:
    budget = default_budget(79 * GIB, PER_BLOCK_8B, 512, 131072)
    assert budget >= 512 * 1024 * PER_BLOCK_8B // BLOCK
    assert 79 * GIB - budget >= 12 * GIB


def test_a_small_gpu_gives_a_third() -> None:
    assert default_budget(6 * GIB, PER_BLOCK_8B, 512, 131072) == 2 * GIB


def test_adapters_keep_some_memory() -> None:
    assert default_budget(36 * GIB, PER_BLOCK_8B, 512, 131072) == 24 * GIB


def test_a_third_may_hold_more_than_is_usual() -> None:
    assert default_budget(90 * GIB, PER_BLOCK_8B // 8, 512, 131072) == 30 * GIB


def test_no_more_than_all_sequences_can_fill() -> None:
    assert default_budget(90 * GIB, 1000, 64, 100) == (64 * (7 + 1) + 1) * 1000


def test_a_small_cache_has_fewer_places() -> None:
    assert default_places(512, 512 * 64) == 512
    assert default_places(512, 300 * 32) == 300
    assert default_places(512, 100) == 256
    assert default_places(64, 100) == 64


def test_a_block_table_is_filled_row_by_row() -> None:
    table = block_table([[5, 6, 7], [], [9]], 4, 4, 1)
    np.testing.assert_array_equal(table, [[5, 6, 7, 1], [1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 1]])
    assert table.dtype == np.int32
