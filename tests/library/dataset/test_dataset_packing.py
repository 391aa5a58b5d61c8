"""Packing: which rows are put together and how they are joined, for tables and for streams."""

import random
import threading
from itertools import islice, pairwise

import numpy as np
import pytest

from twinkle.dataset import DatasetMeta, IterablePackingDataset, PackingDataset
from twinkle.dataset.packing import join_rows, pack
from twinkle.errors import DataError, InvalidInputError, StreamError, UnsupportedError


def test_first_fit_longest_first():
    assert pack([5, 4, 3, 2], 8) == [[0, 2], [1, 3]]
    assert pack([], 8) == []
    assert pack([9, 1], 8) == [[0], [1]]  # too long for any bin, so it gets its own


def test_every_row_is_in_one_bin_that_holds_it():
    generator = random.Random(0)
    lengths = [generator.randint(1, 60) for _ in range(500)]
    bins = pack(lengths, 64)
    assert sorted(place for places in bins for place in places) == list(range(500))
    assert all(sum(lengths[place] for place in places) <= 64 for places in bins)
    assert len(bins) <= 1.05 * sum(lengths) / 64 + 1


def test_join_rows():
    rows = [
        {"input_ids": [1, 2], "position_ids": np.arange(2), "length": 2, "note": "a", "grid": [[0, 1]]},
        {"input_ids": [3], "position_ids": np.arange(1), "length": 1, "note": "b", "grid": [[2, 3]]},
    ]
    joined = join_rows(rows)
    assert joined["input_ids"].tolist() == [1, 2, 3]
    assert joined["position_ids"].tolist() == [0, 1, 0]
    assert joined["grid"].tolist() == [[0, 1], [2, 3]]
    assert (joined["length"], joined["note"]) == (3, ["a", "b"])
    rope = join_rows([{"position_ids": np.zeros((4, 1, 2))}, {"position_ids": np.ones((4, 1, 3))}])
    assert rope["position_ids"].shape == (4, 1, 5)
    with pytest.raises(DataError, match="different fields"):
        join_rows([{"a": [1]}, {"b": [1]}])


def packed(chats, template, num_proc=1):
    dataset = PackingDataset(DatasetMeta(data=chats), packing_num_proc=num_proc)
    dataset.set_template(template)
    dataset.encode()
    dataset.pack_dataset()
    return dataset


def sequences(row):
    """Return the token sequences of a packed row, split where positions restart at 0."""
    positions = np.asarray(row["position_ids"])
    starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    ids = np.asarray(row["input_ids"])
    return [tuple(ids[a:b].tolist()) for a, b in pairwise(starts)]


def test_packed_table(chats, template):
    template.max_length = 100
    dataset = packed(chats, template)
    rows = list(dataset)
    assert len(rows) == len(dataset) == len(dataset.packed_idx) < len(chats)
    expected = [tuple(template.encode(chat)["input_ids"].tolist()) for chat in chats]
    assert sorted(s for row in rows for s in sequences(row)) == sorted(expected)
    for row, length in zip(rows, dataset.packed_length, strict=True):
        assert row["length"] == length == len(row["labels"]) == len(row["attention_mask"]) <= 100
        assert len(row["number"]) == len(sequences(row))
    assert dataset[-1]["length"] == dataset.packed_length[-1]


def test_windows_and_processes_change_nothing_but_speed(chats, template, monkeypatch):
    template.max_length = 100
    monkeypatch.setattr("twinkle.dataset.packing_dataset._WINDOW", 5)
    one, two = packed(chats, template), packed(chats, template, num_proc=2)
    assert one.packed_idx == two.packed_idx
    assert sorted(number for places in one.packed_idx for number in places) == list(range(len(chats)))
    assert all(max(places) // 5 == min(places) // 5 for places in one.packed_idx)


def test_order_of_calls(chats, template):
    dataset = PackingDataset(DatasetMeta(data=chats))
    with pytest.raises(InvalidInputError, match="set_template"):
        dataset.pack_dataset()
    dataset.set_template(template)
    with pytest.raises(InvalidInputError, match="Tokenize dataset first"):
        dataset.pack_dataset()
    dataset.encode()
    with pytest.raises(InvalidInputError, match=r"Call `pack_dataset\(\)` first"):
        dataset[0]
    dataset.pack_dataset()
    assert len(dataset) == 1
    dataset.filter(lambda row: row["number"] > 3)  # the packs no longer match the rows
    with pytest.raises(InvalidInputError, match=r"Call `pack_dataset\(\)` first"):
        len(dataset)
    with pytest.raises(InvalidInputError, match="packing_num_proc"):
        PackingDataset(DatasetMeta(data=chats), packing_num_proc=0)


def streamed(chats, template, **options):
    dataset = IterablePackingDataset(DatasetMeta(data=chats), **options)
    dataset.set_template(template)
    dataset.pack_dataset()
    return dataset


@pytest.mark.parametrize(("interval", "workers"), [(1, 1), (5, 1), (5, 3), (100, 2)])
def test_packed_stream(chats, template, interval, workers):
    template.max_length = 100
    rows = list(streamed(chats, template, packing_interval=interval, packing_num_proc=workers))
    expected = [tuple(template.encode(chat)["input_ids"].tolist()) for chat in chats]
    assert sorted(s for row in rows for s in sequences(row)) == sorted(expected)
    assert all(row["length"] <= 100 for row in rows)
    assert len(rows) < len(chats)


def test_stream_leaves_deleted_rows_out(chats, template):
    template.max_length, template.truncation_strategy = 40, "delete"
    rows = list(streamed(chats, template, packing_interval=4))
    kept = [chat for chat in chats if template.check(chat)]
    assert sum(len(row["number"]) for row in rows) == len(kept) < len(chats)


def test_cyclic_stream_goes_on_and_its_threads_end_with_it(chats, template):
    template.max_length = 100
    rows = iter(streamed(chats, template, packing_interval=3, packing_num_proc=2, cyclic=True))
    many = list(islice(rows, 40))
    assert len({s for row in many for s in sequences(row)}) == len(chats)
    assert any("twinkle-encode" in thread.name for thread in threading.enumerate())
    del rows
    assert not any("twinkle-encode" in thread.name for thread in threading.enumerate())
    nothing = streamed(chats, template, cyclic=True)
    nothing.filter(lambda row: False)
    assert list(nothing) == []


def test_an_error_reaches_the_reader(chats, template):
    template.max_length = 10  # truncation_strategy is "raise"
    with pytest.raises(ValueError, match="exceeds max_length 10"):
        list(streamed(chats, template, packing_num_proc=2))
    assert not any("twinkle-encode" in thread.name for thread in threading.enumerate())


def test_what_packed_streams_cannot_do(chats, template):
    dataset = IterablePackingDataset(DatasetMeta(data=chats))
    with pytest.raises(InvalidInputError, match=r"Call `pack_dataset\(\)` first"):
        iter(dataset)
    with pytest.raises(UnsupportedError, match="encodes while it is read"):
        dataset.encode()
    with pytest.raises(StreamError):
        len(dataset)
    template.truncation_strategy = "split"
    with pytest.raises(UnsupportedError, match="split"):
        dataset.set_template(template)
    with pytest.raises(InvalidInputError, match="packing_interval"):
        IterablePackingDataset(DatasetMeta(data=chats), packing_interval=0)
