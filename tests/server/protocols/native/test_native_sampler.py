"""Sampling in the native protocol with the mock model: the text of tokens 5, 6 is ``"5 6 "``, and 2 ends a text."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.servers.native_caller import Caller
from tests.support.servers.running import MODEL, Server, Tenant, key_for, mock_config, sample_body
from twinkle.data_format import SamplingParams
from twinkle.errors import GoneError
from twinkle.server.protocols.native import sampler_routes as native_sampler
from twinkle.server.wire import tinker_pb2 as pb
from twinkle_client import types

PROMPT = [5, 6, 7]
SEED = 3  # with this seed and the next ones, the mock's texts are longer than most
FEATURE: dict[str, Any] = {"input_ids": PROMPT}
CONVERSATION: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}], "user_data": [["a", "1"]]}


@pytest.fixture
def caller(server: Server, tenant: Tenant) -> Caller:
    caller = Caller(server.url, tenant.key)
    caller.begin()
    return caller


@pytest.fixture
def stranger(server: Server, other_tenant: Tenant) -> Caller:
    caller = Caller(server.url, other_tenant.key)
    caller.begin()
    return caller


def asked(inputs: object = FEATURE, adapter_uri: str | None = None, **params: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "sampling_params": {"max_tokens": 12, "seed": SEED, **params}, "adapter_name": ""}
    return body if adapter_uri is None else body | {"adapter_uri": adapter_uri}


def tokens(samples: list[dict[str, Any]]) -> list[list[int]]:
    return [sequence["tokens"] for sample in samples for sequence in sample["sequences"]]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_feature_goes_on(caller: Caller) -> None:
    feature = {"input_ids": PROMPT, "labels": [-100, 7, -100], "messages": [{"role": "user", "content": "5 6 7"}]}
    feature["completion_mask"] = [0, 0, 1]
    extra = {"user_data": [["ground_truth", "18"]], "anything": {"at": [1.5, None]}}
    (sample,) = caller.samples(MODEL, asked([feature | extra], logprobs=1))
    types.SampleResponseModelList.model_validate({"samples": [sample]})
    assert sample["prompt_logprobs"] is None
    assert sample["topk_prompt_logprobs"] is None
    (sequence,) = sample["sequences"]
    drawn = sequence["tokens"]
    assert sequence["stop_reason"] == ("stop" if drawn[-1] == 2 else "length")
    assert sequence["decoded"] == "".join(f"{token} " for token in drawn)
    assert [[token] for token in drawn] == [[pair[0] for pair in place] for place in sequence["logprobs"]]
    new = sequence["new_input_feature"]
    assert new["input_ids"] == PROMPT + drawn
    assert new["labels"] == [-100, 7, *drawn, -100]
    assert new["completion_mask"] == [0, 0, 1] + [1] * len(drawn)
    assert new["attention_mask"] == [1] * len(new["input_ids"])
    assert new["position_ids"] == list(range(len(new["input_ids"])))
    assert new["length"] == len(new["input_ids"])
    text = "".join(f"{token} " for token in drawn if token != 2)
    assert new["messages"] == [*feature["messages"], {"role": "assistant", "content": text}]
    assert {key: new[key] for key in extra} == extra


def test_the_same_tokens_as_through_tinkers_protocol(caller: Caller, tenant: Tenant) -> None:
    """This holds for one input; each further input has the next seed."""
    inputs = [{"input_ids": PROMPT}, {"input_ids": [8, 9]}, {"input_ids": PROMPT}]
    drawn = tokens(caller.samples(MODEL, asked(inputs)))
    session = tenant.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = tenant.post("create_sampling_session", body).json()["sampling_session_id"]
    for number, feature in enumerate(inputs):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": feature["input_ids"]}]}
        params = {"max_tokens": 12, "seed": SEED + number}
        request = tenant.submit("asample", sample_body(sampler, number, prompt=prompt, sampling_params=params))
        assert drawn[number] == tenant.tokens(request)
    assert drawn[0] != drawn[2]


def test_one_input_is_a_list_of_one(caller: Caller) -> None:
    assert caller.samples(MODEL, asked(FEATURE)) == caller.samples(MODEL, asked([FEATURE]))


def test_num_samples(caller: Caller) -> None:
    (of_params,) = caller.samples(MODEL, asked(num_samples=3) | {"num_samples": 1})
    assert len(of_params["sequences"]) == 3
    (beside,) = caller.samples(MODEL, asked() | {"num_samples": 3})
    assert beside == of_params
    (neither,) = caller.samples(MODEL, {"inputs": FEATURE})
    assert len(neither["sequences"]) == 1


def test_another_name_of_max_tokens(caller: Caller) -> None:
    body = {"inputs": FEATURE, "sampling_params": {"max_new_tokens": 3, "seed": SEED}}
    assert tokens(caller.samples(MODEL, body)) == tokens(caller.samples(MODEL, asked(max_tokens=3)))


def test_log_probabilities(caller: Caller) -> None:
    (sample,) = caller.samples(MODEL, asked(prompt_logprobs=2, logprobs=3))
    assert sample["prompt_logprobs"][0] is None
    assert all(value < 0 for value in sample["prompt_logprobs"][1:])
    assert len(sample["prompt_logprobs"]) == len(sample["topk_prompt_logprobs"]) == len(PROMPT)
    assert sample["topk_prompt_logprobs"][0] is None
    assert all(len(place) == 2 for place in sample["topk_prompt_logprobs"][1:])
    assert all(len(place) == 3 for place in sample["sequences"][0]["logprobs"])
    (without,) = caller.samples(MODEL, asked())
    assert without["sequences"][0]["logprobs"] is None


def test_numbers_that_are_not_finite_are_null(caller: Caller) -> None:
    """The mock has 16 candidates: any other token is impossible, and JSON has no infinity."""
    answer = caller.sampler(MODEL, "sample", asked(logprobs=20))
    assert answer.json()["samples"][0]["sequences"][0]["logprobs"][0][-1][1] is None
    odd = caller.http.post(f"sampler/{MODEL}/twinkle/sample", content=b'{"inputs": {"input_ids": [5], "score": NaN}}')
    assert odd.json()["samples"][0]["sequences"][0]["new_input_feature"]["score"] is None


def test_only_the_prompt_is_scored(caller: Caller) -> None:
    (sample,) = caller.samples(MODEL, asked(max_tokens=0, prompt_logprobs=1))
    (sequence,) = sample["sequences"]
    assert (sequence["tokens"], sequence["decoded"]) == ([], "")
    assert sequence["new_input_feature"] == FEATURE
    assert len(sample["prompt_logprobs"]) == len(PROMPT)


def test_a_conversation(caller: Caller) -> None:
    (sample,) = caller.samples(MODEL, asked(CONVERSATION))
    new = sample["sequences"][0]["new_input_feature"]
    drawn = sample["sequences"][0]["tokens"]
    prompt = new["input_ids"][: -len(drawn)]
    assert len(prompt) == 4  # "user hello there assistant"
    assert new["labels"] == [-100] * (len(prompt) - 1) + drawn + [-100]
    assert [message["role"] for message in new["messages"]] == ["user", "assistant"]
    assert new["user_data"] == CONVERSATION["user_data"]
    # The answer can be an input of the next turn.
    (more,) = caller.samples(MODEL, asked(new))
    assert more["sequences"][0]["new_input_feature"]["input_ids"][: len(new["input_ids"])] == new["input_ids"]


def test_large_bodies(caller: Caller) -> None:
    inputs = [{"input_ids": [number % 97] * 2000, "labels": [-100] * 2000} for number in range(16)]
    body = asked(inputs, max_tokens=1)
    assert len(json.dumps(body)) > 2 * 65_536
    assert len(caller.samples(MODEL, body)) == 16
    padding = {"inputs": {"input_ids": [5], "note": "x" * (16 * 2**20)}}
    assert caller.sampler(MODEL, "sample", padding).status_code == 413


# --- weights ----------------------------------------------------------------------------------------------------------


def trained(tenant: Tenant, name: str) -> str:
    """Train an adapter for a step and return the address of its sampler checkpoint."""
    model = tenant.model()
    tenant.forward_backward(model, 1)
    tenant.optim_step(model, 2, learning_rate=3.0)
    save = {"model_id": model, "seq_id": 3, "path": name}
    return str(tenant.json(tenant.submit("save_weights_for_sampler", save))["path"])


def test_addresses(caller: Caller, tenant: Tenant) -> None:
    path = trained(tenant, "named")

    def scores(**more: Any) -> list[object]:
        samples = caller.samples(MODEL, asked(logprobs=1, **more))
        return [sequence["logprobs"] for sample in samples for sequence in sample["sequences"]]

    base, tuned = scores(), scores(adapter_uri=path)
    assert base != tuned
    assert scores(adapter_uri=path.replace("tinker://", "twinkle://")) == tuned
    session = tenant.session()
    create = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = tenant.post("create_sampling_session", create).json()["sampling_session_id"]
    request = tenant.submit("asample", sample_body(sampler, sampling_params={"max_tokens": 12, "seed": SEED}))
    response = pb.SampleResponse.FromString(tenant.result(request))
    expected = np.frombuffer(response.sequences[0].logprobs, "<f4").tolist()
    assert [place[0][1] for place in tuned[0]] == expected


def test_what_is_not_the_callers(caller: Caller, stranger: Caller, tenant: Tenant) -> None:
    path = trained(tenant, "named")
    nobody = "tinker://s-" + "0123456789abcdef" * 2 + ":train:0/sampler_weights/named"
    foreign = stranger.sampler(MODEL, "sample", asked(adapter_uri=path))
    unknown = stranger.sampler(MODEL, "sample", asked(adapter_uri=nobody))
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text == unknown.text.replace(nobody, path)
    # The same with a session of another tenant in the header.
    mine = caller.http.headers["X-Twinkle-Session-Id"]
    missing = "session_" + "0" * 32
    answers = []
    for session in (mine, missing):
        stranger.http.headers["X-Twinkle-Session-Id"] = session
        for verb, body in (("sample", asked()), ("set_template", {"template_cls": "Template"})):
            answer = stranger.sampler(MODEL, verb, body)
            assert answer.status_code == 404
            answers.append(answer.text.replace(session, "<session>"))
    assert len(set(answers)) == 1


def run(caller: Caller, verb: str, adapter_name: str, **body: Any) -> Any:
    answer = caller.http.post(f"model/{MODEL}/twinkle/{verb}", json={"adapter_name": adapter_name, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def step(caller: Caller, name: str) -> None:
    run(caller, "forward_backward", name, inputs=[{"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, -100]}])
    run(caller, "clip_grad_and_step", name)


def test_a_live_adapter_as_it_is_now(caller: Caller, stranger: Caller) -> None:
    config = json.dumps({"r": 8, "lora_alpha": 32, "target_modules": "all-linear"})
    run(caller, "add_adapter_to_model", "default", config=config)
    run(caller, "set_optimizer", "default", optimizer_cls="Adam", lr=3.0)
    step(caller, "default")
    body = asked(logprobs=1)

    def scores(**more: str) -> list[object]:
        return [sample["sequences"][0]["logprobs"] for sample in caller.samples(MODEL, body | more)]

    base, once = scores(), scores(adapter_name="default")
    assert base != once
    assert scores(adapter_name="default") == once
    saved = run(caller, "save", "default", name="kept", is_sampler=True)["twinkle_path"]
    step(caller, "default")
    assert scores(adapter_name="default") != once
    assert scores(adapter_uri=saved) == once
    assert scores(adapter_uri=saved, adapter_name="default") == once
    # Adapters of another tenant, or of another session, are not found.
    named = {"inputs": FEATURE, "adapter_name": "default"}
    assert stranger.sampler(MODEL, "sample", named).status_code == 404
    caller.begin()
    assert caller.sampler(MODEL, "sample", named).status_code == 404


def test_weights_that_are_gone_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that trains fast may replace its weights before a request reaches the sampler."""
    asked_again = native_sampler.AskedSamples(None, None, None, SamplingParams())
    answers: list[Exception | bytes] = [GoneError("it trained on"), GoneError("again"), b"{}"]

    class Sampling:
        async def answer(self) -> bytes:
            said = answers.pop(0)
            if isinstance(said, Exception):
                raise said
            return said

    async def understood(_asked: native_sampler.AskedSamples) -> Sampling:
        return Sampling()

    monkeypatch.setattr(native_sampler.AskedSamples, "understood", understood)
    assert asyncio.run(asked_again.answer()) == b"{}"
    answers += [GoneError("it trained on")] * 3
    with pytest.raises(GoneError):
        asyncio.run(asked_again.answer())


def test_adapters_are_those_of_the_session(caller: Caller) -> None:
    body = {"inputs": FEATURE, "adapter_name": "nobody"}
    answer = caller.sampler(MODEL, "sample", body)
    assert answer.status_code == 404
    assert answer.json()["detail"] == "unknown adapter 'nobody'"
    del caller.http.headers["X-Twinkle-Session-Id"]
    assert "X-Twinkle-Session-Id header" in caller.refusal(MODEL, body)


def test_a_session_is_needed_for_adapters_and_templates_only(caller: Caller) -> None:
    session = caller.http.headers.pop("X-Twinkle-Session-Id")
    assert caller.samples(MODEL, asked())
    assert "X-Twinkle-Session-Id header" in caller.refusal(MODEL, {"template_cls": "Template"}, "set_template")
    caller.http.headers["X-Twinkle-Session-Id"] = session
    assert caller.post("finish_session", {"session_id": session}).status_code == 200
    assert "finished" in caller.refusal(MODEL, asked())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "inputs: Field required"),
        ({"inputs": []}, "inputs: got '0 rows'"),
        ({"inputs": 5}, "inputs: got 5"),
        ({"inputs": [5]}, "inputs[0]: got 5"),
        ({"inputs": [{}]}, "inputs[0]: got [], allowed: input_ids, or a list of messages"),
        ({"inputs": [FEATURE, CONVERSATION]}, "InputFeatures or Trajectories, not both"),
        ({"inputs": {"input_ids": []}}, "inputs[0].input_ids: got []"),
        ({"inputs": {"input_ids": 5}}, "inputs[0].input_ids: got 5"),
        ({"inputs": {"input_ids": [1.5]}}, "inputs[0].input_ids"),
        ({"inputs": {"input_ids": [[1, 2], [3]]}}, "inputs[0].input_ids"),
        ({"inputs": {"input_ids": [[1, 2]]}}, "inputs[0].input_ids"),
        ({"inputs": {"input_ids": [2**70]}}, "inputs[0].input_ids"),
        ({"inputs": {"input_ids": [-1]}}, "token ids in"),
        ({"inputs": {"input_ids": [10**9]}}, "token ids in"),
        ({"inputs": {"input_ids": [5], "labels": [1, 2]}}, "inputs[0].labels: got '2 numbers', allowed: 1"),
        ({"inputs": {"input_ids": [5], "labels": "x"}}, "inputs[0].labels"),
        ({"inputs": {"input_ids": [5], "messages": "x"}}, "inputs[0].messages"),
        ({"inputs": {"messages": [{"content": "x"}]}}, "dicts with a 'role'"),
        ({"inputs": {"messages": [{"role": "user", "content": 5}]}}, "content: got 5"),
        ({"inputs": {"messages": [{"role": "user", "content": "x"}], "images": [1]}}, "images"),
        ({"inputs": FEATURE, "sampling_params": {"temprature": 1}}, "unknown sampling parameter 'temprature'; known: "),
        ({"inputs": FEATURE, "sampling_params": {"temperature": -1}}, "temperature: got -1"),
        ({"inputs": FEATURE, "sampling_params": {"max_tokens": -1}}, "max_tokens: got -1"),
        ({"inputs": FEATURE, "sampling_params": {"max_tokens": 10**9}}, "max_tokens"),
        ({"inputs": FEATURE, "sampling_params": {"num_samples": 0}}, "num_samples: got 0"),
        ({"inputs": FEATURE, "sampling_params": {"num_samples": 5000}}, "4096 sequences in all"),
        ({"inputs": FEATURE, "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"inputs": FEATURE, "sampling_params": {"stop": [""]}}, "stop: got ['']"),
        ({"inputs": FEATURE, "sampling_params": {"stop": ["x"] * 300}}, "at most 256"),
        ({"inputs": FEATURE, "sampling_params": [1]}, "sampling_params: got [1]"),
        ({"inputs": FEATURE, "num_samples": "x"}, "num_samples: got 'x'"),
        ({"inputs": FEATURE, "adapter_uri": "/etc"}, "adapter_uri: got '/etc'"),
        ({"inputs": FEATURE, "adapter_name": "../x"}, "adapter_name: got '../x'"),
    ],
)
def test_malformed(caller: Caller, body: dict[str, Any], said: str) -> None:
    assert said in caller.refusal(MODEL, body)


def test_bodies_that_are_no_json(caller: Caller) -> None:
    for content in (b"", b"{", b"[]", b'{"inputs":' + b"[" * 100_000, b"\xff"):
        for verb in ("sample", "sample_stream", "set_template"):
            answer = caller.http.post(f"sampler/{MODEL}/twinkle/{verb}", content=content)
            assert answer.status_code == 400, (verb, content[:20])


def test_models_by_any_name(own_server: Callable[..., Server]) -> None:
    config = mock_config()
    config["applications"][1]["args"]["aliases"] = ["org/name"]
    caller = Caller(own_server(config).url, "anybody")
    assert caller.sampler("org/name", "create", {"foo": 1}).json() == {"status": "ok"}
    assert caller.samples("org/name", {"inputs": FEATURE})
    for name in ("org/other", "name"):
        for verb in ("create", "sample", "sample_stream"):
            assert caller.sampler(name, verb, {"inputs": FEATURE}).status_code == 404


def test_what_a_sampler_does_not_offer(caller: Caller) -> None:
    said = caller.refusal(MODEL, {"adapter_name": "a", "config": "{}"}, "add_adapter_to_sampler")
    assert "adapter_uri" in said
    assert "apply_patch" in caller.refusal(MODEL, {"patch_cls": "x", "adapter_name": None}, "apply_patch")


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "template_cls: Field required"),
        ({"template_cls": "ms://org/plugin"}, "unknown template 'ms://org/plugin'; known: DeepseekV4Template"),
        ({"template_cls": "ToolCallRegistry"}, "unknown template"),
        ({"template_cls": "Template", "max_len": 5}, "unknown key 'max_len'; known: "),
        ({"template_cls": "Template", "max_length": -1}, "max_length: got -1"),
        ({"template_cls": "Template", "truncation_strategy": "split"}, "truncation_strategy: got 'split'"),
        ({"template_cls": "Template", "enable_thinking": "yes"}, "enable_thinking: got 'yes'"),
        ({"template_cls": "Template", "model_id": "org/other"}, "model_id: got 'org/other'"),
        ({"template_cls": "Template", "model_id": "/etc"}, "model_id: got '/etc'"),
    ],
)
def test_templates_that_are_refused(caller: Caller, body: dict[str, Any], said: str) -> None:
    assert said in caller.refusal(MODEL, body, "set_template")


def test_a_template_is_chosen(caller: Caller, tenant: Tenant) -> None:
    body = {"template_cls": "Qwen3_5Template", "adapter_name": "", "model_id": f"ms://{MODEL}", "max_length": 100}
    assert caller.sampler(MODEL, "set_template", body).json() == {"status": "ok"}
    session = caller.http.headers["X-Twinkle-Session-Id"]
    kept = json.loads(tenant.get(f"sessions/{session}").json()["user_metadata"]["twinkle.sampler_templates"])[MODEL]
    assert (kept["template_cls"], kept["max_length"]) == ("Qwen3_5Template", 100)
    assert caller.samples(MODEL, asked(CONVERSATION))


# --- streams ----------------------------------------------------------------------------------------------------------


def test_lines(caller: Caller) -> None:
    (sample,) = caller.samples(MODEL, asked(max_tokens=40))
    (sequence,) = sample["sequences"]
    answer = caller.sampler(MODEL, "sample_stream", asked(max_tokens=40))
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["finish_reason"] for line in lines[:-1]] == [None] * (len(lines) - 1)
    assert lines[-1]["finish_reason"] == sequence["stop_reason"]
    assert "".join(line["delta"] for line in lines) == "".join(f"{t} " for t in sequence["tokens"] if t != 2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": [FEATURE, FEATURE]}, "inputs: got '2 of them', allowed: one"),
        (asked(num_samples=2), "num_samples: got 2"),
        (asked(max_tokens=0), "max_tokens: got 0"),
        (asked({"input_ids": [-1]}), "token ids in"),
    ],
)
def test_streams_that_are_refused(caller: Caller, body: dict[str, Any], said: str) -> None:
    assert said in caller.refusal(MODEL, body, "sample_stream")


# --- limits, and clients that leave -----------------------------------------------------------------------------------


def waiting(server: Server) -> int:
    status = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()
    return int(status["models"][MODEL]["waiting_samples"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_too_many_at_once(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(limits={"max_waiting_samples_per_tenant": 4}), sample=0.1)
    caller = Caller(server.url, "busy")
    answer = caller.sampler(MODEL, "sample", asked([FEATURE] * 5))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    until(lambda: waiting(server) == 0)
    assert len(caller.samples(MODEL, asked([FEATURE] * 4))) == 4


def test_answers_that_are_too_large(own_server: Callable[..., Server]) -> None:
    """That an answer is too large is known only when it is written; for prompt log-probabilities it is known before."""
    server = own_server(mock_config(limits={"max_json_result_bytes": 20_000}))
    caller = Caller(server.url, "curious")
    said = caller.refusal(MODEL, asked(max_tokens=200, num_samples=64, logprobs=1))
    assert "inputs: got '1 inputs', allowed: fewer inputs, samples or log-probabilities" in said
    assert "allowed are 20000 (max_json_result_bytes)" in said
    assert written(said) < 20_000 + 200 * 100, "it was written no further than to the first sample too many"
    # Several inputs together are too large, though each is small enough.
    assert "max_json_result_bytes" in caller.refusal(MODEL, asked([FEATURE] * 64, max_tokens=20, logprobs=1))
    # Nothing is computed if the request alone shows that the answer is too large.
    wide = {"input_ids": PROMPT * 100}
    assert written(caller.refusal(MODEL, asked(wide, max_tokens=1, prompt_logprobs=16))) == 300 * 16 * 28
    assert len(caller.samples(MODEL, asked([FEATURE] * 2, max_tokens=20, logprobs=1))) == 2


def written(refusal: str) -> int:
    """Return the size of the answer in bytes when it was refused."""
    found = re.search(r"the answer has (\d+) bytes or more", refusal)
    assert found is not None, refusal
    return int(found[1])


def test_who_leaves_cancels(own_server: Callable[..., Server]) -> None:
    """The mock takes a second for 16 tokens of each sample, and the longest samples have some hundred tokens."""
    server = own_server(None, sample=1.0)
    caller = Caller(server.url, key_for("leaves"))
    endless = asked([FEATURE] * 3, max_tokens=4000, num_samples=64)
    with pytest.raises(httpx.ReadTimeout):
        caller.http.post(f"sampler/{MODEL}/twinkle/sample", json=endless, timeout=0.5)
    until(lambda: waiting(server) == 0)
    with caller.http.stream(
        "POST", f"sampler/{MODEL}/twinkle/sample_stream", json=asked(max_tokens=4000, seed=None)
    ) as stream:
        next(stream.iter_lines())
    until(lambda: waiting(server) == 0)
    assert "Traceback" not in server.log()


def test_the_end_of_a_server(own_server: Callable[..., Server]) -> None:
    """A waiting client is told to send its request again."""
    server = own_server(None, sample=0.2)
    caller = Caller(server.url, key_for("waits"))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(caller.sampler, MODEL, "sample", asked(max_tokens=4000, num_samples=64))
        until(lambda: waiting(server) == 1)
        assert server.stop() == 0
        assert answer.result().status_code == 503
        assert answer.result().headers["retry-after"] == "1"


def test_a_template_outlives_the_server(own_server: Callable[..., Server]) -> None:
    server = own_server(None)
    caller = Caller(server.url, key_for("stays"))
    session = caller.begin()
    assert caller.sampler(MODEL, "set_template", {"template_cls": "Qwen3Template"}).status_code == 200
    server.kill()
    server.start()
    tinker = Tenant(server.url, caller.token)
    kept = tinker.get(f"sessions/{session}").json()["user_metadata"]["twinkle.sampler_templates"]
    assert json.loads(kept)[MODEL]["template_cls"] == "Qwen3Template"
    assert caller.samples(MODEL, asked(CONVERSATION))
