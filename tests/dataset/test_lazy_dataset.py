"""Lazy tables: the same rows as eager ones, made when they are asked for."""

import json

import numpy as np
import pytest

from twinkle.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle.errors import DataError, InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.preprocessor import Preprocessor

FIRST = DatasetMeta(data=[{"x": n} for n in range(4)])
SECOND = DatasetMeta(data=[{"x": n} for n in range(10, 13)])


class Shifted(Preprocessor):
    def __init__(self, by=1):
        self.by = by
        self.calls = 0

    def __call__(self, columns):
        self.calls += len(columns["x"])
        return {"x": [x + self.by for x in columns["x"]]}


def xs(dataset):
    return [row["x"] for row in dataset]


def test_maps_run_when_a_row_is_asked_for():
    shift = Shifted()
    dataset = LazyDataset(FIRST)
    dataset.map(shift)
    assert shift.calls == 0
    assert dataset[2] == {"x": 3}
    assert dataset[-1] == {"x": 4}
    assert shift.calls == 2
    with pytest.raises(IndexError, match="row 4 of 4"):
        dataset[4]
    dataset.filter(lambda row: row["x"] > 1)  # of the raw rows
    assert xs(dataset) == [3, 4]


@pytest.mark.parametrize("interleave", [True, False])
def test_mixing_is_that_of_an_eager_dataset(interleave):
    lazy, eager = LazyDataset(FIRST), Dataset(FIRST)
    for dataset in (lazy, eager):
        dataset.add_dataset(SECOND)
        dataset.map(Shifted(100), dataset_meta=SECOND)
        dataset.mix_dataset(interleave)
        dataset.map(Shifted(1000))
    assert lazy.mixed
    assert xs(lazy) == xs(eager)
    assert len(lazy) == len(eager) == (6 if interleave else 7)
    with pytest.raises(InvalidInputError, match="mixed already"):
        lazy.map(Shifted, dataset_meta=FIRST)
    with pytest.raises(InvalidInputError, match="before mix_dataset"):
        lazy.add_dataset(DatasetMeta(data=[{"x": 1}]))


def test_a_map_without_a_name_is_for_all():
    dataset = LazyDataset(FIRST)
    dataset.add_dataset(SECOND)
    dataset.map(Shifted(100))
    assert xs(dataset) == [100, 101, 102, 103]  # the first is what is seen until they are mixed
    dataset.mix_dataset(interleave=False)
    assert xs(dataset)[4:] == [110, 111, 112]


def test_encode(chats, template):
    dataset = LazyDataset(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode()
    assert (dataset.do_encode, dataset.add_generation_prompt) == (True, False)
    row, expected = dataset[3], template.encode(chats[3])
    assert row["number"] == chats[3]["number"]
    for name in ("input_ids", "labels", "position_ids"):
        np.testing.assert_array_equal(row[name], expected[name])


def test_rows_of_which_nothing_is_left(chats, template, tmp_path):
    template.max_length, template.truncation_strategy = 40, "delete"
    encoded, checked = LazyDataset(DatasetMeta(data=chats)), LazyDataset(DatasetMeta(data=chats))
    for dataset in (encoded, checked):
        dataset.set_template(template)
    encoded.encode()
    checked.check()
    kept = [bool(row) for row in encoded]
    assert kept == [bool(row) for row in checked]
    assert 0 < sum(kept) < len(chats)
    assert checked[0] == chats[0]
    encoded.save_as(tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == sum(kept)
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["number"] == 1
    dropping = LazyDataset(FIRST)
    dropping.map(lambda columns: {"x": []})
    assert dropping[0] == {}


def test_what_lazy_datasets_cannot_do(chats, template):
    dataset = LazyDataset(DatasetMeta(data=chats))
    with pytest.raises(InvalidInputError, match="set_template"):
        dataset.encode()
    template.truncation_strategy = "split"
    dataset.set_template(template)
    with pytest.raises(UnsupportedError, match="Lazy tokenize does not support truncation_strategy==`split`"):
        dataset.encode()
    template.truncation_strategy = "raise"
    dataset.encode(batched=True)
    with pytest.raises(UnknownNameError, match="num_proc"):
        dataset.encode(num_proc=2)
    doubling = LazyDataset(FIRST)
    doubling.map(lambda columns: {"x": columns["x"] * 2})
    with pytest.raises(DataError, match="must stay one row"):
        doubling[0]
