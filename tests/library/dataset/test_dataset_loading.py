"""Where rows come from: memory, files, directories, generators, hubs; and which rows are selected."""

import json

import datasets
import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset, PackingDataset
from twinkle.dataset import loading as loading_module
from twinkle.errors import InvalidInputError, StreamError, UnknownNameError, UnsupportedError

ROWS = [{"x": n, "y": str(n)} for n in range(5)]
COLUMNS = {"x": [0, 1, 2, 3, 4], "y": ["0", "1", "2", "3", "4"]}


def generate():
    yield from ROWS


def sources():
    return {
        "rows": ROWS,
        "columns": COLUMNS,
        "generator": generate,
        "dataset": datasets.Dataset.from_list(ROWS),
        "split": datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    }


@pytest.mark.parametrize("kind", sources())
def test_data_in_memory(kind):
    dataset = Dataset(DatasetMeta(data=sources()[kind]))
    assert len(dataset) == 5
    assert [dataset[n] for n in range(5)] == list(dataset) == ROWS
    assert list(IterableDataset(DatasetMeta(data=sources()[kind]))) == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "rows.txt"])
def test_local_files(tmp_path, name):
    path = tmp_path / name
    table = datasets.Dataset.from_list(ROWS)
    if name.endswith(("json", "jsonl")):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif name.endswith("parquet"):
        table.to_parquet(path)
    elif name.endswith("txt"):
        path.write_text("a\nb\n")
    else:
        table.to_csv(path, index=False, sep="\t" if name.endswith("tsv") else ",")
    expected = [{"text": "a"}, {"text": "b"}] if name.endswith("txt") else ROWS
    found = list(Dataset(DatasetMeta(str(path), split="anything")))
    if name.endswith(("csv", "tsv")):
        found = [{"x": int(row["x"]), "y": str(row["y"])} for row in found]  # without na_filter all values are text
    assert found == expected


def test_csv_keeps_na_as_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x,y\nNA,null\n")
    assert list(Dataset(DatasetMeta(str(path)))) == [{"x": "NA", "y": "null"}]


def test_directory(tmp_path):
    for number in range(2):
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps(ROWS[number]) + "\n")
    (tmp_path / "README.md").write_text("not data")
    assert list(Dataset(DatasetMeta(str(tmp_path)))) == ROWS[:2]
    assert list(IterableDataset(DatasetMeta(str(tmp_path)))) == ROWS[:2]
    (tmp_path / "more.csv").write_text("x,y\n1,2\n")
    with pytest.raises(InvalidInputError, match="found: csv, jsonl"):
        Dataset(DatasetMeta(str(tmp_path)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match="found: none"):
        Dataset(DatasetMeta(str(tmp_path / "empty")))
    (tmp_path / "rows.xls").write_text("")
    with pytest.raises(UnknownNameError, match="unknown file extension 'xls'"):
        Dataset(DatasetMeta(str(tmp_path / "rows.xls")))


def test_hub(monkeypatch):
    asked = []

    class Hub:
        @classmethod
        def load_dataset(cls, dataset_id, subset_name, split, streaming, **options):
            asked.append((dataset_id, subset_name, split, streaming, options))
            return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(loading_module, "HubOperation", Hub)
    dataset = Dataset(DatasetMeta("ms://org/name", "sub", "test", data_slice=range(2)), revision="v1", num_proc=2)
    assert list(dataset) == ROWS[:2]
    assert asked == [("ms://org/name", "sub", "test", False, {"revision": "v1", "num_proc": 2})]
    assert list(dataset.datasets) == ["ms:__org_name:sub:test"]
    with pytest.raises(UnknownNameError, match="unknown load option 'reviison'"):
        Dataset(DatasetMeta("ms://org/name"), reviison="v1")


def test_streaming_and_other_options_of_load_dataset(tmp_path):
    meta = DatasetMeta(data=ROWS)
    stream = Dataset(meta, streaming=True, split="train", trust_remote_code=True)
    stream.map(lambda columns: {"x": [x + 1 for x in columns["x"]]})
    assert [row["x"] for row in stream] == [row["x"] + 1 for row in ROWS]
    with pytest.raises(StreamError, match="no length"):
        len(stream)
    with pytest.raises(StreamError, match="no rows by number"):
        stream[0]
    batches = [[row["x"] for row in batch] for batch in DataLoader(stream, batch_size=4)]
    assert [x for batch in batches for x in batch] == [row["x"] + 1 for row in ROWS]
    stream.add_dataset(DatasetMeta(data=[{"x": 7}]))  # a stream too
    with pytest.raises(InvalidInputError, match="streaming: got False, allowed: True, as for the datasets"):
        stream.add_dataset(DatasetMeta(data=[{"x": 8}]), streaming=False)
    with pytest.raises(InvalidInputError, match="split: got 'test', allowed: 'train', that of the DatasetMeta"):
        Dataset(meta, split="test")
    assert len(Dataset(meta, streaming=False)) == len(ROWS)
    assert list(IterableDataset(meta, streaming=True)) == ROWS
    for kind, value in ((IterableDataset, False), (LazyDataset, True), (PackingDataset, True)):
        with pytest.raises(InvalidInputError, match=f"streaming: got {value}, allowed: {not value}"):
            kind(meta, streaming=value)


def test_slices():
    def numbers(data_slice):
        return [row["x"] for row in Dataset(DatasetMeta(data=ROWS, data_slice=data_slice))]

    assert numbers(range(3)) == [0, 1, 2]
    assert numbers([4, 0, 7]) == [4, 0, 2]  # 7 wraps around
    assert numbers(n for n in (1, 3)) == [1, 3]
    stream = IterableDataset(DatasetMeta(data=ROWS, data_slice=range(1, 3)))
    assert [row["x"] for row in stream] == [1, 2]
    with pytest.raises(UnsupportedError, match="consecutive rows"):
        IterableDataset(DatasetMeta(data=ROWS, data_slice=[3, 1]))


def test_meta():
    with pytest.raises(ValueError, match="data_slice must be an iterable"):
        DatasetMeta("a/b", data_slice=5)
    with pytest.raises(InvalidInputError, match="dataset_id"):
        DatasetMeta()
    with pytest.raises(InvalidInputError, match="data: got 'list', allowed: nothing beside"):
        DatasetMeta("a/b", data=ROWS)
    with pytest.raises(InvalidInputError, match="data: got 3"):
        Dataset(DatasetMeta(data=3))
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train"):
        Dataset(DatasetMeta(data=datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), split="test"))
    assert DatasetMeta("a/b.c").get_id() == "a_b_c:default:train"
    memory = DatasetMeta(data=ROWS).get_id()
    assert memory == DatasetMeta(data=[dict(row) for row in ROWS]).get_id()
    assert memory != DatasetMeta(data=ROWS[:2]).get_id()
    assert memory.startswith("__memory_")
    assert DatasetMeta(data=generate).get_id() == DatasetMeta(data=generate).get_id()


def test_options_that_mean_nothing_for_a_source(tmp_path):
    with pytest.raises(UnknownNameError, match="load option for data in memory 'revision'"):
        Dataset(DatasetMeta(data=ROWS), revision="v1")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UnknownNameError, match="load option for local files 'token'"):
        Dataset(DatasetMeta(str(tmp_path / "a.txt")), token="t")
    with pytest.raises(InvalidInputError, match="load options"):
        Dataset(num_proc=2)


def test_features_are_taken():
    features = datasets.Features({"x": datasets.Value("float32"), "y": datasets.Value("string")})
    assert Dataset(features=features, dataset_meta=DatasetMeta(data=ROWS)).dataset.features == features
