"""Datasets, dataloaders and other objects on a server."""

import json

import pytest

from tests.clients.twinkle.stub_server import SESSION, Drop, Status
from twinkle_client import GoneError, InvalidRequestError, LoraConfig, NotFoundError
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import (
    Dataset,
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
    local_file,
)
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.preprocessor import AlpacaProcessor, SelfCognitionProcessor
from twinkle_client.processor import InputProcessor
from twinkle_client.reward import GSM8KAccuracyReward
from twinkle_client.template import Qwen3_5Template

CREATE, CALL = "/processor/twinkle/create", "/processor/twinkle/call"


@pytest.fixture
def service(stub):
    """A stub that numbers objects in the order of their creation. Set the return values of functions in ``results``."""
    made = iter(range(100))
    stub.answer(CREATE, lambda _: {"processor_id": f"pid:{next(made)}"})
    stub.results = {}
    stub.answer(CALL, lambda body: {"result": stub.results.get(body["function"])})
    return stub


def meta_of(body):
    return json.loads(body["dataset_meta"])


def calls(stub):
    return [{key: value for key, value in body.items() if key != "processor_id"} for body in stub.bodies(CALL)]


# --- datasets ---------------------------------------------------------------------------------------------------------


def test_the_recorded_bodies(service, client):
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(500)), client=client)
    body = service.bodies(CREATE)[0]
    assert (body["processor_type"], body["class_type"]) == ("dataset", "Dataset")
    assert meta_of(body) == {
        "data_slice": {"_slice_type_": "range", "start": 0, "stop": 500, "step": 1},
        "subset_name": "default",
        "data": None,
        "dataset_id": "ms://swift/self-cognition",
        "split": "train",
        "_TWINKLE_TYPE_": "DatasetMeta",
    }
    dataset.map("SelfCognitionProcessor", init_args={"model_name": "x"})
    assert service.bodies(CALL) == [
        {
            "processor_id": "pid:0",
            "function": "map",
            "preprocess_func": "SelfCognitionProcessor",
            "dataset_meta": None,
            "init_args": {"model_name": "x"},
        }
    ]
    DataLoader(dataset, batch_size=4)
    assert service.bodies(CREATE)[-1] == {
        "processor_type": "dataloader",
        "class_type": "DataLoader",
        "dataset": "pid:0",
        "batch_size": 4,
    }
    assert all(asked.headers["x-twinkle-session-id"] == SESSION for asked in service.asked(CALL))


def test_methods_of_a_dataset(service, client):
    dataset = Dataset(DatasetMeta(data=[{"a": 1}]), client=client)
    dataset.set_template("Template", model_id="m", max_length=256)
    dataset.set_template(Qwen3_5Template("m", max_length=8))
    dataset.encode(add_generation_prompt=True, batched=True)
    dataset.add_dataset(DatasetMeta("hf://x/y", data_slice=(3, 1)))
    dataset.mix_dataset(interleave=False)
    assert calls(service)[:3] == [
        {"function": "set_template", "template_func": "Template", "model_id": "m", "max_length": 256},
        {"function": "set_template", "template_func": "Qwen3_5Template", "model_id": "m", "max_length": 8},
        {"function": "encode", "add_generation_prompt": True, "batched": True},
    ]
    assert meta_of(calls(service)[3])["data_slice"] == {"_slice_type_": "list", "values": [3, 1]}
    assert calls(service)[4] == {"function": "mix_dataset", "interleave": False}
    service.results = {"__len__": 2, "__getitem__": {"a": 1}}
    assert list(dataset) == [{"a": 1}, {"a": 1}]
    assert calls(service)[-2:] == [{"function": "__getitem__", "idx": 0}, {"function": "__getitem__", "idx": 1}]


def test_kinds_of_datasets(service, client):
    meta = DatasetMeta("hf://x/y")
    LazyDataset(meta, client=client)
    packing = PackingDataset(meta, packing_num_proc=2, client=client)
    packing.pack_dataset()
    service.results = {"__getitem__": {"a": 1}}
    assert packing[3] == {"a": 1}
    stream = IterablePackingDataset(meta, packing_interval=8, cyclic=True, client=client)
    stream.set_template("Template", model_id="m")
    kinds = [body["class_type"] for body in service.bodies(CREATE)]
    assert kinds == ["LazyDataset", "PackingDataset", "IterablePackingDataset"]
    assert service.bodies(CREATE)[1]["packing_num_proc"] == 2
    assert service.bodies(CREATE)[2]["cyclic"] is True
    assert calls(service)[1] == {"function": "__getitem__", "index": 3}
    assert calls(service)[2]["template_cls"] == "Template"


def test_a_stream_ends_with_410_and_begins_again(service, client):
    dataset = IterableDataset(DatasetMeta("hf://x/y"), client=client)
    service.results = {"__iter__": "ok", "__next__": {"a": 1}}
    for _ in range(2):
        rows = iter(dataset)
        assert next(rows) == {"a": 1}
        service.fail(CALL, Status(410, {"detail": "Iterator exhausted"}))
        assert list(rows) == []


def test_other_410s_are_errors_not_ends(service, client):
    dataset = IterableDataset(DatasetMeta("hf://x/y"), client=client)
    rows = iter(dataset)
    service.results = {"__next__": {"a": 1}}
    next(rows)
    service.fail(CALL, Status(410, {"detail": "batch 3 is gone"}))
    with pytest.raises(GoneError, match="batch 3"):
        next(rows)


def test_objects_are_passed_by_id(service, client):
    dataset = Dataset(DatasetMeta("hf://x/y"), client=client)
    dataset.map(SelfCognitionProcessor("Twinkle", "we", client=client))
    assert service.bodies(CREATE)[-1] == {
        "processor_type": "preprocessor",
        "class_type": "SelfCognitionProcessor",
        "model_name": "Twinkle",
        "model_author": "we",
    }
    assert calls(service)[-1]["preprocess_func"] == "pid:1"
    with pytest.raises(InvalidRequestError, match=r"preprocess_func: got 5, allowed: the name"):
        dataset.map(5)


def test_a_processor_is_made_when_it_is_needed_and_once(service, client):
    processor = AlpacaProcessor(client=client)
    assert service.bodies(CREATE) == []
    service.results = {"__call__": {"messages": []}}
    for _ in range(2):
        assert processor({"instruction": ["a"], "output": ["b"]}) == {"messages": []}
    assert len(service.bodies(CREATE)) == 1
    processor.close()
    processor({"instruction": [], "output": []})
    assert len(service.bodies(CREATE)) == 2
    with pytest.raises(TypeError, match="positional"):
        AlpacaProcessor("x")
    with pytest.raises(TypeError, match="twice"):
        SelfCognitionProcessor("x", model_name="y")


def test_rewards_processors_and_templates(service, client):
    service.results = {"__call__": [1.0]}
    assert GSM8KAccuracyReward(client=client)([{"messages": []}]) == [1.0]
    service.results = {"__call__": {"input_ids": [[1]]}}
    assert InputProcessor(padding_side="left", client=client)([{"input_ids": [1]}]) == {"input_ids": [[1]]}
    service.results = {"decode": "hello"}
    assert Qwen3_5Template("m", client=client).decode([1, 2], skip_special_tokens=True) == "hello"
    assert [body["class_type"] for body in service.bodies(CREATE)] == [
        "GSM8KAccuracyReward",
        "InputProcessor",
        "Qwen3_5Template",
    ]
    assert calls(service)[-1] == {"function": "decode", "token_ids": [1, 2], "skip_special_tokens": True}


# --- files on the client's machine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.jsonl", '{"q": 1}\n\n{"q": 2}\n', [{"q": 1}, {"q": 2}]),
        ("a.json", '[{"q": 1}]', [{"q": 1}]),
        ("b.json", '{"q": 1}\n{"q": 2}', [{"q": 1}, {"q": 2}]),
        ("c.json", '{"q": [1, 2]}', {"q": [1, 2]}),
        ("a.csv", "q,w,t\n1,0.5,NA\n2,1,x\n", [{"q": 1, "w": 0.5, "t": "NA"}, {"q": 2, "w": 1.0, "t": "x"}]),
        ("b.csv", 'q\n"two\nlines"\n', [{"q": "two\nlines"}]),
        ("a.tsv", "q\tw\na\t1\n", [{"q": "a", "w": 1}]),
        ("a.txt", "one\ntwo\n", [{"text": "one"}, {"text": "two"}]),
    ],
)
def test_a_file_of_this_machine_travels_as_rows(service, client, tmp_path, name, text, rows):
    (tmp_path / name).write_text(text)
    Dataset(DatasetMeta(str(tmp_path / name)), client=client)
    meta = meta_of(service.bodies(CREATE)[0])
    assert (meta["dataset_id"], meta["data"]) == ("", rows)


def test_files_that_cannot_travel(service, client, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "large.txt").write_text("x" * 100)
    monkeypatch.setattr(local_file, "MAX_FILE_BYTES", 99)
    for name, message in (
        ("a.parquet", "unknown file format '.parquet'"),
        ("bad.jsonl", "cannot be read as jsonl"),
        ("large.txt", "100 bytes.*hub"),
        ("", "is a directory of this machine"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            Dataset(DatasetMeta(str(tmp_path / name)), client=client)
    Dataset(DatasetMeta("/srv/on/the/server.jsonl"), client=client)
    assert meta_of(service.bodies(CREATE)[-1])["dataset_id"] == "/srv/on/the/server.jsonl"


def test_metas():
    for wrong in ({}, {"dataset_id": "x", "data": []}):
        with pytest.raises(InvalidRequestError, match="dataset_id"):
            DatasetMeta(**wrong)
    for data, message in ((lambda: [], "never shipped"), (3, "a list of rows"), ("text", "a list of rows")):
        with pytest.raises(InvalidRequestError, match=message):
            DatasetMeta(data=data).to_wire()
    with pytest.raises(InvalidRequestError, match=r"data\[0\]\.a: got nan"):
        DatasetMeta(data=[{"a": float("nan")}]).to_wire()


# --- dataloaders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loader(service, client):
    """A loader with two batches of two rows."""
    dataset = Dataset(DatasetMeta("hf://x/y"), client=client)
    loader = DataLoader(dataset, batch_size=2)
    numbers = iter(range(100))

    def answer(body):
        if body["function"] == "__next__":
            reference = {"_TWINKLE_TYPE_": "Batch", "processor_id": body["processor_id"], "number": next(numbers)}
            return {"result": {**reference, "length": 2}}
        if body["function"] == "get_batch":
            return {"result": [{"n": body["number"], "i": 0}, {"n": body["number"], "i": 1}]}
        return {"result": {"__len__": 2, "get_state": {"consumed_train_samples": 4}}.get(body["function"])}

    service.answer(CALL, answer)
    return loader


def exhaust(service, after):
    """Make the loader end after this many calls."""
    service.fail(CALL, *[None] * after, Status(410, {"detail": "Iterator exhausted"}))


def test_batches_stay_on_the_server(service, client, loader):
    service.answer("/model/m/twinkle/create", {})
    service.answer("/model/m/twinkle/add_adapter_to_model", {"adapter_name": "x"})
    service.answer("/model/m/twinkle/forward_backward", {"result": {"loss": 1.0}})
    model = MultiLoraTransformersModel("m", client=client)
    model.add_adapter_to_model("a", LoraConfig())
    exhaust(service, after=3)
    for batch in loader:
        assert len(batch) == 2
        model.forward_backward(inputs=batch)
    assert [call["function"] for call in calls(service)] == ["__iter__", "__next__", "__next__", "__next__"]
    assert calls(service)[1]["by_reference"] is True
    assert [body["inputs"] for body in service.bodies("/model/m/twinkle/forward_backward")] == [
        {"_TWINKLE_TYPE_": "Batch", "processor_id": "pid:1", "number": number} for number in (0, 1)
    ]


def test_whoever_looks_gets_the_rows_once(service, loader):
    batch = next(iter(loader))
    assert [row["i"] for row in batch] == [0, 1]
    assert batch[1] == {"n": 0, "i": 1}
    assert batch[:1] == [{"n": 0, "i": 0}]
    assert [call["function"] for call in calls(service)].count("get_batch") == 1
    assert calls(service)[-1] == {"function": "get_batch", "number": 0}


def test_a_batch_that_got_lost_on_the_way_is_not_skipped(service, loader):
    rows = iter(loader)
    service.fail(CALL, Drop())
    next(rows)
    asked = service.asked(CALL)[-2:]
    assert len({request.headers["x-idempotency-key"] for request in asked}) == 1


def test_the_rest_of_a_dataloader(service, connect, loader):
    assert len(loader) == 2
    assert loader.get_state() == {"consumed_train_samples": 4}
    loader.resume_from_checkpoint(consumed_train_samples=4, cur_step=2, gradient_accumulation_steps=1)
    for resume in (loader.skip_consumed_samples, loader.resume_from_checkpoint):
        with pytest.warns(UserWarning, match="does not support consumed-data skipping"):
            resume(None)
    loader.set_processor(InputProcessor(padding_side="left"))
    assert calls(service)[-2] == {"function": "resume_from_checkpoint", "consumed_train_samples": 4}
    assert calls(service)[-1]["processor_cls"] == "InputProcessor"
    assert calls(service)[-1]["padding_side"] == "left"
    seeded = Dataset(DatasetMeta("hf://x/y"), client=connect(seed=9))
    DataLoader(seeded, batch_size=2, shuffle=True, drop_last=True, num_workers=4, pin_memory=True)
    options = service.bodies(CREATE)[-1]
    assert {key: options[key] for key in ("shuffle", "seed", "drop_last")} == {
        "shuffle": True,
        "seed": 9,
        "drop_last": True,
    }
    assert "num_workers" not in options
    with pytest.raises(InvalidRequestError, match="dataset: got"):
        DataLoader([1, 2], batch_size=1)
    with pytest.raises(InvalidRequestError, match="another client"):
        DataLoader(seeded, batch_size=1, client=loader.client)


def test_a_session_that_ends_in_an_epoch_is_no_end_of_it(service, loader):
    rows = iter(loader)
    service.fail(CALL, Status(404, {"detail": "unknown processor pid:1"}))
    with pytest.raises(NotFoundError):
        next(rows)
