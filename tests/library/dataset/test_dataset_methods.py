"""Tables: map, filter, mix, encode, check, save; and the same for streams."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from twinkle.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle.errors import InvalidInputError, StreamError, UnknownNameError, UnsupportedError
from twinkle.preprocessor import DataFilter, Preprocessor, SelfCognitionProcessor
from twinkle.template import Template

ROWS = [{"x": n} for n in range(6)]


class Shifted(Preprocessor):
    def __init__(self, by=1):
        self.by = by

    def __call__(self, columns):
        assert type(columns) is dict
        return {"x": [x + self.by for x in columns["x"]]}


class Even(DataFilter):
    def __call__(self, row):
        return row["x"] % 2 == 0


def add_square(columns):
    return {"square": [x * x for x in columns["x"]]}


def xs(dataset):
    return [row["x"] for row in dataset]


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_map_and_filter(kind):
    dataset = kind(DatasetMeta(data=ROWS))
    dataset.map(add_square)
    assert next(iter(dataset)) == {"x": 0, "square": 0}  # columns that the function does not return stay
    dataset.map(Shifted, init_args={"by": 10})
    dataset.map(preprocess_func=Shifted(-9), init_args={"by": 100})  # no effect on an instance or a function
    assert xs(dataset) == [1, 2, 3, 4, 5, 6]
    dataset.filter(Even)
    dataset.filter(filter_func=lambda row: row["x"] > 2, init_args={"least": 5})
    assert xs(dataset) == [4, 6]
    dataset.map(lambda columns: {"z": columns["x"]}, remove_columns=["x", "square"])
    assert list(dataset) == [{"z": 4}, {"z": 6}]


def test_preprocessor_by_name():
    rows = [{"query": "who are you, {{NAME}}?", "response": "{{NAME}} by {{AUTHOR}}"}]
    for processor, init_args in (
        ("SelfCognitionProcessor", {"model_name": "Ada", "model_author": "us"}),
        (SelfCognitionProcessor("Ada", "us"), None),
    ):
        dataset = Dataset(DatasetMeta(data=rows))
        dataset.map(processor, init_args=init_args)
        assert dataset[0]["messages"][-1]["content"] == "Ada by us"
    with pytest.raises(UnknownNameError, match=r"unknown Preprocessor 'Nothing'; known: .*SelfCognitionProcessor"):
        dataset.map("Nothing")
    with pytest.raises(UnknownNameError, match="unknown DataFilter 'Nothing'"):
        dataset.filter("Nothing")


def test_options_are_checked():
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(add_square, batched=True, num_proc=1, batch_size=2, desc="squares")
    with pytest.raises(UnknownNameError, match="unknown map option 'num_procs'; known: batch_size"):
        dataset.map(add_square, num_procs=2)
    with pytest.raises(InvalidInputError, match="batched: got False"):
        dataset.map(add_square, batched=False)
    with pytest.raises(UnknownNameError, match="unknown filter option 'remove_columns'"):
        dataset.filter(Even, remove_columns=["x"])
    with pytest.raises(UnknownNameError, match="unknown map option 'num_proc'"):
        IterableDataset(DatasetMeta(data=ROWS)).map(add_square, num_proc=2)


def test_map_in_several_processes():
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(Shifted(5), num_proc=2)
    assert xs(dataset) == [5, 6, 7, 8, 9, 10]


def first_and_second():
    return DatasetMeta(data=[{"x": n} for n in range(3)]), DatasetMeta(data=[{"x": n} for n in range(10, 15)])


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
@pytest.mark.parametrize(
    ("interleave", "expected"), [(True, [0, 11, 1, 12, 2, 13]), (False, [0, 1, 2, 11, 12, 13, 14, 15])]
)
def test_mixing(kind, interleave, expected):
    first, second = first_and_second()
    dataset = kind(first)
    dataset.add_dataset(second)
    assert xs(dataset) == [0, 1, 2]
    with pytest.raises(InvalidInputError, match="one of the loaded datasets"):
        dataset.map(Shifted)
    dataset.map(Shifted, dataset_meta=second)
    dataset.mix_dataset(interleave)
    if kind is IterableDataset and interleave:
        expected = expected[:-1]  # a stream ends with the row that exhausts it, a table with the round
    assert xs(dataset) == expected
    dataset.map(Shifted(100))
    assert xs(dataset) == [x + 100 for x in expected]
    with pytest.raises(InvalidInputError, match="mixed already"):
        dataset.map(Shifted, dataset_meta=second)
    with pytest.raises(InvalidInputError, match="before mix_dataset"):
        dataset.add_dataset(DatasetMeta(data=[{"x": 1}]))


def test_mixing_takes_the_types_of_the_first():
    narrow = datasets.Features({"x": datasets.Value("int32")})
    dataset = Dataset(DatasetMeta(data=[{"x": 1}]), features=narrow)
    dataset.add_dataset(DatasetMeta(data=[{"x": 2}]))
    dataset.mix_dataset()
    assert dataset.dataset.features == narrow


def test_names_of_datasets():
    first, second = first_and_second()
    dataset = Dataset(first)
    with pytest.raises(UnknownNameError, match="unknown dataset"):
        dataset.map(Shifted, dataset_meta=second)
    with pytest.raises(InvalidInputError, match="not loaded yet"):
        dataset.add_dataset(first)
    dataset.mix_dataset()  # a single dataset is not mixed
    assert not dataset.mixed
    with pytest.raises(InvalidInputError, match="at least one dataset"):
        len(Dataset())


def test_encode_is_what_the_template_does(chats, template):
    dataset = Dataset(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode()
    assert len(dataset) == len(chats)
    for chat, row in zip(chats, dataset, strict=True):
        expected = template.encode(chat)
        assert row["number"] == chat["number"]
        for name in ("input_ids", "labels", "attention_mask", "position_ids"):
            assert row[name] == np.asarray(expected[name]).tolist()
        assert row["length"] == len(row["input_ids"])


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_encode_drops_and_splits_rows(kind, chats, template):
    template.max_length = 40
    lengths = {chat["number"]: len(Template("random://llama-tiny").encode(chat)["input_ids"]) for chat in chats}
    template.truncation_strategy = "delete"
    dataset = kind(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode(batch_size=5)
    kept = [row["number"] for row in dataset]
    assert kept == [number for number, length in lengths.items() if length <= 40]
    assert 0 < len(kept) < len(chats)
    template.truncation_strategy = "split"
    dataset = kind(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode(batch_size=5, remove_columns=["messages"])
    numbers = [row["number"] for row in dataset]
    assert numbers == [number for number, length in lengths.items() for _ in range(-(-length // 40))]
    assert all("messages" not in row and len(row["input_ids"]) <= 40 for row in dataset)


def test_encode_of_pairs(chats, template):
    rows = [
        {"positive": {"messages": chat["messages"]}, "negative": {"messages": chats[0]["messages"]}} for chat in chats
    ]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template(template)
    dataset.encode(load_from_cache_file=True)
    assert dataset[3]["positive"]["input_ids"] == template.encode(chats[3])["input_ids"].tolist()
    assert dataset[3]["negative"]["input_ids"] == template.encode(chats[0])["input_ids"].tolist()


def test_encode_with_a_generation_prompt(chats):
    dataset = Dataset(DatasetMeta(data=chats))
    dataset.set_template("Template", model_id="random://llama-tiny")
    dataset.encode(add_generation_prompt=True)
    assert set(dataset[0]["labels"]) == {-100}


def test_encode_in_several_processes_gives_the_same(chats, template):
    encoded = []
    for num_proc in (None, 2):
        dataset = Dataset(DatasetMeta(data=chats))
        dataset.set_template(template)
        dataset.encode(**({} if num_proc is None else {"num_proc": num_proc}))
        encoded.append([row["input_ids"] for row in dataset])
    assert encoded[0] == encoded[1]


def test_template_is_needed_and_checked(chats):
    dataset = Dataset(DatasetMeta(data=chats))
    for method in (dataset.encode, dataset.check):
        with pytest.raises(InvalidInputError, match="call set_template"):
            method()
    with pytest.raises(UnknownNameError, match=r"unknown Template 'Templat'; known: .*Qwen3_5Template"):
        dataset.set_template("Templat")
    dataset.set_template("Template", model_id="random://llama-tiny")
    with pytest.raises(InvalidInputError, match="fn_kwargs"):
        dataset.encode(fn_kwargs={"tokenize": False})
    with pytest.raises(UnknownNameError, match="unknown option of Template 'max_len'"):
        dataset.set_template("Template", model_id="random://llama-tiny", max_len=3)


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_check(kind, chats, template):
    template.max_length = 40
    dataset = kind(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.check()
    rows = list(dataset)
    assert 0 < len(rows) < len(chats)
    assert set(rows[0]) == {"messages", "number"}


def test_streams_have_no_numbers(chats):
    stream = IterableDataset(DatasetMeta(data=chats))
    for error in (StreamError, NotImplementedError, TypeError):
        with pytest.raises(error, match="no length"):
            len(stream)
    with pytest.raises(NotImplementedError, match="no rows by number"):
        stream[0]
    assert len(list(stream)) == len(list(stream)) == len(chats)


def test_what_was_encoded_before_is_read_again(chats, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    def encode(**options):
        dataset = Dataset(DatasetMeta(str(path)), cache_dir=str(tmp_path / "cache"))
        dataset.set_template("Template", model_id="random://llama-tiny")
        dataset.encode(**options)
        (file,) = dataset.dataset.cache_files
        return file["filename"], Path(file["filename"]).stat().st_mtime_ns

    first = encode(load_from_cache_file=True)
    assert encode(load_from_cache_file=True) == first
    assert encode() != first


def test_nothing_is_left_behind_in_the_working_directory(chats, template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = Dataset(DatasetMeta(data=chats))
    dataset.set_template(template)
    dataset.encode(load_from_cache_file=True)
    assert list(tmp_path.iterdir()) == []


def test_images(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    path = tmp_path / "dot.png"
    pil.new("RGB", (2, 3)).save(path)
    dataset = Dataset(DatasetMeta(data=[{"image": str(path)}]))
    dataset.cast_column("image")
    assert dataset[0]["image"].size == (2, 3)
    dataset.cast_column("image", decode=False)
    assert dataset[0]["image"]["path"] == str(path)


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.pq", "rows.csv", "rows.data"])
def test_save_as(kind, name, tmp_path):
    rows = [{"x": n, "text": f"é{n}", "list": [n, n + 1]} for n in range(7)]
    dataset = kind(DatasetMeta(data=rows))
    path = tmp_path / "new" / name
    dataset.save_as(path, batch_size=3)
    if name.endswith(("parquet", "pq")):
        assert datasets.Dataset.from_parquet(str(path)).to_list() == rows
    elif name.endswith("csv"):
        lines = path.read_text().splitlines()
        assert lines[0] == "x,text,list"
        assert len(lines) == 8
        assert lines[1].startswith("0,é0,")
    else:
        assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_save_as_refuses(tmp_path):
    first, second = first_and_second()
    with pytest.raises(ValueError, match="No dataset to save"):
        Dataset().save_as(tmp_path / "x.jsonl")
    dataset = Dataset(first)
    with pytest.raises(ValueError, match="Unsupported format"):
        dataset.save_as(tmp_path / "x", format="xml")
    with pytest.raises(InvalidInputError, match="mode"):
        dataset.save_as(tmp_path / "x", mode="later")
    with pytest.raises(UnsupportedError, match="parquet"):
        dataset.save_as(tmp_path / "x.parquet", mode="training")
    dataset.add_dataset(second)
    with pytest.raises(ValueError, match=r"Call mix_dataset\(\) before"):
        dataset.save_as(tmp_path / "x.jsonl")


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_rows_are_saved_as_they_are_served(kind, tmp_path):
    dataset = kind(DatasetMeta(data=ROWS))
    path = tmp_path / "served.csv"
    dataset.save_as(path, mode="training")
    rows = iter(dataset)
    next(rows)
    next(rows)
    assert path.read_text().split() == ["x", "0", "1"]
    dataset.flush_save()
    next(rows)
    assert path.read_text().split() == ["x", "0", "1"]
