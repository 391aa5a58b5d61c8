"""Files of the server on the client's machine: downloaded checkpoints, and the folders and tokenizers of models."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.clients.twinkle.stub_server import SESSION, Cut, StubServer
from twinkle_client import InvalidRequestError, LoraConfig, MissingPackageError, NotFoundError, ServerError, hub
from twinkle_client.client import current
from twinkle_client.model import MultiLoraTransformersModel, TransformersModel
from twinkle_client.model.downloads import check_target, download_checkpoint
from twinkle_client.template import Template

M = "/model/m/twinkle"
ADDRESS = "twinkle://r-a/weights/n"
ARCHIVE = "/twinkle/checkpoints/r-a/weights/n/archive"


def tar(**files: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def archive(*names: str) -> bytes:
    return tar(**{f"r-a-weights-n/{name}": name.encode() for name in names})


@pytest.fixture
def served(stub) -> StubServer:
    stub.answer(f"{M}/create", {})
    stub.answer(f"{M}/add_adapter_to_model", lambda body: {"adapter_name": f"{SESSION}-{body['adapter_name']}"})
    for verb in ("load", "add_metric"):
        stub.answer(f"{M}/{verb}", None)
    stub.answer(f"{M}/save", {"twinkle_path": ADDRESS, "checkpoint_dir": ADDRESS})
    stub.answer(ARCHIVE, archive("adapter_config.json", "adapter_model.safetensors"))
    return stub


@pytest.fixture
def model(served, client) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel("m", client=client)
    made.add_adapter_to_model("a", LoraConfig())
    return made


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_saving_to_a_folder(served, model, tmp_path):
    saved = model.save("mine", tmp_path / "out")
    assert saved == str(tmp_path / "out" / "mine") == saved.output_dir
    assert saved.twinkle_path == saved.model_dump()["twinkle_path"] == ADDRESS
    assert sorted(file.name for file in Path(saved).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (Path(saved) / "adapter_config.json").read_text() == "adapter_config.json"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]  # no temporary files
    model.load(saved)
    assert served.bodies(f"{M}/load")[-1]["name"] == ADDRESS


def test_a_later_save_replaces_the_folder(served, client, tmp_path):
    download_checkpoint(client, ADDRESS, tmp_path / "n")
    served.answer(ARCHIVE, archive("other.json"))
    served.fail(ARCHIVE, Cut())  # tried again
    download_checkpoint(client, ADDRESS, tmp_path / "n")
    assert [file.name for file in (tmp_path / "n").iterdir()] == ["other.json"]


def test_only_our_own_state_file_marks_a_checkpoint_of_all_parameters(tmp_path):
    """Other trainers write a trainer_state.json, too, and their folders hold more than one checkpoint."""
    state = tmp_path / "trainer_state.json"
    state.write_text('{"train_mode": "full", "step": 3}')
    assert check_target(tmp_path, "output_dir") == tmp_path.resolve()
    for content in ('{"best_metric": null, "epoch": 1.0}', "[]", "not JSON", '{"train_mode": "lora"}', "[" * 100_000):
        state.write_text(content)
        with pytest.raises(InvalidRequestError, match="has other content"):
            check_target(tmp_path, "output_dir")


@pytest.mark.parametrize("kept", ["out/n", "out/n/diary", "out"], ids=["file", "folder", "parent"])
def test_other_content_is_not_replaced(served, model, tmp_path, kept):
    (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / kept).write_text("mine")
    with pytest.raises(InvalidRequestError, match=r"output_dir: .*allowed for .*/out/n: .*adapter_config\.json"):
        model.save("n", tmp_path / "out")
    assert served.asked(f"{M}/save") == []
    assert (tmp_path / kept).read_text() == "mine"


def test_other_content_under_a_name_of_the_server(served, model, tmp_path):
    (tmp_path / "n").write_text("mine")
    with pytest.raises(InvalidRequestError, match="output_dir") as caught:
        model.save(output_dir=tmp_path)
    assert caught.value.__notes__ == [f"the checkpoint itself is on the server: {ADDRESS}"]
    assert served.asked(ARCHIVE) == []
    assert (tmp_path / "n").read_text() == "mine"


def test_a_link_to_a_folder_stays(served, client, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "n").symlink_to(tmp_path / "real")
    for _ in range(2):
        assert download_checkpoint(client, ADDRESS, tmp_path / "n") == tmp_path / "n"
    assert (tmp_path / "n").is_symlink()
    assert (tmp_path / "real" / "adapter_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n", "real"]


@pytest.fixture
def earlier(served, client, tmp_path) -> Path:
    folder = download_checkpoint(client, ADDRESS, tmp_path / "n")
    (folder / "adapter_config.json").write_text("the earlier one")
    return folder


def test_the_earlier_folder_is_put_back(client, earlier, monkeypatch):
    rename = Path.rename

    def failing(path, target):
        if path.name == "files":
            raise OSError("no room")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no room") as caught:
        download_checkpoint(client, ADDRESS, earlier)
    assert f"the checkpoint itself is on the server: {ADDRESS}" in caught.value.__notes__
    assert (earlier / "adapter_config.json").read_text() == "the earlier one"
    assert list(earlier.parent.iterdir()) == [earlier]


def test_a_full_disk(client, earlier, monkeypatch):
    def full(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("twinkle_client.model.downloads.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="disk full") as caught:
        download_checkpoint(client, ADDRESS, earlier)
    assert caught.value.__notes__ == [f"the checkpoint itself is on the server: {ADDRESS}"]
    assert (earlier / "adapter_config.json").read_text() == "the earlier one"


BAD_ARCHIVES = {
    "text": b"no archive",
    "up": archive("../outside"),
    "top": tar(file=b"x"),
    "backslash": archive("..\\outside"),
    "drive": archive("C:outside"),
}


@pytest.mark.parametrize("content", BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_a_folder_is_whole_or_not_there(served, client, tmp_path, content):
    served.answer(ARCHIVE, content)
    with pytest.raises(ServerError, match="archive of the checkpoint") as caught:
        download_checkpoint(client, ADDRESS, tmp_path / "n")
    assert caught.value.__notes__ == [f"the checkpoint itself is on the server: {ADDRESS}"]
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_addresses(client, tmp_path):
    with pytest.raises(InvalidRequestError, match="twinkle://<run>"):
        download_checkpoint(client, "n", tmp_path / "n")
    with pytest.raises(NotFoundError) as caught:
        download_checkpoint(client, "twinkle://r-b/weights/n", tmp_path / "n")
    assert caught.value.__notes__ == ["the checkpoint itself is on the server: twinkle://r-b/weights/n"]


# --- a model of the plain class ---------------------------------------------------------------------------------------


def test_plain_models_are_adapters(served, client, caplog):
    with caplog.at_level("INFO", "twinkle_client"):
        model = TransformersModel(model_id="/models/m", mixed_precision="fp32", attn_implementation="x", client=client)
    assert "TransformersModel: the server decides about attn_implementation, mixed_precision" in caplog.text
    assert model.model_id == "m"
    with pytest.raises(InvalidRequestError, match="trains LoRA adapters, not all parameters"):
        model.set_optimizer("AdamW")
    with pytest.raises(InvalidRequestError, match="model_id"):
        TransformersModel(client=client)
    for wrong in (("a", "folder"), ("a", LoraConfig(), False)):
        with pytest.raises(InvalidRequestError, match=r"config_or_dir|is_trainable"):
            model.add_adapter_to_model(*wrong)
    model.add_adapter_to_model("a", LoraConfig())
    assert served.bodies(f"{M}/add_metric")[-1]["metric_cls"] == "Accuracy"  # one of the plain class's own metrics
    with pytest.raises(InvalidRequestError, match="not all parameters"):
        model.set_optimizer("AdamW", adapter_name="")


# --- folders and tokenizers of models ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    return tmp_path / "tiny"


def info(folder: Path | None) -> dict:
    told = {} if folder is None else {"model_folder": str(folder)}
    return {"model_name": "m", "architecture": "llama", "max_context_length": 8, **told}


def test_folders_of_this_machine_need_no_server(folder, monkeypatch):
    monkeypatch.setattr(current, "_default", None)
    assert hub.resolve(str(folder)) == hub.LocalModel(str(folder), folder, None)
    with pytest.raises(InvalidRequestError, match=r"config\.json"):
        hub.resolve(str(folder.parent))


def test_folders_of_a_server_on_this_machine(stub, client, folder, monkeypatch):
    monkeypatch.setattr(current, "_default", client)
    stub.answer(f"{M}/get_info", info(folder))
    assert hub.resolve("pypi://m==1.0").path == folder
    assert hub.resolve("random://m?seed=3").random_seed == 3
    for elsewhere in (info(None), info(folder / "of another machine")):
        stub.answer(f"{M}/get_info", elsewhere)
        with pytest.raises(InvalidRequestError, match="no server on this machine"):
            hub.resolve("pypi://m")
    with pytest.raises(InvalidRequestError, match="no server on this machine"):
        hub.resolve("pypi://unknown")


@pytest.mark.parametrize("model_id", ["org/name", "hf://org/name@main", "ms://org/name"])
def test_hubs_need_their_packages(model_id, monkeypatch):
    monkeypatch.setattr(current, "_default", None)
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install (huggingface_hub|modelscope): .*org/name"):
        hub.resolve(model_id)


def test_tokenizers(folder, client, monkeypatch):
    loaded = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(path, local_files_only):
            loaded.append((path, local_files_only))
            return "the tokenizer"

    monkeypatch.setattr(hub, "import_module", lambda name: type("transformers", (), {"AutoTokenizer": AutoTokenizer}))
    template = Template(str(folder), client=client)
    assert template.tokenizer == template.tokenizer == "the tokenizer"
    assert loaded == [(folder, True)]
    assert template.options == {"model_id": "tiny"}  # the server's name of it
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="templates of"):
        hub.load_tokenizer(str(folder))
