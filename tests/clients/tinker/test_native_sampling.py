"""Sampling in the native protocol with a tiny model: a server returns what LocalSampler returns in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import tinker
import torch

from tests.support.servers.native_caller import Caller
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import Server, real_model
from tests.support.servers.serving import ALIAS, MODEL, SAMPLER, SdkServer, key_of, sequences, tinker_data
from twinkle.data_format import SamplingParams
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import LocalSampler
from twinkle.server.verbs.codec import finite

pytestmark = pytest.mark.skipif(SAMPLER != "torch", reason="LocalSampler samples with torch")
NAME = MODEL.rpartition("://")[2]  # clients leave out the scheme in addresses
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}], "user_data": [["ground_truth", '"18"']]},
    {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "A longer question?"}]},
]
FEATURES: list[dict[str, Any]] = [
    {"input_ids": [10, 20, 30, 40], "labels": [-100, -100, 40, -100], "note": {"kept": [1.5]}},
    {"input_ids": [10, 20, 30, 40]},
]


@pytest.fixture(scope="module")
def local_model() -> MultiLoraTransformersModel:
    torch.set_num_threads(1)
    return MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=2)


@pytest.fixture(scope="module")
def local(local_model: MultiLoraTransformersModel) -> LocalSampler:
    return LocalSampler(local_model)


@pytest.fixture
def caller(server: SdkServer, request: pytest.FixtureRequest) -> Caller:
    caller = Caller(server.url, key_of(request.node.name))
    caller.begin()
    return caller


def assert_same(served: list[dict[str, Any]], expected: list[Any]) -> None:
    assert len(served) == len(expected)
    for sample, response in zip(served, expected, strict=True):
        assert sample["prompt_logprobs"] == approximately(response.prompt_logprobs)
        assert flat(sample["topk_prompt_logprobs"]) == approximately(flat(response.topk_prompt_logprobs))
        assert len(sample["sequences"]) == len(response.sequences)
        for sequence, local in zip(sample["sequences"], response.sequences, strict=True):
            assert sequence["tokens"] == local.tokens
            assert sequence["stop_reason"] == local.stop_reason
            assert sequence["decoded"] == local.decoded
            assert sequence["new_input_feature"] == finite(local.new_input_feature)
            assert flat(sequence["logprobs"]) == approximately(flat(local.logprobs))


def flat(places: Any) -> Any:
    """Return the numbers of all (token, log-probability) pairs in one list."""
    if places is None:
        return None
    return [value for place in places if place is not None for pair in place for value in pair]


def approximately(values: Any) -> Any:
    if values is None:
        return None
    return pytest.approx([float("nan") if value is None else value for value in values], abs=2e-5, nan_ok=True)


def as_numbers(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for sample in samples:
        if sample["prompt_logprobs"] is not None:
            sample["prompt_logprobs"] = [float("nan") if v is None else v for v in sample["prompt_logprobs"]]
    return samples


PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 8, "seed": 3, "logprobs": 1, "num_samples": 2},
    {"max_tokens": 6, "temperature": 0.0, "prompt_logprobs": 2, "logprobs": 4},
    {"max_tokens": 0, "prompt_logprobs": 1},
    {"max_tokens": 8, "seed": 5, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "stop": [1, 2, 3]},
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("inputs", [FEATURES, CONVERSATIONS], ids=["features", "conversations"])
def test_as_in_this_process(
    caller: Caller, local: LocalSampler, inputs: list[dict[str, Any]], params: dict[str, Any]
) -> None:
    served = caller.samples(NAME, {"inputs": inputs, "sampling_params": params})
    assert_same(as_numbers(served), local.sample(inputs, SamplingParams.from_dict(params)))


def test_a_template_of_the_session(caller: Caller, local: LocalSampler) -> None:
    options = {"default_system": "Be brief.", "max_length": 64, "truncation_strategy": "left"}
    params = {"max_tokens": 8, "seed": 3}
    body = {"template_cls": "Qwen3Template", "adapter_name": "", "model_id": ALIAS, **options}
    assert caller.sampler(ALIAS, "set_template", body).json() == {"status": "ok"}
    served = caller.samples(NAME, {"inputs": CONVERSATIONS, "sampling_params": params})
    before = local.template
    local.set_template("Qwen3Template", **options)
    expected = local.sample(CONVERSATIONS, SamplingParams.from_dict(params))
    local.template = before
    assert_same(served, expected)
    assert served[0]["sequences"][0]["new_input_feature"]["messages"][0]["role"] == "system"
    caller.begin()  # a new session, for which no template was set
    plain_one = caller.samples(NAME, {"inputs": CONVERSATIONS, "sampling_params": params})
    assert_same(plain_one, local.sample(CONVERSATIONS, SamplingParams.from_dict(params)))


def test_what_a_template_cannot_encode(caller: Caller) -> None:
    body = {"template_cls": "Template", "max_length": 3, "truncation_strategy": "delete"}
    caller.sampler(NAME, "set_template", body)
    assert "of which the template leaves 0" in caller.refusal(NAME, {"inputs": CONVERSATIONS})
    caller.sampler(NAME, "set_template", body | {"truncation_strategy": "raise"})
    assert "3" in caller.refusal(NAME, {"inputs": CONVERSATIONS})
    odd = {"messages": [{"role": "user", "content": "x", "tool_calls": [5]}]}
    assert "tool_calls" in caller.refusal(NAME, {"inputs": odd})


def test_a_checkpoint(server: SdkServer, caller: Caller, local: LocalSampler) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=caller.token)
    training = service.create_lora_training_client(base_model=ALIAS, rank=8, seed=3)
    training.forward_backward(tinker_data(sequences(1)), "cross_entropy")
    training.optim_step(tinker.types.AdamParams(learning_rate=3e-2, eps=1e-8)).result()
    path = training.save_weights_for_sampler("native").result().path
    params = {"max_tokens": 8, "seed": 3, "logprobs": 1}
    body = {"inputs": FEATURES, "sampling_params": params}
    served = caller.samples(NAME, body | {"adapter_uri": path.replace("tinker://", "twinkle://")})
    (directory,) = {file.parent for file in server.data_dir.rglob("native/**/adapter_model.safetensors")}
    assert_same(served, local.sample(FEATURES, SamplingParams.from_dict(params), adapter_path=str(directory)))
    assert served != caller.samples(NAME, body)


def test_a_live_adapter(server: SdkServer, local_model: MultiLoraTransformersModel, local: LocalSampler) -> None:
    tenant = NativeTenant(server.url, "live adapters", NAME)
    tenant.add_adapter("a", seed=7)
    model = local_model
    model.add_adapter_to_model("a", peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), seed=7)
    verbs: list[tuple[str, dict[str, Any]]] = [
        ("set_optimizer", {"optimizer_cls": "AdamW", "lr": 0.03}),
        ("forward_backward", {"inputs": [{"input_ids": [10, 20, 30, 40], "labels": [20, 30, 40, -100]}]}),
        ("clip_grad_and_step", {}),
    ]
    for verb, arguments in verbs:
        tenant.verb(verb, adapter_name="a", **arguments)
        getattr(model, verb)(adapter_name="a", **arguments)
    params = {"max_tokens": 8, "seed": 3, "logprobs": 1}
    body = {"inputs": CONVERSATIONS, "sampling_params": params, "adapter_name": "a"}
    answer = tenant.http.post(f"/api/v1/sampler/{NAME}/twinkle/sample", json=body)
    assert answer.status_code == 200, answer.text
    expected = local.sample(CONVERSATIONS, SamplingParams.from_dict(params), adapter_name="a")
    assert_same(answer.json()["samples"], expected)
    assert [s.logprobs for s in expected[0].sequences] != [
        s.logprobs for s in local.sample(CONVERSATIONS, SamplingParams.from_dict(params))[0].sequences
    ]


def test_a_stream_is_the_text_of_a_sample(caller: Caller) -> None:
    body = {"inputs": CONVERSATIONS[0], "sampling_params": {"max_tokens": 12, "seed": 3}}
    lines = caller.sampler(NAME, "sample_stream", body).text.splitlines()
    (sample,) = caller.samples(NAME, body)
    message = sample["sequences"][0]["new_input_feature"]["messages"][-1]
    assert "".join(json.loads(line)["delta"] for line in lines) == message["content"]


@pytest.fixture
def training_only(tmp_path: Path) -> Iterator[Server]:
    applications = [{"name": "server", "import_path": "server"}, real_model(MODEL)]
    server = Server(tmp_path, {"applications": applications}).start()
    yield server
    server.close()


def test_a_model_without_a_sampler(training_only: Server) -> None:
    caller = Caller(training_only.url, "anybody")
    caller.begin()
    assert caller.http.get(f"model/{NAME}/healthz").status_code == 200
    assert caller.http.get(f"sampler/{NAME}/healthz").status_code == 404
    rows = {"inputs": FEATURES}
    bodies = {"create": {}, "set_template": {"template_cls": "Template"}, "sample": rows, "sample_stream": rows}
    for verb, body in bodies.items():
        assert caller.sampler(NAME, verb, body).status_code == 404, verb
