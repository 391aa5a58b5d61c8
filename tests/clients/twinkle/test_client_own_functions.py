"""A script's own functions on datasets: they run on the client, with the library's results, and rows are uploaded."""

import json

import pytest

from tests.clients.twinkle.stub_server import Status, StubServer
from twinkle.dataset import Dataset as LocalDataset
from twinkle.dataset import DatasetMeta as LocalMeta
from twinkle_client import InvalidRequestError
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle_client.preprocessor import AlpacaProcessor, DataFilter

CREATE, CALL = "/processor/twinkle/create", "/processor/twinkle/call"
ROWS = [{"a": number, "b": str(number)} for number in range(5)]


@pytest.fixture
def service(stub) -> StubServer:
    """A stub whose processors have the ids pid:0, pid:1, … and whose dataloader serves two rows of the server."""
    numbers = iter(range(100))
    stub.answer(CREATE, lambda _: {"processor_id": f"pid:{next(numbers)}"})

    stub.answer(CALL, lambda body: {"result": [{"x": 1}, {"x": 2}] if body["function"] == "__next__" else None})
    return stub


def one_batch(service: StubServer, calls_before: int) -> None:
    """Let the next dataloader end after one batch."""
    service.fail(CALL, *[None] * (calls_before + 2), Status(410, {"detail": "Iterator exhausted"}))


def uploaded(service: StubServer) -> list[dict]:
    """Return the rows of the newest dataset."""
    return json.loads(service.bodies(CREATE)[-1]["dataset_meta"])["data"]


def test_functions_give_the_librarys_rows(service, client, tmp_path):
    def doubled(columns, factor=2):
        return {"a": [value * factor for value in columns["a"]], "c": [len(columns["a"])] * len(columns["a"])}

    def odd(row):
        return row["a"] % 4 != 0

    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    ours = Dataset(DatasetMeta(str(file), data_slice=range(6)), client=client)
    theirs = LocalDataset(LocalMeta(str(file), data_slice=range(6)))
    for dataset in (ours, theirs):
        dataset.map(doubled, remove_columns=["b"], batch_size=4, fn_kwargs={"factor": 2}, num_proc=1)
        dataset.filter(odd, desc="odd")
        dataset.map(lambda columns: {"d": columns["a"]})
    assert uploaded(service) == list(theirs)
    assert [body["function"] for body in service.bodies(CALL)] == ["close"] * 3  # of the objects before


def test_filters_may_be_classes(service, client):
    class Above(DataFilter):
        def __init__(self, least: int) -> None:
            self.least = least

        def __call__(self, row):
            return row["a"] > self.least

    dataset = Dataset(DatasetMeta(data=ROWS), client=client)
    dataset.filter(Above, init_args={"least": 3})
    dataset.filter(Above(0), init_args={"least": 9})  # no effect on an instance
    assert uploaded(service) == ROWS[4:]


def test_templates_and_other_datasets_survive(service, client):
    first, second = DatasetMeta(data=ROWS), DatasetMeta("hf://x/y")
    dataset = Dataset(first, client=client)
    dataset.add_dataset(second, revision="main")
    dataset.set_template("Template", model_id="/models/tiny", max_length=9)
    dataset.map(lambda columns: {"a": columns["a"]}, dataset_meta=first)
    *_, again, template, closed = service.bodies(CALL)
    assert (again["function"], again["revision"], again["processor_id"]) == ("add_dataset", "main", "pid:1")
    assert (template["function"], template["model_id"], template["max_length"]) == ("set_template", "tiny", 9)
    assert (closed["function"], closed["processor_id"]) == ("close", "pid:0")
    assert dataset.template.options["max_length"] == 9
    dataset.map("AlpacaProcessor", dataset_meta=first)  # by the description that the server has now
    assert json.loads(service.bodies(CALL)[-1]["dataset_meta"])["data"] == ROWS
    with pytest.raises(InvalidRequestError, match="dataset_meta: got None"):
        dataset.map(lambda columns: columns)
    with pytest.raises(InvalidRequestError, match="another dataset"):
        dataset.map(lambda columns: columns, dataset_meta=second)


def test_rows_of_the_server_are_downloaded(service, client):
    dataset = Dataset(DatasetMeta("hf://x/y"), client=client)
    one_batch(service, calls_before=0)
    dataset.map(lambda columns: {"y": [value + 1 for value in columns["x"]]})
    assert uploaded(service) == [{"x": 1, "y": 2}, {"x": 2, "y": 3}]


def test_after_a_preprocessor_of_the_server_its_rows_count(service, client):
    dataset = Dataset(DatasetMeta(data=ROWS), client=client)
    dataset.map(AlpacaProcessor(client=client))
    one_batch(service, calls_before=0)
    dataset.filter(lambda row: row["x"] == 2)
    assert uploaded(service) == [{"x": 2}]


def test_mistakes(service, client):
    dataset = Dataset(DatasetMeta(data=ROWS), client=client)
    before = len(service.bodies(CREATE))
    for function, options, message in (
        (lambda columns: None, {}, "a NoneType from it"),
        (lambda columns: {"c": [1]}, {}, "one length"),
        (lambda columns: columns, {"remove_columns": "z"}, "remove_columns"),
        (lambda columns: columns, {"batched": False}, "batched"),
        (lambda columns: columns, {"features": 1}, "features"),
        (lambda columns: columns, {"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            dataset.map(function, **options)
    assert len(service.bodies(CREATE)) == before
    stream = IterableDataset(DatasetMeta("hf://x/y"), client=client)
    with pytest.raises(InvalidRequestError, match="stream"):
        stream.map(lambda columns: columns)
    DataLoader(dataset, batch_size=2)
    with pytest.raises(InvalidRequestError, match="DataLoader"):
        dataset.map(lambda columns: columns)
