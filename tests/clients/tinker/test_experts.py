"""Models with experts and the unmodified SDK with its default switches: train, sample, save, download, resume, chat."""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import openai
import peft
import pytest
import tinker
from safetensors.numpy import load
from safetensors.torch import load_file
from tinker import types

from tests.support.models.reference import assert_numbers_close
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import BACKEND
from tests.support.servers.serving import (
    SAMPLER,
    SdkServer,
    agree,
    close_clients,
    key_of,
    logprobs_of,
    sequences,
    tinker_data,
    trainer_data,
)
from twinkle import hub
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS
from twinkle.model.adapters.expert_exports import convert
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.types import ADAPTER_FORMATS
from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import TwinkleClientError
from twinkle_client.model.downloads import download_checkpoint

pytestmark = pytest.mark.skipif(SAMPLER != "torch", reason="the vLLM sampler refuses adapters on experts")

MODELS = (
    "random://qwen3-moe-tiny",
    *(() if BACKEND == "megatron" else ("random://gpt-oss-tiny", "random://qwen3.5-moe-tiny")),
)
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=0.1)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    running = SdkServer(tmp_path_factory.mktemp("experts"), model=model).start()
    yield running
    close_clients(running.url)
    assert running.stop() == 0


def test_target_parameters_of_the_native_protocol(
    server: SdkServer, model: str, request: pytest.FixtureRequest
) -> None:
    """A native client's adapter has the form and the names of PEFT, and is trained as the library does it."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=parameters)
    trainer = Trainer.from_pretrained(model, device="cpu", dtype="fp32")
    trainer.create_adapter("alone", replace(spec_from_peft(config.to_dict()), seed=5))
    tenant = NativeTenant(server.url, key_of(request.node.name), model.removeprefix("random://"))
    text = json.dumps({**config.to_dict(), "_TWINKLE_TYPE_": "LoraConfig"}, default=list)
    tenant.verb("add_adapter_to_model", adapter_name="a", config=text, seed=5)
    tenant.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=1e-2, weight_decay=0.0, eps=0.1)
    rows = sequences(4)
    inputs = [{"input_ids": row[:-1].tolist(), "labels": row[1:].tolist()} for row in rows]
    there = tenant.verb("forward_backward", adapter_name="a", inputs=inputs)
    here = trainer.forward([TrainItem("alone", [Datum(row[:-1], row[1:]) for row in rows])])[0]
    assert isinstance(here, TrainResult), here
    for ours, theirs in zip(there["logps"], here.logprobs, strict=True):
        assert_numbers_close(np.array(ours), theirs)
    tenant.verb("step", adapter_name="a")
    state = tenant.verb("get_state_dict", adapter_name="a")
    assert {name: np.shape(value) for name, value in state.items()} == trainer.shapes("alone")
    assert any(name.endswith("mlp.experts.base_layer.lora_A.weight") for name in state)
    assert any(np.any(value) for name, value in state.items() if name.endswith("mlp.experts.lora_B.weight"))


def step(training: tinker.TrainingClient, rows: list[np.ndarray]) -> list[np.ndarray]:
    passed = training.forward_backward(tinker_data(rows), "cross_entropy")
    training.optim_step(ADAM).result()
    return logprobs_of(passed.result())


def assert_downloads_in_all_forms(client: TwinkleClient, path: str, folder: Path, *, alternating: bool) -> None:
    """The native protocol's download has the form that is asked for, of the same adapter."""
    own = download_checkpoint(client, path, folder / "own")
    for form in ADAPTER_FORMATS:
        found = load_file(download_checkpoint(client, path, folder / form, form=form) / WEIGHTS)
        _, wanted = convert(
            json.loads((own / CONFIG).read_text()), load_file(own / WEIGHTS), form, alternating=alternating
        )
        assert found.keys() == wanted.keys(), form
        assert all(found[name].equal(tensor) for name, tensor in wanted.items()), form
        assert not (folder / form / "optimizer.safetensors").exists()
    with pytest.raises(TwinkleClientError, match=r"format: got 'gguf', allowed: .*tinker, peft, vllm, vllm-3d"):
        download_checkpoint(client, path, folder / "other", form="gguf")


def test_train_sample_save_and_resume(
    server: SdkServer, service: tinker.ServiceClient, model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    training = service.create_lora_training_client(base_model=model, rank=8, seed=5)
    trainer = Trainer.from_pretrained(model, device="cpu", dtype="fp32")
    trainer.create_adapter("alone", LoraSpec(8, seed=5, train_unembed=True))
    rows = sequences(3)
    history = []
    for _ in range(4):
        history.append(step(training, rows))
        alone = trainer.forward_backward([TrainItem("alone", trainer_data(rows))])[0]
        trainer.optim_step("alone", AdamParams(1e-2, 0.9, 0.95, 0.1))
        assert isinstance(alone, TrainResult), alone
        assert all(agree(ours, theirs) for ours, theirs in zip(history[-1], alone.logprobs, strict=True))
    assert sum(map(np.sum, history[-1])) > sum(map(np.sum, history[0]))  # it learns

    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(rows[0].tolist())
    (sampled,) = (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, temperature=1.0, seed=1)).result().sequences
    )
    whole = types.ModelInput.from_ints([*rows[0].tolist(), *sampled.tokens])
    scored = sampler.compute_logprobs(whole).result()
    assert_numbers_close(sampled.logprobs, scored[len(rows[0]) :])

    path = training.save_state("here").result().path
    expected = {tinkers_name(name, model) for name in trainer.weights("alone")}
    assert set(downloaded(server, key_of(request.node.name), path)) == expected
    with TwinkleClient(server.url, key_of(request.node.name)) as client:
        assert_downloads_in_all_forms(client, path, tmp_path, alternating="gpt-oss" in model)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    for _ in range(2):
        for ours, theirs in zip(step(training, rows), step(resumed, rows), strict=True):
            assert np.array_equal(ours, theirs)


def tinkers_name(name: str, model: str) -> str:
    """Return a tensor's name in Tinker's files, which name the text model, and gpt-oss's attention otherwise."""
    attention = "attn" if "gpt-oss" in model else "self_attn"
    return name.replace(".language_model.", ".").replace(".self_attn.", f".{attention}.")


def downloaded(server: SdkServer, key: str, path: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint's archive."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    address = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    archive = httpx.get(address, headers={"X-API-Key": key}, follow_redirects=True, trust_env=False).content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return load(tar.extractfile("adapter_model.safetensors").read())  # type: ignore[union-attr]


def test_chat(server: SdkServer, model: str, request: pytest.FixtureRequest) -> None:
    """The prompt is that of the tokenizer's chat template."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key_of(request.node.name), max_retries=0)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=5, temperature=0)
    tokenizer = hub.load_tokenizer(model)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens <= 5
    if "gpt-oss" in model:
        assert text.startswith("<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>")
        assert tokenizer.decode(tokens[:1]) == "<|start|>"
