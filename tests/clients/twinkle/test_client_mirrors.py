"""Scripts of the library that were moved to a server: the constructor arguments they use, and the library's objects."""

import inspect
import json
from pathlib import Path

import pytest

import twinkle_client
from tests.clients.twinkle.stub_server import SESSION
from twinkle_client import InvalidRequestError, LoraConfig, Trainer, hub
from twinkle_client.client import log_lines
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel, TransformersModel
from twinkle_client.processor import InputProcessor
from twinkle_client.sampler import Sampler, vLLMSampler
from twinkle_client.template import Template

M, S = "/model/m/twinkle", "/sampler/m/twinkle"


@pytest.fixture(autouse=True)
def _routes(stub):
    log_lines._log_once.cache_clear()
    for path in (M, S):
        stub.answer(f"{path}/create", {"status": "ok"})
    stub.answer(f"{M}/add_adapter_to_model", lambda body: {"adapter_name": f"{SESSION}-{body['adapter_name']}"})
    stub.answer(f"{M}/remove_adapter", {"status": "ok"})
    stub.answer("/processor/twinkle/create", {"processor_id": "pid:" + "0" * 32})
    stub.answer("/processor/twinkle/call", {"result": None})


def parameters(callable_):
    named = inspect.signature(callable_).parameters.values()
    return {each.name for each in named if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)} - {"self"}


def test_constructors_take_what_the_librarys_take():
    from twinkle.dataloader import DataLoader as LocalLoader
    from twinkle.model import MultiLoraTransformersModel as LocalModel
    from twinkle.processor import InputProcessor as LocalProcessor
    from twinkle.sampler import LocalSampler

    assert parameters(LocalModel.__init__) - parameters(MultiLoraTransformersModel.__init__) == set()
    assert parameters(LocalSampler.__init__) - parameters(Sampler.__init__) == {"model"}  # the client calls it model_id
    assert parameters(LocalLoader.__init__) - parameters(DataLoader.__init__) == set()
    assert {"device_mesh", "padding_free", "framework"} <= parameters(LocalProcessor.__init__)
    assert {"device_mesh", "padding_free", "framework"} <= parameters(InputProcessor.__init__)


def test_what_the_server_decides_is_said_once(client, caplog):
    with caplog.at_level("INFO", "twinkle_client"):
        for _ in range(2):
            MultiLoraTransformersModel("ms://m", client=client, device_mesh=object(), strategy="fsdp", max_r=8)
        vLLMSampler("ms://m", {"max_model_len": 64}, object(), client=client, remote_group="s")
    said = [record.getMessage() for record in caplog.records if "server decides" in record.getMessage()]
    assert len(said) == 2
    assert "device_mesh, max_r, strategy" in said[0]
    assert "device_mesh, engine_args, remote_group" in said[1]


def test_nothing_is_said_of_what_was_not_given(client, caplog):
    with caplog.at_level("INFO", "twinkle_client"):
        MultiLoraTransformersModel("m", client=client)
        Sampler("m", client=client)
    assert "server decides" not in caplog.text


def test_unknown_options_are_still_mistakes(client):
    with pytest.raises(TypeError, match="devise_mesh"):
        MultiLoraTransformersModel("m", client=client, devise_mesh=1)


@pytest.mark.parametrize("config", [LoraConfig(target_modules=["q_proj"]), {"r": 4, "target_modules": ["q_proj"]}])
def test_the_shared_lora_config_names_the_modules(stub, client, config):
    model = MultiLoraTransformersModel("m", client=client, lora_config=config)
    model.add_adapter_to_model("a", {"r": 2})
    assert json.loads(stub.bodies(f"{M}/add_adapter_to_model")[0]["config"])["target_modules"] == ["q_proj"]


def test_adapters_are_removed(stub, client):
    model = MultiLoraTransformersModel("m", client=client)
    for name in ("a", "b"):
        model.add_adapter_to_model(name, LoraConfig())
    model.remove_adapter("b")
    assert stub.bodies(f"{M}/remove_adapter") == [{"adapter_name": "b"}]
    assert model.adapter_name == "a"
    with pytest.raises(InvalidRequestError, match="'b'"):
        model.step(adapter_name="b")
    with pytest.raises(InvalidRequestError, match="'b'"):
        model.remove_adapter("b")


def test_the_name_of_an_adapter_is_used_once_in_a_session(stub, client):
    """The library refuses it too. Otherwise a second model object would go on with the adapter of the first."""
    model = MultiLoraTransformersModel("m", client=client)
    model.add_adapter_to_model("a", LoraConfig())
    for handle in (model, MultiLoraTransformersModel("m", client=client)):
        with pytest.raises(InvalidRequestError, match="adapter_name: got 'a', allowed: a name that no adapter"):
            handle.add_adapter_to_model("a", LoraConfig())
    assert len(stub.bodies(f"{M}/add_adapter_to_model")) == 1


def test_path_objects(stub, client, tmp_path):
    """A folder of this machine is a model that the server serves under the folder's last name."""
    (tmp_path / "m").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    folder = tmp_path / "m"
    for make in (MultiLoraTransformersModel, TransformersModel, Sampler, Trainer.from_pretrained, Template):
        made = make(model_id=folder, client=client)
        assert made.model_id in ("m", str(folder))
    model = MultiLoraTransformersModel(folder, client=client)
    model.add_adapter_to_model("a", LoraConfig(), save_dir=Path("/srv/saves"))
    assert stub.bodies(f"{M}/add_adapter_to_model")[-1]["save_dir"] == "/srv/saves"
    assert DatasetMeta(tmp_path / "rows.jsonl").rows() == [{"text": "a"}]
    with pytest.raises(InvalidRequestError, match=r"a folder with config\.json"):
        hub.resolve(folder)
    (folder / "config.json").write_text("{}")
    assert hub.resolve(folder).path == folder


def test_before_there_is_an_adapter_the_base_model_answers(stub, client):
    stub.answer(f"{M}/forward_only", {"result": {"logps": [[-0.5]]}})
    model = MultiLoraTransformersModel("m", client=client)
    assert model.forward_only(inputs=[{"input_ids": [1]}], temperature=2.0)["logps"] == [[-0.5]]
    assert stub.bodies(f"{M}/forward_only") == [{"inputs": [{"input_ids": [1]}], "temperature": 2.0}]
    with pytest.raises(InvalidRequestError, match="add_adapter_to_model"):
        model.forward(inputs=[{"input_ids": [1]}])


def test_patches_and_adapters_of_a_sampler(stub, client):
    stub.answer(f"{S}/apply_patch", None)
    stub.answer(f"{S}/add_adapter_to_sampler", {"status": "ok", "adapter_name": f"{SESSION}-a"})
    sampler = vLLMSampler("m", client=client)
    assert sampler.adapter_name is None
    sampler.apply_patch("SomePatch")
    assert sampler.add_adapter_to_sampler("a", LoraConfig()).adapter_name == f"{SESSION}-a"
    sampler.apply_patch("SomePatch", level=2)
    assert stub.bodies(f"{S}/apply_patch") == [
        {"patch_cls": "SomePatch", "adapter_name": None},
        {"patch_cls": "SomePatch", "adapter_name": "a", "level": 2},
    ]
    with pytest.raises(InvalidRequestError, match="never shipped"):
        sampler.apply_patch(lambda: None)


def test_the_librarys_own_meta_is_taken_by_its_fields(stub, client):
    from twinkle.dataset import DatasetMeta as LibraryMeta

    theirs = LibraryMeta("hf://some/set", "main", "test", range(5))
    ours = DatasetMeta("hf://some/set", "main", "test", range(5))
    dataset = Dataset(theirs, client=client)
    assert stub.bodies("/processor/twinkle/create")[0]["dataset_meta"] == ours.to_wire()
    dataset.add_dataset(theirs)
    dataset.map("AlpacaProcessor", theirs)
    dataset.filter("SomeFilter", theirs)
    assert [body["dataset_meta"] for body in stub.bodies("/processor/twinkle/call")] == [ours.to_wire()] * 3
    Dataset(LibraryMeta(data=[{"x": 1}]), client=client)
    assert json.loads(stub.bodies("/processor/twinkle/create")[1]["dataset_meta"])["data"] == [{"x": 1}]
    with pytest.raises(InvalidRequestError, match="dataset_meta"):
        Dataset("hf://some/set", client=client)


def test_loaders_of_local_scripts(client):
    dataset = Dataset(DatasetMeta(data=[{"x": 1}]), client=client)
    DataLoader(dataset, batch_size=1, device_mesh=object(), num_workers=4, timeout=3.0, remote_group="g")
    with pytest.raises(InvalidRequestError, match="set_processor"):
        DataLoader(dataset, batch_size=1, collate_fn=list)
    with pytest.raises(InvalidRequestError, match="batch_sampler"):
        DataLoader(dataset, batch_size=1, batch_sampler=[[0]])
    InputProcessor(device_mesh=object(), client=client)


def test_keywords_of_the_other_client_are_no_error_to_init_tinker_client(monkeypatch, caplog):
    from twinkle_client import tinker_sdk

    monkeypatch.setattr(tinker_sdk, "patch_tinker", lambda: None)
    monkeypatch.setattr(tinker_sdk, "set_tinker_variables", lambda *said: None)
    with caplog.at_level("INFO"):
        twinkle_client.init_tinker_client("http://x", session_heartbeat_interval=3)
    assert "session_heartbeat_interval" in caplog.text
