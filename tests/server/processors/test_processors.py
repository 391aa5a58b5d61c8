"""How a worker handles requests, without a server, and the limits of workers."""

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Audio, Features, Image, List, Value
from datasets import Dataset as Table

import twinkle.dataset
import twinkle.preprocessor
import twinkle.reward
import twinkle.template
from twinkle.dataset import DatasetMeta
from twinkle.environment import variables_with_own_caches
from twinkle.errors import GoneError, InvalidInputError, QuotaError, UnsupportedError, UserError
from twinkle.images import EncodedImage
from twinkle.server.config import LimitsConfig
from twinkle.server.processors import catalog, sources, worker_process
from twinkle.server.processors.live import KeptBatches, NoRoomError, Pass
from twinkle.server.processors.messages import Answers, FrameTooLargeError, Settings, pack, receive_frame, to_json
from twinkle.server.processors.service import ProcessorService
from twinkle.server.processors.sources import Sources
from twinkle.server.processors.worker import Workbench
from twinkle.server.processors.worker_process import WorkerEndedError

# searching for the ends takes very long
ENDLESS = [{"messages": [{"role": "assistant", "content": "<think>" * 100_000}]}]


def _concrete(package: Any, base: type) -> set[str]:
    found = {name: getattr(package, name) for name in package.__all__}
    return {
        name
        for name, value in found.items()
        if inspect.isclass(value) and issubclass(value, base) and not inspect.isabstract(value)
    }


def test_the_catalog_has_all_classes_of_the_library() -> None:
    assert set(catalog.PREPROCESSORS) == _concrete(twinkle.preprocessor, twinkle.preprocessor.Preprocessor)
    assert set(catalog.FILTERS) == _concrete(twinkle.preprocessor, twinkle.preprocessor.DataFilter)
    assert set(catalog.REWARDS) == _concrete(twinkle.reward, twinkle.reward.Reward)
    assert set(catalog.TEMPLATES) == _concrete(twinkle.template, twinkle.template.Template)
    assert set(catalog.CATALOG["dataset"]) == _concrete(twinkle.dataset, twinkle.dataset.Dataset)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, classes in catalog.CATALOG.items() for name in classes]
)
def test_what_the_catalog_names_exists(kind: str, name: str) -> None:
    """Options must be constructor parameters, functions must be methods, and arguments must be their parameters."""
    entry = catalog.CATALOG[kind][name]
    made = getattr(__import__(entry.home, fromlist=[name]), name)
    for function, described in entry.functions.items():
        if function in ("close", "get_batch") or (function == "__next__" and kind == "dataset"):
            continue
        parameters = inspect.signature(getattr(made, function)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or function == "__next__":
            continue
        assert set(described.arguments) <= set(parameters) - {"self"}, function
    known = set(inspect.signature(made).parameters) | {"remote_group", "device_mesh", "revision", "token"}
    if kind in ("dataloader", "template", "processor", "dataset"):
        assert set(entry.options) <= known


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_are_json() -> None:
    torch = pytest.importorskip("torch")
    value = {
        "array": np.arange(3),
        "nested": [np.float32(0.5), (1, np.int64(2))],
        "tensor": torch.tensor([[1.5, math.inf]], dtype=torch.bfloat16),
        "nan": math.nan,
        "when": datetime(2024, 5, 1),
        "text": "\ud800 \x00 é",
        "none": None,
    }
    assert json.loads(to_json(value)) == {
        "array": [0, 1, 2],
        "nested": [0.5, [1, 2]],
        "tensor": [[1.5, None]],
        "nan": None,
        "when": "2024-05-01T00:00:00",
        "text": "\ud800 \x00 é",
        "none": None,
    }
    files = {"image": {"bytes": b"x", "path": "a.png"}, "picture": EncodedImage(b"y", "png")}
    assert json.loads(to_json(files)) == {
        "image": {"bytes": "eA==", "path": "a.png"},
        "picture": "data:image/png;base64,eQ==",
    }
    for thing in (object(), {"image": [object()]}, [math.nan, object()]):
        with pytest.raises(UnsupportedError, match="cannot be sent as JSON"):
            to_json(thing)


def test_a_pass_that_failed_does_not_look_like_its_end() -> None:
    def items() -> Any:
        yield 1
        raise ValueError("a bad row")

    class Rows:
        def __iter__(self) -> Any:
            return items()

    course = Pass()
    assert course.next(Rows()) == 1
    with pytest.raises(ValueError, match="a bad row"):
        course.next(Rows())
    with pytest.raises(InvalidInputError, match="begins a new pass"):
        course.next(Rows())
    course.begin(Rows())
    assert course.next(Rows()) == 1
    course.begin([])
    for _ in range(2):
        with pytest.raises(GoneError, match="Iterator exhausted"):
            course.next([])


def test_the_last_batches_are_kept() -> None:
    batches = KeptBatches(1000)
    with pytest.raises(InvalidInputError, match="no batch was served"):
        batches.get("loader", 0)
    assert [batches.add("loader", str(number)) for number in range(20)] == list(range(20))
    assert batches.get("loader", 4) == "4"
    with pytest.raises(GoneError, match="now from 4"):
        batches.get("loader", 3)


# --- sources ----------------------------------------------------------------------------------------------------------


class _Builder:
    """The part of a dataset builder that is used. It records whether the data were prepared."""

    def __init__(self, *files: str) -> None:
        self.config = type("Config", (), {"data_files": {"train": list(files)}})
        self.prepared = False

    def download_and_prepare(self) -> None:
        self.prepared = True

    def as_dataset(self, split: str) -> Table:
        assert self.prepared
        return Table.from_list([{"split": split}, {"split": "x"}])

    def as_streaming_dataset(self, split: str) -> Any:
        return Table.from_list([{"split": split}]).to_iterable_dataset()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Builder], list[dict[str, Any]]]:
    """Replaces the hub's content with a builder; returns the recorded requests."""

    def install(builder: _Builder) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def load(place: str, **options: Any) -> _Builder:
            asked.append({"place": place, **options})
            return builder

        monkeypatch.setattr("datasets.load_dataset_builder", load)
        return asked

    return install


def test_rows_of_a_hub(hub: Callable[[_Builder], list[dict[str, Any]]], tmp_path: Path) -> None:
    asked = hub(_Builder("hf://datasets/org/name@abc/train.jsonl"))
    bench = Sources([], {}, tmp_path)
    meta = bench.meta(DatasetMeta("hf://org/name", subset_name="sub", split="test", data_slice=range(1)))
    dataset = twinkle.dataset.Dataset()
    bench.add(dataset, meta, revision="abc")
    assert asked[0]["token"] is False  # not the server's token
    assert (asked[0]["place"], asked[0]["name"], asked[0]["revision"]) == ("org/name", "sub", "abc")
    assert list(dataset) == [{"split": "test"}]
    # the same meta names the dataset
    dataset.map(lambda columns: {"split": [text.upper() for text in columns["split"]]}, meta)
    assert list(dataset) == [{"split": "TEST"}]
    stream = twinkle.dataset.IterableDataset()
    bench.add(stream, meta, token="theirs")
    assert asked[1]["token"] == "theirs"
    assert list(stream) == [{"split": "test"}]


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "https://example.org/x.jsonl",
        "hf://datasets/org/other@abc/x.jsonl",
        "hf://datasets/org/name@abc/../../../x.jsonl",
        "zip://x.jsonl::hf://datasets/org/name@abc/x.zip",
        "hf://datasets/org/name@abc/x.zip::/etc/x.zip",
    ],
)
def test_a_hubs_dataset_cannot_name_other_files(
    hub: Callable[[_Builder], list[dict[str, Any]]], tmp_path: Path, file: str
) -> None:
    builder = _Builder("hf://datasets/org/name@abc/train.jsonl", file)
    hub(builder)
    bench = Sources([], {}, tmp_path)
    with pytest.raises(InvalidInputError, match="names files of its own only"):
        bench.add(twinkle.dataset.Dataset(), bench.meta(DatasetMeta("hf://org/name")))
    assert not builder.prepared


def test_modelscopes_dataset_cannot_name_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the library's own parser for a repository's card."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"a": 1}\n')
    (folder / "own.jsonl").write_text('{"a": 2}\n')
    monkeypatch.setattr(sources.HubOperation, "download_file", lambda *_, **__: str(folder))
    bench = Sources([], {}, tmp_path / "cache")

    def load(data_files: str) -> list[Any]:
        card = f"---\nconfigs:\n- config_name: default\n  data_files: {data_files}\n---\n"
        (folder / "README.md").write_text(card)
        dataset = twinkle.dataset.Dataset()
        bench.add(dataset, bench.meta(DatasetMeta("ms://org/name")))
        return list(dataset)

    for outside in (f"{tmp_path}/secret.jsonl", "../secret.jsonl"):
        with pytest.raises(InvalidInputError, match="names files of its own only"):
            load(outside)
    assert load("own.jsonl") == [{"a": 2}]


def test_columns_of_images_stay_files(tmp_path: Path) -> None:
    """No path in a row is opened: neither when it is read, nor when it is saved."""
    bench = Sources([tmp_path], {}, tmp_path / "cache")
    features = Features({"text": Value("string"), "pictures": List(Image()), "one": Image()})
    outside = tmp_path / "outside.png"
    outside.write_bytes(b"secret")
    file, elsewhere = {"bytes": b"file", "path": "a.png"}, {"bytes": None, "path": str(outside)}
    _write(tmp_path / "rows.parquet", features, {"text": "x", "pictures": [file, elsewhere], "one": elsewhere})
    for kind in (twinkle.dataset.Dataset, twinkle.dataset.IterableDataset, twinkle.dataset.LazyDataset):
        dataset = kind()
        bench.add(dataset, bench.meta(DatasetMeta(str(tmp_path / "rows.parquet"))))
        (row,) = list(dataset) if kind is not twinkle.dataset.LazyDataset else [dataset[0]]
        assert row == {"text": "x", "pictures": [file, elsewhere], "one": elsewhere}
        if kind is not twinkle.dataset.IterableDataset:
            dataset.save_as(tmp_path / "saved.parquet")
            assert b"secret" not in (tmp_path / "saved.parquet").read_bytes()
    sound = Features({"text": Value("string"), "sound": Audio()})
    _write(tmp_path / "sound.parquet", sound, {"text": "x", "sound": {"bytes": b"", "path": None}})
    dataset = twinkle.dataset.Dataset()
    with pytest.raises(UnsupportedError, match="column 'sound' is Audio"):
        bench.add(dataset, bench.meta(DatasetMeta(str(tmp_path / "sound.parquet"))))
    assert dataset.dataset is None


def _write(path: Path, features: Features, row: dict[str, Any]) -> None:
    """Write a table with a type for each column, and one row as it is: nothing is decoded or read from elsewhere."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: pyarrow.array([row[name]], features.arrow_schema.field(name).type) for name in row})
    parquet.write_table(table.replace_schema_metadata(features.arrow_schema.metadata), path)


def test_a_served_model_is_known_by_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    (tmp_path / "m").mkdir()
    bench = Sources([tmp_path], {"hf://org/m": "/models/m", "m": "/models/m", "mock": None}, tmp_path)
    assert bench.model_folder("m") == bench.model_folder("ms://m") == bench.model_folder("hf://org/m") == "/models/m"
    assert bench.model_folder("hf://org/other@v1") == "hf://org/other@v1"
    assert bench.model_folder(f"{tmp_path}/x/../m") == str(tmp_path / "m")
    for wrong in (
        "/models/m",
        "other",
        "../m",
        "file:///models/m",
        "hf:///models/m",
        "~",
        ".",
        "random://a/b",
        "a/b@c/../d",
    ):
        with pytest.raises(InvalidInputError, match="model_id"):
            bench.model_folder(wrong)


# --- a bench ----------------------------------------------------------------------------------------------------------


def _bench(tmp_path: Path) -> Workbench:
    return Workbench(Settings((), {}, str(tmp_path), 2**30, answer_bytes=2**20))


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_no_pipe_of_objects_between_types(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    reward = bench.create(_body(processor_type="reward", class_type="FormatReward"))
    with pytest.raises(InvalidInputError, match="the id of a dataset"):
        bench.create(_body(processor_type="dataloader", class_type="DataLoader", dataset=reward, batch_size=1))
    with pytest.raises(InvalidInputError, match="a dataloader"):
        bench.batch(reward, 0)
    assert len(bench.objects.ids()) == 1


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_of_errors_are_kept_and_refusals_are_not() -> None:
    calls: list[str] = []

    def work(name: str, error: Exception | None) -> Callable[[], Awaitable[bytes]]:
        async def run() -> bytes:
            calls.append(name)
            if error is not None:
                raise error
            return name.encode()

        return run

    async def main() -> None:
        answers = Answers()
        for _ in range(2):
            with pytest.raises(UserError, match="wrong"):
                await answers.once("a", b"", work("a", UserError("wrong")))
        for _ in range(2):
            with pytest.raises(QuotaError):
                await answers.once("b", b"", work("b", QuotaError("things", 1, 1, "max_things")))
        assert await answers.once("b", b"", work("b", None)) == b"b"
        assert calls == ["a", "b", "b", "b"]
        for number in range(100):
            await answers.once(str(number), b"", work("x", None))
        calls.clear()
        await answers.once("99", b"", work("kept", None))
        await answers.once("a", b"", work("forgotten", None))
        assert calls == ["forgotten"]

    asyncio.run(main())


def test_large_answers_are_not_kept_for_long() -> None:
    async def large() -> bytes:
        return bytes(12 * 2**20)

    async def main() -> None:
        answers = Answers()
        for key in "abcd":
            await answers.once(key, b"", large)
        assert list(answers._entries) == ["c", "d"]

    asyncio.run(main())


# --- workers ----------------------------------------------------------------------------------------------------------


def _service(directory: Path, seconds: float = 60.0, memory_bytes: int = 2**30) -> ProcessorService:
    settings = Settings((), {}, "", memory_bytes, answer_bytes=1000)
    limits = LimitsConfig(
        max_processors_per_tenant=5, max_processor_sessions_per_tenant=5, processor_call_seconds=seconds
    )
    return ProcessorService(directory / "processors", settings, limits, most_workers=5)


def _reward(processor_id: str, trajectories: Any) -> bytes:
    return _body(processor_id=processor_id, function="__call__", trajectories=trajectories)


def test_calls_that_take_too_much(tmp_path: Path) -> None:
    """Limits on memory, time, and the size of the answer."""

    async def main() -> None:
        service = _service(tmp_path, seconds=5.0, memory_bytes=200 * 2**20)
        await service.start()
        made = await service.create("t", "s", _body(processor_type="reward", class_type="FormatReward"), None)
        with pytest.raises(UserError, match=r"more than the 0\.195312 GiB of limits\.processor_memory_gib"):
            await service.call("t", "s", _reward(made, [{}] * 4_000_000), None)
        short = [{"messages": [{"role": "assistant", "content": ""}]}]
        with pytest.raises(UserError, match="bytes of JSON, allowed: at most 1000"):
            await service.call("t", "s", _reward(made, short * 500), None)
        assert await service.call("t", "s", _reward(made, short), None) == b'{"result": [0.0]}'
        with pytest.raises(WorkerEndedError, match="took longer than 5 s"):
            await service.call("t", "s", _reward(made, ENDLESS), None)
        assert service.status() == {"workers": 0, "processors": 0}
        with pytest.raises(WorkerEndedError, match="took longer than 5 s"):
            await service.call("t", "s", _reward(made, short), None)
        await service.stop()
        assert not (tmp_path / "processors").exists()

    asyncio.run(main())


def test_one_session_waits_for_itself_only(tmp_path: Path) -> None:
    """Calls of one session run in order and do not delay those of another; only a limited number may wait."""

    async def main() -> None:
        service = _service(tmp_path)
        await service.start()
        create = _body(processor_type="reward", class_type="FormatReward")
        slow, quick = await service.create("t", "slow", create, None), await service.create("t", "quick", create, None)
        first = asyncio.create_task(service.call("t", "slow", _reward(slow, ENDLESS), None))
        await asyncio.sleep(0.1)
        others = [asyncio.create_task(service.call("t", "slow", _reward(slow, []), None)) for _ in range(64)]
        assert await service.call("t", "quick", _reward(quick, []), None) == b'{"result": []}'
        with pytest.raises(QuotaError, match="waiting requests of this session: 64 of 64"):
            await others[-1]
        assert not first.done()
        await service.end_session("slow")
        for waiting in (first, *others[:-1]):
            with pytest.raises(WorkerEndedError, match="the session is over"):
                await waiting
        assert service.status() == {"workers": 1, "processors": 1}
        await service.stop()

    asyncio.run(main())


def test_a_worker_imports_nothing_heavy_for_light_work(tmp_path: Path) -> None:
    code = (
        "import sys; from twinkle.server.processors import worker; "
        "print([name for name in ('torch', 'datasets', 'transformers', 'pydantic', 'fastapi') if name in sys.modules])"
    )

    async def main() -> str:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode().strip()

    assert asyncio.run(main()) == "[]"


# --- batches by reference ---------------------------------------------------------------------------------------------


def test_old_batches_make_room_for_new_ones() -> None:
    """The batches kept for a session have a limit in bytes, over all of its loaders."""
    batches = KeptBatches(most_of_one=100)
    batches.limit = 250
    added = [batches.add("first", "x" * 100), batches.add("second", "y" * 100), batches.add("second", "z" * 50)]
    assert added == [0, 0, 1]
    assert batches.used == 250
    batches.add("second", "w" * 60)
    assert batches.used == 210
    with pytest.raises(GoneError, match=r"max_referenced_batch_bytes_per_tenant"):
        batches.get("first", 0)
    assert batches.get("second", 0) == "y" * 100
    with pytest.raises(UserError, match="101 bytes of JSON, allowed: at most 100"):
        batches.add("first", "x" * 101)
    batches.limit = 50
    with pytest.raises(NoRoomError):
        batches.add("first", "x" * 60)
    batches.forget("second")
    assert batches.used == 0


ROWS = json.dumps({"_TWINKLE_TYPE_": "DatasetMeta", "data": [{"question": "?", "answer": "#### 1"}] * 8})


async def _loader(service: ProcessorService, session: str, text: str, rows: int) -> str:
    """Return a loader whose batches have ``rows`` rows with a long text each."""
    dataset = await service.create(
        "t", session, _body(processor_type="dataset", class_type="Dataset", dataset_meta=ROWS), None
    )
    mapped = _body(processor_id=dataset, function="map", preprocess_func="GSM8KProcessor", init_args={"system": text})
    await service.call("t", session, mapped, None)
    loader = _body(processor_type="dataloader", class_type="DataLoader", dataset=dataset, batch_size=rows)
    return await service.create("t", session, loader, None)


def test_an_item_can_be_put_back_as_often_as_it_is_refused() -> None:
    course, numbers = Pass(), range(3)
    for _ in range(100_000):  # a client repeats a refused request; the kept data must not grow with that
        course.put_back(course.next(numbers))
    assert [course.next(numbers) for _ in numbers] == [0, 1, 2]
    course.put_back(2)
    course.begin(numbers)
    assert course.next(numbers) == 0


def test_batches_by_reference_are_limited(tmp_path: Path) -> None:
    """A batch too large for an answer is too large for a reference, and all kept batches together have a limit."""

    async def main() -> None:
        settings = Settings((), {}, "", 2 * 2**30, answer_bytes=40_000)
        limits = LimitsConfig(max_referenced_batch_bytes_per_tenant=50_000)
        service = ProcessorService(tmp_path / "processors", settings, limits, most_workers=5)
        await service.start()
        try:
            loader = await _loader(service, "s", "x" * 10_000, 8)
            following = _body(processor_id=loader, function="__next__", by_reference=True)
            with pytest.raises(UserError, match="bytes of JSON, allowed: at most 40000"):
                await service.call("t", "s", following, None)
            for session in ("a", "b"):
                loader = await _loader(service, session, "x" * 7_000, 4)
                following = _body(processor_id=loader, function="__next__", by_reference=True)
                if session == "a":
                    await service.call("t", session, following, None)
                    rows = await service.batch("t", session, loader, 0)
                    assert len(rows) == 4
                    assert 28_000 < service.budget.used < 40_000
            for key in (None, "again", "again"):  # the refusal is not stored for the key, and no batch is lost
                with pytest.raises(QuotaError, match="max_referenced_batch_bytes_per_tenant"):
                    await service.call("t", "b", following, key)
            await service.end_session("a")
            first, second = [json.loads(await service.call("t", "b", following, key)) for key in ("again", None)]
            assert (first["result"]["number"], second["result"]["number"]) == (0, 1)
        finally:
            await service.stop()

    asyncio.run(main())


def test_a_worker_cannot_send_more_than_it_may() -> None:
    """The length comes first, and a message that is too long is never read."""

    async def main() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(b"".join(pack({"outcome": "ok"}, b"x" * 1000)))
        with pytest.raises(FrameTooLargeError, match="allowed: at most 999"):
            await receive_frame(stream, 999)

    asyncio.run(main())


def test_a_worker_that_fills_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_DISK_CHECK_SECONDS", 0.1)

    async def main() -> None:
        settings = Settings((), {}, "", 2**30, answer_bytes=1000, disk_bytes=2**20)
        service = ProcessorService(tmp_path / "processors", settings, LimitsConfig(), most_workers=5)
        await service.start()
        made = await service.create("t", "s", _body(processor_type="reward", class_type="FormatReward"), None)
        (own,) = (tmp_path / "processors").iterdir()
        (own / "cache" / "downloaded").write_bytes(bytes(2**21))
        async with asyncio.timeout(60):
            while service.status()["workers"]:
                await asyncio.sleep(0.05)
        with pytest.raises(WorkerEndedError, match=r"limits\.processor_disk_gib"):
            await service.call("t", "s", _reward(made, []), None)
        while own.exists():
            await asyncio.sleep(0.05)
        await service.stop()

    asyncio.run(main())


def test_downloads_of_a_worker_are_in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", "/shared")
    online = variables_with_own_caches(tmp_path)
    names = ("TMPDIR", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "MODELSCOPE_CACHE")
    assert all(Path(online[name]).is_relative_to(tmp_path) for name in names)
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    assert variables_with_own_caches(tmp_path)["HF_HUB_CACHE"] == "/shared"


def test_a_repository_that_is_too_large_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, repo_id: str, *, revision: str | None, files_metadata: bool, token: str | None) -> Any:
            assert files_metadata
            sizes = {
                "tokenizer.json": 3_000,
                "model.safetensors": 10**12,
                "junk.dat": {"org/big": 2_000_000}.get(repo_id),
            }
            files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
            return SimpleNamespace(siblings=files)

    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    places = Sources([], {}, tmp_path, hub_bytes=1_000_000)
    with pytest.raises(InvalidInputError, match=r"2003000 bytes.*limits\.max_hub_download_bytes"):
        places.model_folder("hf://org/big")
    assert places.model_folder("hf://org/small") == "hf://org/small"
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    assert places.model_folder("hf://org/big") == "hf://org/big"  # cached models may be used


def test_modelscopes_repositories_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def get_model_files(self, model_id: str, *, revision: str | None, recursive: bool) -> list[dict[str, Any]]:
            assert recursive
            asked.append((model_id, revision))
            more = [{"Path": "junk.dat", "Size": 2_000_000}] if model_id == "org/big" else []
            folder = {"Path": "folder", "Type": "tree"}
            weights = {"Path": "folder/model.safetensors", "Size": 10**12}
            return [{"Path": "tokenizer.json", "Size": 3_000}, folder, weights, *more]

    asked: list[tuple[str, str | None]] = []
    package, errors = ModuleType("modelscope"), ModuleType("modelscope.hub.errors")
    package.HubApi = Api  # type: ignore[attr-defined]
    errors.HubError = OSError  # type: ignore[attr-defined]
    for module in (package, ModuleType("modelscope.hub"), errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    places = Sources([], {}, tmp_path, hub_bytes=1_000_000)
    with pytest.raises(InvalidInputError, match=r"2003000 bytes.*limits\.max_hub_download_bytes"):
        places.model_folder("ms://org/big")
    assert places.model_folder("ms://org/small@v1") == "ms://org/small@v1"
    assert asked == [("org/big", None), ("org/small", "v1")]
