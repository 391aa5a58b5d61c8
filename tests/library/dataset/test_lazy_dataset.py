"""Lazy tables: the same rows as eager ones, computed on access."""

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
    dataset.filter(lambda row: row["x"] > 1)  # filters the raw rows
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
    assert xs(dataset) == [100, 101, 102, 103]  # until they are mixed, only the first is visible
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
    with pytest.raises(UnknownNameError, match="processes"):
        dataset.encode(processes=2)
    with pytest.raises(InvalidInputError, match=r"features: .* lazy rows have no column types"):
        dataset.map(Shifted, features={"x": int})
    with pytest.raises(InvalidInputError, match="batched: got False"):
        dataset.map(Shifted, batched=False)
    for method in (dataset.encode, dataset.check):
        with pytest.raises(InvalidInputError, match=r"fn_kwargs: .* the template is the function"):
            method(fn_kwargs={"a": 1})
    doubling = LazyDataset(FIRST)
    doubling.map(lambda columns: {"x": columns["x"] * 2})
    with pytest.raises(DataError, match="must stay one row"):
        doubling[0]


# --- the options of an eager dataset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_options_of_a_table_are_taken(chats, template, kind):
    dataset = kind(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.map(lambda columns: dict(columns), num_proc=None, load_from_cache_file=False, batch_size=2, desc="Mapping")
    dataset.filter(lambda row: row["number"] > 1, load_from_cache_file=False)
    dataset.check(load_from_cache_file=False, num_proc=None)
    dataset.encode(load_from_cache_file=False, num_proc=None, batched=True, writer_batch_size=10)
    assert list(dataset[0]["input_ids"]) == list(template.encode(chats[1])["input_ids"])


def test_options_of_encode_are_kept(chats, template):
    dataset = LazyDataset(DatasetMeta(data=chats))
    dataset.set_template(template)
    assert dataset.encode_kwargs == {}
    dataset.encode(load_from_cache_file=True, num_proc=2)
    assert dataset.encode_kwargs == {"load_from_cache_file": True, "num_proc": 2}


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_columns_are_removed_and_functions_get_their_arguments(kind):
    def add(columns, by):
        return {"y": [x + by for x in columns["x"]]}

    dataset = kind(FIRST)
    dataset.map(add, fn_kwargs={"by": 5}, remove_columns="x")
    assert dataset[1] == {"y": 6}
    # the column is recreated, so it stays
    dataset.map(lambda columns: {"y": [y + 1 for y in columns["y"]]}, remove_columns=["y"])
    assert dataset[1] == {"y": 7}


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_encode_removes_columns(chats, template, kind):
    dataset = kind(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode(remove_columns=["messages", "number"])
    assert not {"messages", "number"} & set(dataset[0])
    assert "input_ids" in dataset[0]


class ByRow(Preprocessor):
    """A preprocessor that returns different results for rows and for columns, so that a test sees which was called."""

    def preprocess(self, row, factor=1):
        return None if row["x"] == 2 else {"x": -row["x"] * factor}

    def __call__(self, columns):
        raise AssertionError("a lazy dataset asks for one row")


def test_rows_are_preprocessed_one_by_one_where_that_is_possible():
    dataset = LazyDataset(FIRST)
    dataset.map(ByRow)
    assert list(dataset) == [{"x": 0}, {"x": -1}, {}, {"x": -3}]
    times = LazyDataset(FIRST)
    times.map(ByRow(), fn_kwargs={"factor": 10})
    assert times[3] == {"x": -30}


def test_what_a_preprocessor_returns_is_a_row():
    class Wrong(ByRow):
        def preprocess(self, row):
            return [row]

    dataset = LazyDataset(FIRST)
    dataset.map(Wrong)
    with pytest.raises(InvalidInputError, match="a list from preprocess"):
        dataset[0]
