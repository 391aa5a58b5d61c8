"""Datasets and loaders on the server, over a real socket: the normal case and everything that can go wrong."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, key_for, mock_config

ROWS = [{"query": f"Who are you, number {n}?", "response": f"I am {{{{NAME}}}} {n}."} for n in range(10)]
# A text that would keep the reward's regular expression busy for an hour: it searches for an end from each beginning.
ENDLESS = [{"messages": [{"role": "assistant", "content": "<think>" * 100_000}]}]
TOKENIZER = "random://llama-tiny"


class Session:
    """A tenant's session, with the calls of the processor service."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.session_id = tenant.session()

    def post(self, verb: str, body: Any, **headers: str) -> httpx.Response:
        """Send bytes unchanged, or anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-Twinkle-Session-Id": self.session_id, "Content-Type": "application/json", **headers}
        return self.tenant.http.post(f"processor/twinkle/{verb}", content=content, headers=headers)

    def try_create(self, kind: str, name: str, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {} if key is None else {"X-Idempotency-Key": key}
        return self.post("create", {"processor_type": kind, "class_type": name, **options}, **headers)

    def create(self, kind: str, name: str, key: str | None = None, **options: Any) -> str:
        answer = self.try_create(kind, name, key, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["processor_id"])

    def try_call(self, processor_id: str, function: str, key: str | None = None, **arguments: Any) -> httpx.Response:
        headers = {} if key is None else {"X-Idempotency-Key": key}
        return self.post("call", {"processor_id": processor_id, "function": function, **arguments}, **headers)

    def call(self, processor_id: str, function: str, key: str | None = None, **arguments: Any) -> Any:
        answer = self.try_call(processor_id, function, key, **arguments)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def dataset(self, name: str = "Dataset", rows: Any = ROWS, **options: Any) -> str:
        return self.create("dataset", name, dataset_meta=meta(data=rows), **options)

    def finish(self) -> None:
        answer = self.tenant.post(f"sessions/{self.session_id}/finish", {"reason": {"type": "success"}})
        assert answer.status_code == 200, answer.text

    def loader(self, **options: Any) -> str:
        """Create a loader of plain rows with batches of four."""
        return self.create("dataloader", "DataLoader", dataset=self.dataset(), **{"batch_size": 4, **options})


def meta(**fields: Any) -> str:
    """Return a DatasetMeta as clients send it."""
    empty = {"dataset_id": "", "subset_name": "default", "split": "train", "data_slice": None, "data": None}
    return json.dumps({**empty, **fields, "_TWINKLE_TYPE_": "DatasetMeta"})


def detail(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


def workers(server: Server) -> list[int]:
    """Return the process ids of a server's workers."""
    assert server.process is not None
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "processors.worker" in _command(int(pid))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\x00", " ")
    except OSError:
        return ""


def _wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def processor_config(*, allowed_dirs: tuple[Path, ...] = (), args: Any = None, **limits: Any) -> dict[str, Any]:
    config = mock_config(limits=limits, allowed_dirs=[str(directory) for directory in allowed_dirs])
    config["applications"].append({"name": "processor", "import_path": "processor", "args": args or {}})
    return config


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the operator allows, with some rows and with links that lead out of it."""
    directory = tmp_path_factory.mktemp("allowed")
    secret = tmp_path_factory.mktemp("forbidden") / "secret.jsonl"
    secret.write_text('{"text": "secret"}\n')
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "link.jsonl").symlink_to(secret)
    (directory / "folder").mkdir()
    (directory / "folder" / "inner.jsonl").symlink_to(secret)
    (directory / "secret_path").write_text(str(secret))
    return directory


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, allowed: Path) -> Iterator[Server]:
    """A mock server with processors and without a hub, shared by all tests here that do not stop it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_OFFLINE", "1")
        config = processor_config(allowed_dirs=(allowed,), max_processors_per_tenant=40)
        server = Server(tmp_path_factory.mktemp("host"), config).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def session(host: Server) -> Session:
    """One session with one worker, for all tests that do not change it: a worker's imports take seconds."""
    made = Session(Tenant(host.url, key_for("session of many tests")))
    made.create("reward", "FormatReward")  # an empty worker would be ended
    return made


@pytest.fixture
def own_session(host: Server, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session of a tenant that no other test uses."""
    made = Session(Tenant(host.url, key_for(request.node.nodeid)))
    yield made
    made.finish()


def test_from_rows_to_batches_and_again(session: Session) -> None:
    """The steps of the client's documentation: map, encode, load to the end, and once more."""
    dataset = session.dataset()
    assert session.call(dataset, "__len__") == 10
    template = {"model_id": TOKENIZER, "max_length": 512}
    assert session.call(dataset, "set_template", template_func="Template", **template) is None
    named = {"model_name": "Twinkle", "model_author": "us"}
    session.call(dataset, "map", preprocess_func="SelfCognitionProcessor", dataset_meta=None, init_args=named)
    session.call(dataset, "encode", add_generation_prompt=False)
    row = session.call(dataset, "__getitem__", idx=3)
    assert row["messages"][-1]["content"] == "I am Twinkle 3."
    assert len(row["input_ids"]) == len(row["labels"]) == row["length"]

    loader = session.create("dataloader", "DataLoader", dataset=dataset, batch_size=4)
    assert session.call(loader, "__len__") == 3
    for start in (0, 10):
        assert session.call(loader, "__iter__") == "ok"
        batches = [session.call(loader, "__next__") for _ in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert batches[0][3]["input_ids"] == row["input_ids"]
        assert detail(session.try_call(loader, "__next__"), 410) == "Iterator exhausted"
        assert detail(session.try_call(loader, "__next__"), 410) == "Iterator exhausted"  # and at every later call
        assert session.call(loader, "get_state") == {"consumed_train_samples": start + 10}
    session.call(loader, "resume_from_checkpoint", consumed_train_samples=24)
    assert [row["query"] for row in session.call(loader, "__next__")] == [row["query"] for row in ROWS[4:8]]

    session.call(loader, "set_processor", processor_cls="InputProcessor", padding_side="left")
    session.call(loader, "__iter__")
    batch = session.call(loader, "__next__")
    width = len(batch["input_ids"][0])
    assert [len(ids) for ids in batch["input_ids"]] == [width] * 4
    assert session.call(loader, "__next__", by_reference=True).keys() == batch.keys()  # it has no reference


def test_batches_by_reference(session: Session) -> None:
    loader = session.loader(batch_size=1)
    first = session.call(loader, "__next__", by_reference=True)
    assert first == {"_TWINKLE_TYPE_": "Batch", "processor_id": loader, "number": 0, "length": 1}
    assert session.call(loader, "get_batch", number=0) == [ROWS[0]]
    assert session.call(loader, "__next__") == [ROWS[1]]  # the batch with number 1
    for _ in range(2):
        session.call(loader, "__iter__")
        for _ in range(10):
            session.call(loader, "__next__", by_reference=True)
    assert session.call(loader, "get_batch", number=21) == [ROWS[9]]
    assert session.call(loader, "get_batch", number=6) == [ROWS[4]]
    assert "not kept any more" in detail(session.try_call(loader, "get_batch", number=5), 410)
    for number in (22, -1, True, "1", None):
        assert detail(session.try_call(loader, "get_batch", number=number)).startswith("number: got")


def test_files_of_allowed_directories(session: Session, allowed: Path) -> None:
    sliced = {"_slice_type_": "range", "start": 2, "stop": 6, "step": 1}
    rows = meta(dataset_id=str(allowed / "rows.jsonl"), data_slice=sliced)
    dataset = session.create("dataset", "Dataset", dataset_meta=rows)
    assert session.call(dataset, "__getitem__", idx=0) == ROWS[2]
    lazy = session.create("dataset", "LazyDataset", dataset_meta=json.loads(rows))
    session.call(lazy, "map", preprocess_func="SelfCognitionProcessor", dataset_meta=rows)
    assert session.call(lazy, "__getitem__", idx=3)["messages"][1]["content"] == ROWS[5]["query"]
    session.call(dataset, "save_as", output_path=str(allowed / "out" / "saved.jsonl"), format=None)
    saved = (allowed / "out" / "saved.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in saved] == ROWS[2:6]


def test_streams_and_packs(session: Session) -> None:
    stream = session.dataset("IterableDataset")
    assert session.call(stream, "__iter__") == "ok"
    assert session.call(stream, "__next__") == ROWS[0]
    assert "no length" in detail(session.try_call(stream, "__len__"))
    packed = session.dataset("PackingDataset", packing_num_proc=1)
    session.call(packed, "set_template", template_func="Template", model_id=TOKENIZER, max_length=600)
    assert "Call `pack_dataset()` first" in detail(session.try_call(packed, "__len__"))
    session.call(packed, "map", preprocess_func="SelfCognitionProcessor")
    session.call(packed, "encode")
    session.call(packed, "pack_dataset")
    assert 1 < session.call(packed, "__len__") < 10
    assert session.call(packed, "__getitem__", index=0)["position_ids"].count(0) > 1
    streamed = session.dataset("IterablePackingDataset", packing_interval=4, packing_num_proc=2, cyclic=False)
    session.call(streamed, "map", preprocess_func="SelfCognitionProcessor")
    session.call(streamed, "set_template", template_cls="Template", model_id=TOKENIZER, max_length=600)
    session.call(streamed, "pack_dataset")
    packs = 0
    while (answer := session.try_call(streamed, "__next__")).status_code == 200:
        packs += answer.json()["result"]["position_ids"].count(0)
    assert detail(answer, 410) == "Iterator exhausted"
    assert packs == 10


def test_templates_rewards_and_preprocessors(session: Session) -> None:
    template = session.create("template", "Template", model_id=TOKENIZER, default_system="pid:not an id")
    conversation = {"messages": [{"role": "user", "content": "8"}, {"role": "assistant", "content": "true"}]}
    encoded = session.call(template, "encode", trajectory=conversation)
    text = session.call(template, "decode", token_ids=encoded["input_ids"])
    assert "pid:not an id" in text
    assert "true" in text
    assert session.call(template, "check", trajectory=json.dumps(conversation)) == conversation
    preprocessor = session.create("preprocessor", "SelfCognitionProcessor", model_name="8")
    made = session.call(preprocessor, "__call__", columns={"query": ["q"], "response": ["{{NAME}}"]})
    assert made["messages"][0][2]["content"] == "8"  # the text "8", not a number
    dataset = session.dataset()
    session.call(dataset, "map", preprocess_func=preprocessor)
    session.call(dataset, "set_template", template_func=template)
    session.call(dataset, "check")
    assert session.call(dataset, "__len__") == 10
    reward = session.create("reward", "GSM8KAccuracyReward")
    answers = [{"messages": [{"role": "assistant", "content": rf"\boxed{{{n}}}"}]} for n in (1, 2)]
    truths = [{"messages": [], "user_data": [["ground_truth", "2"]]}] * 2
    assert session.call(reward, "__call__", trajectories=answers, ground_truths=truths) == [0.0, 1.0]
    processor = session.create("processor", "InputProcessor", device_mesh=None, padding_free=False)
    batch = session.call(processor, "__call__", inputs=[{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["input_ids"] == [[1, 2, 3], [4, 0, 0]]


def test_the_same_key_gets_the_same_answer(session: Session) -> None:
    loader = session.loader()
    first = session.call(loader, "__next__", key="a")
    assert session.call(loader, "__next__", key="a") == first
    assert session.call(loader, "__next__", key="b") != first
    assert session.call(loader, "get_state") == {"consumed_train_samples": 8}
    made = session.create("reward", "FormatReward", key="c")
    assert session.create("reward", "FormatReward", key="c") == made
    assert "not used before" in detail(session.try_create("reward", "MathReward", key="c"))
    assert "not used before" in detail(session.try_call(loader, "__next__", key="c"))
    session.call(loader, "__next__")
    assert detail(session.try_call(loader, "__next__", key="end"), 410) == "Iterator exhausted"
    session.call(loader, "__iter__")
    assert detail(session.try_call(loader, "__next__", key="end"), 410) == "Iterator exhausted"
    assert "256" in detail(session.try_call(loader, "__next__", key="k" * 257))
    # repeated while the first request is still running
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: session.call(loader, "__next__", key="together"), range(8)))
    assert all(answer == ROWS[:4] for answer in answers)
    assert session.call(loader, "get_state") == {"consumed_train_samples": 14}


def test_others_have_no_part_in_it(own_session: Session, host: Server) -> None:
    loader = own_session.loader()
    other = Session(Tenant(host.url, key_for("other tenant")))
    sibling = Session(own_session.tenant)
    for stranger in (other, sibling):
        assert "create it again" in detail(stranger.try_call(loader, "__next__"), 404)  # the session has no worker
        stranger.create("reward", "FormatReward")
        foreign = detail(stranger.try_call(loader, "__next__"), 404)
        assert foreign == detail(stranger.try_call("pid:" + "0" * 32, "__next__"), 404)
        refused = stranger.try_create("dataloader", "DataLoader", dataset=loader, batch_size=1)
        assert detail(refused, 404) == foreign.replace("processor_id", "dataset")
    headers = {"X-Twinkle-Session-Id": own_session.session_id}
    body = {"processor_id": loader, "function": "__next__"}
    assert other.tenant.post("processor/twinkle/call", body, **headers).status_code == 404
    assert "X-Twinkle-Session-Id" in detail(own_session.tenant.post("processor/twinkle/call", body))
    assert own_session.call(loader, "__next__") == ROWS[:4]
    for stranger in (other, sibling):
        stranger.finish()


@pytest.mark.parametrize(
    "dataset_id",
    [
        "{allowed}/link.jsonl",
        "{allowed}/folder",
        "{allowed}/../{forbidden}",
        "{allowed}-other/rows.jsonl",
        "{secret}",
        "file://{secret}",
        "hf://{secret}",
        "hf:///etc",
        "ms:///etc/passwd",
        "hf://../../etc",
        "hf://json",
        "json",
        "/etc",
        "/proc/self/environ",
        "~/.bashrc",
        "./rows.jsonl",
        "rows.jsonl",
        "../x",
        "../../x/y",
        "..",
        "s3://bucket/key",
        "https://example.org/rows.jsonl",
        "zip://x::{secret}",
        "org/name\x00",
        "",
    ],
)
def test_no_other_place_of_the_machine_is_read(session: Session, allowed: Path, dataset_id: str) -> None:
    secret = (allowed / "secret_path").read_text()
    forbidden = os.path.relpath(secret, allowed / "..")
    text = dataset_id.format(allowed=allowed, secret=secret, forbidden=forbidden)
    answer = session.try_create("dataset", "Dataset", dataset_meta=meta(dataset_id=text))
    assert "dataset_id" in detail(answer)
    assert "secret" not in answer.text.replace(text, "").replace(text.encode("unicode_escape").decode(), "")


HUB = [
    ({"dataset_id": "hf://org/name"}, "cannot load the dataset hf://org/name"),
    ({"dataset_id": "ms://org/name"}, "ms://org/name"),
    ({"dataset_id": "org/name"}, "ms://org/name"),
]
REFUSED = [
    ({"data": 5}, "a list of rows"),
    ({"data": [1]}, "a list of rows"),
    ({"data": {"a": 1}}, "an object of columns"),
    ({"data": ROWS, "dataset_id": "hf://a/b"}, "nothing beside dataset_id"),
    ({"data": ROWS, "data_slice": [1]}, "_slice_type_"),
    ({"data": ROWS, "data_slice": {"_slice_type_": "range", "start": 0, "stop": 10**12, "step": 1}}, "at most"),
    ({"data": ROWS, "data_slice": {"_slice_type_": "range", "start": 0, "stop": 1, "step": 0}}, "_slice_type_"),
    ({"data": ROWS, "data_slice": {"_slice_type_": "list", "values": [0.5]}}, "_slice_type_"),
    ({"data": ROWS, "split": "../x"}, "split"),
    ({"data": ROWS, "split": 5}, "split"),
    ({"data": ROWS, "subset_name": "a/b"}, "subset_name"),
    ({"data": ROWS, "loader": "x"}, "DatasetMeta with the keys"),
]


@pytest.mark.parametrize(("fields", "message"), HUB + REFUSED)
def test_sources_that_do_not_work(session: Session, fields: dict[str, Any], message: str) -> None:
    answer = session.try_create("dataset", "Dataset", dataset_meta=meta(**fields))
    assert message in detail(answer)
    assert "Traceback" not in answer.text


CREATES: list[tuple[str, str, dict[str, Any], str]] = [
    ("weight_loader", "Loader", {}, "weight_loader"),
    ("model", "MultiLoraTransformersModel", {}, "dataset, dataloader"),
    ("os", "system", {"command": "true"}, "dataset, dataloader"),
    ("dataset", "DatasetMeta", {}, "unknown class_type of dataset"),
    ("dataset", "__class__", {}, "unknown class_type"),
    ("dataset", "hf://org/plugin", {}, "unknown class_type"),
    ("template", "ToolCallRegistry", {}, "unknown class_type"),
    ("preprocessor", "Preprocessor", {}, "unknown class_type"),
    ("reward", "Reward", {}, "unknown class_type"),
    ("reward", "MathReward", {"ground_truth_key": 5}, "ground_truth_key"),
    ("reward", "MathReward", {"remote_group": "default"}, "remote_group"),
    ("dataset", "Dataset", {"device_mesh": {"dp_size": 2}}, "device_mesh"),
    ("dataset", "Dataset", {"data_files": "/etc/passwd"}, "unknown argument of Dataset 'data_files'"),
    ("dataset", "Dataset", {"cache_dir": "/tmp/x"}, "cache_dir"),
    ("dataset", "Dataset", {"dataset_meta": meta(dataset_id="hf://a/b"), "revision": "a/../../b"}, "a branch, tag"),
    ("dataset", "Dataset", {"dataset_meta": meta(data=ROWS), "revision": "main"}, "not of a hub"),
    ("dataset", "Dataset", {"trust_remote_code": True}, "trust_remote_code"),
    ("dataset", "Dataset", {"dataset_meta": "hf://org/name"}, "a DatasetMeta"),
    ("dataset", "Dataset", {"dataset_meta": '{"_TWINKLE_TYPE_": "LoraConfig", "r": 8}'}, "a DatasetMeta"),
    ("dataset", "PackingDataset", {"packing_num_proc": 64}, "packing_num_proc"),
    ("dataset", "IterablePackingDataset", {"packing_num_proc": 64}, "packing_num_proc"),
    ("dataloader", "DataLoader", {"batch_size": 4}, "dataset"),
    ("dataloader", "DataLoader", {"dataset": "pid:x", "batch_size": 4}, "no such processor"),
    ("preprocessor", "SelfCognitionProcessor", {"system": "x"}, "unknown option of SelfCognitionProcessor"),
    ("template", "Template", {}, "also model_id"),
    ("template", "Template", {"model_id": "mock"}, "served here without a tokenizer"),
    ("template", "Template", {"model_id": "hf://mock"}, "served here without a tokenizer"),
    ("template", "Template", {"model_id": "/etc"}, "allowed_dirs"),
    ("template", "Template", {"model_id": "~"}, "a served model (mock)"),
    ("template", "Template", {"model_id": "pypi://requests"}, "a served model (mock)"),
    ("template", "Template", {"model_id": "hf://../etc/x"}, "a served model (mock)"),
    ("template", "Template", {"model_id": "random://../x"}, "a served model (mock)"),
    ("template", "Template", {"model_id": "random://nobody"}, "unknown random model"),
    ("template", "Template", {"model_id": "hf://org/none"}, "hf://org/none"),
    ("template", "Template", {"model_id": TOKENIZER, "trust_remote_code": True}, "trust_remote_code"),
]


@pytest.mark.parametrize(("kind", "name", "options", "message"), CREATES)
def test_what_cannot_be_created(session: Session, kind: str, name: str, options: dict[str, Any], message: str) -> None:
    status = 404 if message == "no such processor" else 400
    assert message in detail(session.try_create(kind, name, **options), status)


def test_what_cannot_be_called(session: Session, allowed: Path) -> None:
    dataset, loader = session.dataset(), session.loader()
    reward = session.create("reward", "FormatReward")
    for function in ("__class__", "__init__", "__reduce__", "__dict__", "datasets", "_sources", "__iter__", "", "a.b"):
        assert "unknown function of Dataset" in detail(session.try_call(dataset, function))
    calls: list[tuple[str, str, dict[str, Any], str]] = [
        (dataset, "map", {"preprocess_func": "os.system"}, "unknown preprocess_func"),
        (dataset, "map", {"preprocess_func": "hf://org/plugin"}, "unknown preprocess_func"),
        (dataset, "map", {"preprocess_func": {"__class__": "x"}}, "unknown preprocess_func"),
        (dataset, "map", {"preprocess_func": reward}, "the id of a preprocessor"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "num_proc": 2}, "num_proc"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "load_from_cache_file": True}, "load_from_cache_file"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "cache_file_name": "/tmp/x"}, "cache_file_name"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "new_fingerprint": "x"}, "new_fingerprint"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "fn_kwargs": {}}, "fn_kwargs"),
        (dataset, "map", {"preprocess_func": "AlpacaProcessor", "init_args": {"x": 1}}, "unknown option"),
        (dataset, "map", {}, "preprocess_func"),
        (dataset, "filter", {"filter_func": "AlpacaProcessor"}, "unknown filter_func"),
        (dataset, "set_template", {"template_func": "hf://org/plugin", "model_id": TOKENIZER}, "unknown template_func"),
        (dataset, "set_template", {"template_func": "Template", "model_id": "/etc"}, "allowed_dirs"),
        (dataset, "set_template", {"model_id": TOKENIZER}, "also template_func"),
        (dataset, "encode", {}, "call set_template() first"),
        (dataset, "cast_column", {"column": "picture", "decode": True}, "column: got 'picture', allowed: one of"),
        (dataset, "add_dataset", {"dataset_meta": None}, "a DatasetMeta"),
        (dataset, "add_dataset", {"dataset_meta": meta(data=ROWS)}, "not loaded yet"),
        (dataset, "__getitem__", {"idx": "0"}, "an integer"),
        (dataset, "__getitem__", {"idx": 10**30}, "an integer"),
        (dataset, "__getitem__", {"idx": 10}, "IndexError"),
        (dataset, "__getitem__", {}, "idx"),
        (dataset, "__len__", {"x": 1}, "unknown argument of Dataset.__len__"),
        (dataset, "save_as", {"output_path": "/tmp/twinkle-out.jsonl"}, "allowed_dirs"),
        (dataset, "save_as", {"output_path": "out.jsonl"}, "allowed_dirs"),
        (dataset, "save_as", {"output_path": "~/out.jsonl"}, "allowed_dirs"),
        (dataset, "save_as", {"output_path": f"{allowed}/../out.jsonl"}, "allowed_dirs"),
        (dataset, "save_as", {"output_path": f"{allowed}/link.jsonl"}, "allowed_dirs"),
        (loader, "set_processor", {"processor_cls": "ms://org/plugin"}, "unknown processor_cls"),
        (loader, "skip_consumed_samples", {"consumed_train_samples": -1}, "an integer ≥ 0"),
        (reward, "__call__", {"trajectories": 5}, "an object or a list"),
        (reward, "__call__", {"trajectories": [5]}, "AttributeError"),
    ]
    for processor_id, function, arguments, message in calls:
        assert message in detail(session.try_call(processor_id, function, **arguments)), (function, arguments)
    assert session.call(dataset, "__len__") == 10  # none of the calls changed anything


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"processor_type": NaN}',
        b'{"processor_type": 5, "class_type": []}',
        b'{"processor_id": {}, "function": 5}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 5000,
    ],
    ids=range(12),
)
def test_malformed_bodies(session: Session, body: bytes) -> None:
    for verb in ("create", "call"):
        answer = session.post(verb, body)
        assert answer.status_code == 400, answer.text
        assert len(answer.json()["detail"]) < 500
    session.call(session.create("reward", "FormatReward"), "close")


def test_a_worker_that_dies_takes_its_session_only(own_session: Session, host: Server) -> None:
    bystander = Session(own_session.tenant)
    kept = bystander.create("reward", "FormatReward")
    before = set(workers(host))
    dataset = own_session.dataset()
    (worker,) = set(workers(host)) - before
    os.kill(worker, signal.SIGKILL)
    _wait(lambda: worker not in workers(host))
    message = detail(own_session.try_call(dataset, "__len__"), 404)
    assert "worker of this session ended (SIGKILL" in message
    assert "again" in message
    assert bystander.call(kept, "__call__", trajectories=[]) == []
    again = own_session.dataset()
    assert own_session.call(again, "__len__") == 10
    assert "create it again" in detail(own_session.try_call(dataset, "__len__"), 404)
    bystander.finish()


def test_a_worker_that_dies_in_a_call(own_session: Session, host: Server) -> None:
    before = set(workers(host))
    reward = own_session.create("reward", "FormatReward")
    (worker,) = set(workers(host)) - before
    threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
    ended = own_session.try_call(reward, "__call__", trajectories=ENDLESS, key="endless")
    assert "worker of this session ended (SIGKILL" in detail(ended, 404)
    assert detail(own_session.try_call(reward, "__call__", trajectories=ENDLESS, key="endless"), 404) == detail(
        ended, 404
    )
    assert own_session.create("reward", "FormatReward")


def test_what_a_session_had_goes_with_it(own_session: Session, host: Server) -> None:
    before = set(workers(host))
    reward = own_session.create("reward", "FormatReward")
    (worker,) = set(workers(host)) - before
    directories = set((host.data_dir / "processors").iterdir())
    own_session.finish()
    assert _command(worker) == ""
    _wait(lambda: len(set((host.data_dir / "processors").iterdir())) == len(directories) - 1)
    assert own_session.try_call(reward, "__call__", trajectories=[]).status_code == 400
    assert own_session.try_create("reward", "FormatReward").status_code == 400


def test_closed_processors_make_room(own_session: Session, host: Server) -> None:
    before = len(workers(host))
    made = [own_session.create("reward", "FormatReward") for _ in range(40)]
    answer = own_session.try_create("reward", "FormatReward")
    assert "processors: 40 of 40 in use" in detail(answer, 429)
    assert answer.headers["retry-after"]
    assert own_session.call(made.pop(), "close") == "ok"
    made.append(own_session.create("reward", "FormatReward"))
    for one in made:
        own_session.call(one, "close")
    assert len(workers(host)) == before  # an empty worker is ended
    assert own_session.try_call(made[0], "close").status_code == 404


def test_a_processors_heartbeat_is_one_of_its_session(host: Server, own_session: Session) -> None:
    def last_seen() -> float:
        listed = own_session.tenant.get("twinkle/sessions").json()["sessions"]
        return next(float(each["last_seen"]) for each in listed if each["session_id"] == own_session.session_id)

    def beat(session: Session, processor_id: str) -> httpx.Response:
        return session.post("heartbeat", {"processor_id": processor_id})

    made = own_session.create("reward", "FormatReward")
    before = last_seen()
    answer = beat(own_session, made)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert last_seen() > before
    with ThreadPoolExecutor(1) as pool:  # a busy worker is no reason to wait
        call = pool.submit(own_session.try_call, made, "__call__", trajectories=ENDLESS)
        time.sleep(0.3)
        assert beat(own_session, made).status_code == 200
        assert not call.done()
        own_session.finish()
        call.result()
    fresh = Session(own_session.tenant)
    assert "no such processor in this session" in detail(beat(fresh, made), 404)
    kept = fresh.create("reward", "FormatReward")
    for session in (Session(fresh.tenant), Session(Tenant(host.url, "tml-foreign"))):
        assert "no such processor in this session" in detail(beat(session, kept), 404)
    foreign = Session(Tenant(host.url, "tml-foreign"))
    foreign.session_id = fresh.session_id
    assert "unknown session" in detail(beat(foreign, kept), 404)
    assert "processor_id" in detail(fresh.post("heartbeat", {}), 400)
    fresh.call(kept, "close")
    assert "create it again" in detail(beat(fresh, kept), 404)


def test_limits_hold_for_requests_at_the_same_time(own_server: Callable[..., Server]) -> None:
    config = processor_config(max_processors_per_tenant=5, max_processor_sessions_per_tenant=2, args={"max_workers": 3})
    server = own_server(config)
    tenant = Tenant(server.url, "tml-one")
    sessions = [Session(tenant) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: sessions[n % 2].try_create("reward", "FormatReward"), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 11
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "processors: 5 of 5 in use (max_processors_per_tenant); close() datasets" in refused.json()["detail"]
    assert refused.json()["code"] == "limit_reached"
    assert len(workers(server)) == 2
    ids = [answer.json()["processor_id"] for answer in answers if answer.status_code == 200]
    assert len(set(ids)) == 5
    for one, processor_id in [(one, processor_id) for one in sessions[:2] for processor_id in ids]:
        one.try_call(processor_id, "close")  # only one of the sessions has it
    sessions[0].create("reward", "FormatReward")
    sessions[1].create("reward", "FormatReward")
    assert "sessions with processors: 2 of 2" in detail(sessions[2].try_create("reward", "FormatReward"), 429)
    others = [Session(Tenant(server.url, f"tml-other-{n}")) for n in range(2)]
    others[0].create("reward", "FormatReward")
    full = others[1].try_create("reward", "FormatReward", key="again")
    assert "workers for processors on this server: 3 of 3" in detail(full, 429)
    assert "code" not in full.json()  # another tenant may end its session, so clients wait
    assert full.headers["retry-after"] == "1"
    assert sessions[2].try_create("reward", "FormatReward").json()["code"] == "limit_reached"  # its own limit is full
    sessions[0].finish()
    others[1].create("reward", "FormatReward", key="again")  # the same key again, now that there is room
    assert len(workers(server)) == 3
    # A server that is stopped ends all workers.
    running = workers(server)
    busy = others[1].create("reward", "FormatReward")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(others[1].try_call, busy, "__call__", trajectories=ENDLESS)
        time.sleep(0.3)
        assert server.stop() == 0
        assert "shutting down" in detail(call.result(), 503)
    assert [_command(pid) for pid in running] == [""] * 3
    assert not (server.data_dir / "processors").exists()


def test_nothing_is_left_of_a_server_that_was_killed(own_server: Callable[..., Server]) -> None:
    server = own_server(processor_config())
    session = Session(Tenant(server.url, "tml-one"))
    busy, idle = session.create("reward", "FormatReward"), Session(session.tenant)
    idle.create("reward", "FormatReward")
    running = workers(server)
    assert len(running) == 2
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(session.try_call, busy, "__call__", trajectories=ENDLESS)
        time.sleep(0.3)
        server.kill()
        _wait(lambda: not any(map(_command, running)))
        with pytest.raises(httpx.TransportError):
            call.result()
    assert len(list((server.data_dir / "processors").iterdir())) == 2
    server.start()
    assert not list((server.data_dir / "processors").iterdir())
    assert "create it again" in detail(session.try_call(busy, "__call__", trajectories=[]), 404)
    assert session.create("reward", "FormatReward")


def test_a_batch_is_trained_on_again_when_its_loader_is_gone(own_server: Callable[..., Server]) -> None:
    """The journal has the batch's rows, not its name; the request is still recognized by the bytes that were sent."""
    server = own_server(processor_config(), snapshot=3600.0)
    native, session = NativeTenant(server.url, "tml-one", MODEL), Session(Tenant(server.url, "tml-one"))
    session.session_id = native.session_id
    rows = [{"input_ids": [n, 5, 9], "labels": [5, 9, n + 1]} for n in range(1, 3)]
    loader = session.create("dataloader", "DataLoader", dataset=session.dataset(rows=rows), batch_size=1)
    batches = [session.call(loader, "__next__", by_reference=True) for _ in rows]
    native.add_adapter("a", seed=1)
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05, seq_id=1)

    def losses() -> list[float]:
        asked = [{"adapter_name": "a", "inputs": batch, "seq_id": seq_id} for seq_id, batch in enumerate(batches, 2)]
        return [native.verb("forward_backward", **each)["loss"] for each in asked]

    before = losses()
    native.verb("step", adapter_name="a", seq_id=4)
    weights = native.verb("get_state_dict", adapter_name="a", seq_id=5)
    server.kill()
    server.start()
    assert native.verb("get_state_dict", adapter_name="a", seq_id=6) == weights
    assert losses() == before
    assert "create it again" in native.refusal("forward_backward", 404, adapter_name="a", inputs=batches[0])


def test_a_server_without_processors(server: Server, tenant: Tenant) -> None:
    session = Session(tenant)
    for verb in ("create", "call"):
        assert "no processors" in detail(session.post(verb, {}))
