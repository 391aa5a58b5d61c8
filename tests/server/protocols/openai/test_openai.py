"""OpenAI's protocol: the ``openai`` package against the mock model, for which the text of tokens 5, 6 is ``"5 6 "``."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request

from tests.support.servers.running import MODEL, Server, Tenant, key_for, mock_config
from twinkle.errors import CapacityError, InvalidInputError
from twinkle.server.http import streams
from twinkle.server.protocols.openai import routes as openai_routes

CHAT = [{"role": "user", "content": "hello there"}]
PROMPT = [5, 6, 7]


@pytest.fixture
def client(server: Server, tenant: Tenant) -> openai.OpenAI:
    return client_of(server, tenant.key)


def client_of(server: Server, key: str) -> openai.OpenAI:
    # trust_env: there may be a proxy; max_retries: tests must see the first refusal
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(trust_env=False)
    )


def trained(tenant: Tenant, steps: int = 1, learning_rate: float = 3.0) -> str:
    """Create a model and train it for some steps."""
    model = tenant.model()
    for step in range(steps):
        train(tenant, model, 2 * step + 1, learning_rate)
    return model


def train(tenant: Tenant, model: str, seq_id: int, learning_rate: float = 3.0) -> None:
    tenant.forward_backward(model, seq_id)
    tenant.json(tenant.optim_step(model, seq_id + 1, learning_rate=learning_rate))


def text_of(client: openai.OpenAI, model: str, **more: Any) -> str:
    asked = {"max_tokens": 40, "seed": 3, "prompt": PROMPT} | more
    return client.completions.create(model=model, **asked).choices[0].text


def scores(client: openai.OpenAI, model: str) -> list[float]:
    """Return log-probabilities, which differ for any two sets of weights, while texts may be equal."""
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, seed=3, logprobs=0)
    return answer.choices[0].logprobs.token_logprobs


def fingerprint(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    assert answer.system_fingerprint is not None
    return answer.system_fingerprint


@pytest.fixture(scope="module")
def long_seed(server: Server) -> int:
    """Return a seed with which the mock's text is long; usually about every sixteenth token ends a text."""
    client = client_of(server, "tml-long-seed")
    return next(seed for seed in range(1000) if len(text_of(client, MODEL, seed=seed).split()) == 40)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_completion(client: openai.OpenAI, long_seed: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, seed=long_seed)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert len(choice.text.split()) == 5
    assert choice.logprobs is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=5, seed=1)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == 4  # "user hello there assistant"


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    """The message is sent exactly as the package returns it, with all null fields."""
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5)
    again = [*CHAT, answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "and"}]}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=5).choices


def test_all_forms_of_prompts(client: openai.OpenAI) -> None:
    expected = [text_of(client, MODEL, prompt=prompt) for prompt in ([5, 6, 7], [8, 9])]
    for prompt in ([[5, 6, 7], [8, 9]], ["5 6 7", "8 9"]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, seed=3)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == 5
    assert text_of(client, MODEL, prompt="5 6 7") == expected[0]


def test_n_and_seed(client: openai.OpenAI) -> None:
    def draw(**more: Any) -> list[str]:
        answer = client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "n": 4, **more})
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    assert draw(seed=1) == draw(seed=1)
    assert len(set(draw(seed=1))) > 1
    assert draw(seed=1) != draw(seed=2)
    assert draw() != draw()
    assert len(set(draw(temperature=0))) == 1
    prompts = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [8, 9]], n=2, max_tokens=30, seed=1)
    assert [choice.text for choice in prompts.choices][:2] == draw(seed=1)[:2]


def test_stop_strings(client: openai.OpenAI, long_seed: int) -> None:
    whole = text_of(client, MODEL, seed=long_seed)
    words = whole.split()
    stop = f"{words[4]} {words[5]} "
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, seed=long_seed, stop=[stop, "no"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(whole[: whole.index(stop)].split()) + 2


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["9 ", "7 1"]}, {"temperature": 0}], ids=str)
def test_a_stream_is_the_same_answer_in_pieces(
    client: openai.OpenAI, long_seed: int, kind: str, more: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "max_tokens": 50, "seed": long_seed, **more}
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    asked |= {"messages": CHAT, "logprobs": True, "top_logprobs": 2} if kind == "chat" else {"prompt": PROMPT}
    whole = create(**asked)
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    texts, reasons, logprobs = {}, {}, {}
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id
        assert chunk.usage is None
        (choice,) = chunk.choices
        if kind == "chat":
            assert (choice.delta.role == "assistant") == (choice.index not in texts)
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
        text = (choice.delta.content or "") if kind == "chat" else choice.text
        texts[choice.index] = texts.get(choice.index, "") + text
        assert choice.index not in reasons, "nothing comes after the end"
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == (choice.message.content if kind == "chat" else choice.text)
        assert reasons[choice.index] == choice.finish_reason
        if kind == "chat":
            assert logprobs[choice.index] == choice.logprobs.content


def test_events_end_with_done(server: Server, tenant: Tenant) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = tenant.post("completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["usage"] is None for event in events[:-2])


def test_logprobs(client: openai.OpenAI, tenant: Tenant) -> None:
    run = trained(tenant)
    chat = client.chat.completions.create(
        model=run, messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content if entry.token != "2 ") == chat.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # the likeliest is what greedy sampling takes
        assert bytes(entry.bytes) == entry.token.encode()
    plain = client.completions.create(model=run, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    table = plain.choices[0].logprobs
    text = plain.choices[0].text
    for token, logprob, top, offset in zip(
        table.tokens, table.token_logprobs, table.top_logprobs, table.text_offset, strict=True
    ):
        assert top[token] == max(top.values()) == logprob
        assert text[offset:].startswith(token) or token == "2 "


def test_tools_reach_the_prompt(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    sizes = [
        client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1, **more).usage.prompt_tokens
        for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "auto"})
    ]
    assert sizes[1] == sizes[2] > sizes[0]
    none = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1, tools=[tool], tool_choice="none")
    assert none.usage.prompt_tokens == sizes[0]


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_run_is_what_it_is_now(client: openai.OpenAI, tenant: Tenant) -> None:
    run = tenant.model()
    assert scores(client, run) == scores(client, run)
    before, named = scores(client, run), fingerprint(client, run)
    assert fingerprint(client, run) == named  # the same weights are the same version
    tenant.result(tenant.forward_backward(run, 1))
    assert fingerprint(client, run) == named  # a gradient does not change the weights
    tenant.json(tenant.optim_step(run, 2, learning_rate=3.0))
    assert scores(client, run) != before
    assert fingerprint(client, run) != named
    checkpoint = tenant.json(tenant.save(run, 3, "ck"))["path"]
    after = scores(client, run)
    assert scores(client, checkpoint) == scores(client, checkpoint.replace("tinker://", "twinkle://")) == after
    train(tenant, run, 4)
    assert scores(client, checkpoint) == after != scores(client, run)
    tenant.json(tenant.load(run, 6, checkpoint))  # as many steps as when it was saved, but other weights than before
    assert scores(client, run) == after


def test_a_run_that_was_just_asked_for(client: openai.OpenAI, tenant: Tenant) -> None:
    """The run is used before its creation is done and before any training."""
    session = tenant.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8, "seed": 1}}
    tenant.submit("create_model", body)
    first = scores(client, f"{session}:train:0")
    assert first == scores(client, f"{session}:train:0") != scores(client, MODEL)


def test_many_steps_keep_few_versions(client: openai.OpenAI, tenant: Tenant) -> None:
    run = tenant.model()
    seen = set()
    for step in range(6):
        train(tenant, run, 2 * step + 1)
        seen.add(fingerprint(client, run))
    assert len(seen) == 6


def test_a_run_that_ended_is_its_newest_checkpoint(client: openai.OpenAI, tenant: Tenant) -> None:
    run = trained(tenant)
    live = scores(client, run)
    session = run.split(":")[0]
    finished = tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert finished.status_code == 200, finished.text
    assert scores(client, run) == live != scores(client, MODEL)
    parked = f"training_runs/{run}/checkpoints/weights/parked"
    assert tenant.http.delete(parked).status_code == 200
    with pytest.raises(openai.NotFoundError, match=r"not live any more and has no checkpoint .*resume"):
        scores(client, run)


def test_a_run_after_a_restart(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant, client = Tenant(server.url, "tml-restart"), client_of(server, "tml-restart")
    run = trained(tenant, 2)
    before = scores(client, run)
    server.kill()
    server.start()
    assert scores(client, run) == before


def test_listing(client: openai.OpenAI, tenant: Tenant) -> None:
    run = trained(tenant)
    saved = {"model_id": run, "seq_id": 3, "path": "named"}
    path = tenant.json(tenant.submit("save_weights_for_sampler", saved))["path"]
    tenant.json(tenant.save(run, 4, "ck"))
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {MODEL, run, path}
    assert listed[MODEL].owned_by == "twinkle"
    assert {model.object for model in listed.values()} == {"model"}
    for model in listed.values():
        assert client.models.retrieve(model.id) == model
        assert abs(model.created - time.time()) < 600
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.models.retrieve("nothing")


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "mock:anything",
        "s-0:train:0",
        "tinker://s-0:train:0/weights/ck",
        "tinker://s-0:train:0/external_weights/ck",
        "tinker://nonsense",
        "../mock",
        "\0",
    ],
)
def test_unknown_models(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        text_of(client, name)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "unknown model" in caught.value.message


def test_another_tenants_run(client: openai.OpenAI, other_tenant: Tenant) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        text_of(client, trained(other_tenant))


# --- refusals ---------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f"}}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"extra_body": {"min_p": 1.5}}, "min_p"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"extra_body": {"top_k": 0}}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x" * 1025]}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [called('{"a": ' + "[" * 100_000)]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [called('{"a": "\\ud800"}')]}, "messages[0].tool_calls[0].function.arguments"),
    ({"model": ""}, "model"),
]


@pytest.mark.parametrize(("changed", "param"), CHAT_REFUSALS, ids=[str(changed)[:60] for changed, _ in CHAT_REFUSALS])
def test_chat_refuses_by_name(client: openai.OpenAI, changed: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": CHAT, "max_tokens": 3} | changed)
    assert caught.value.param == param
    assert caught.value.message.split(": ", 2)[-1].startswith(param) or param in caught.value.message
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, "five"]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**30]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["5"] * 257}, "prompt"),
        ({"prompt": ["5"] * 256, "n": 5}, "n"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_completions_refuse_by_name(client: openai.OpenAI, changed: dict[str, Any], param: str) -> None:
    for stream in (False, True):  # a refused stream is answered without a stream
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": stream} | changed
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked)
        assert caught.value.param == param


def test_neutral_values_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "be brief"}, *CHAT],
        max_tokens=2,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        parallel_tool_calls=True,
        user="me",
        metadata={"a": "b"},
        store=False,
        extra_body={"top_k": -1},
    )


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "5000" in caught.value.message


def test_bodies_that_cannot_be_read(tenant: Tenant) -> None:
    long = b'{"model": "mock", "messages": [{"role": "user", "content": "' + b"5 " * 2**22 + b'"}]}'
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (long, 413), (b"," * (5 * 2**20), 413)):
        for path in ("chat/completions", "completions"):
            answer = tenant.post(path, body)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_keys(server: Server, tenant: Tenant) -> None:
    refused = httpx.get(f"{server.url}/v1/models", trust_env=False)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert [model.id for model in client_of(server, "sk-0123").models.list()] == [MODEL]  # any key, in open mode
    run = trained(tenant)
    for headers in ({"Authorization": f"Bearer {tenant.key}"}, {"X-API-Key": tenant.key}):
        for path in ("/v1/models", "/api/v1/models"):
            answer = httpx.get(server.url + path, headers=headers, trust_env=False)
            assert run in answer.text


def test_errors_of_the_sampler_name_fields_of_this_protocol() -> None:
    """The message too, not only ``param``: the sampler's own names mean nothing to a client."""
    request = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []})
    status, body = openai_routes._refusal(InvalidInputError("stop_strings", "x", "none"), request)
    error = body["error"]
    assert status == 400
    assert (error["param"], error["message"]) == ("stop", "stop: got 'x', allowed: none")


def test_too_many_requests(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(limits={"max_waiting_samples_per_tenant": 1}))
    client = client_of(server, key_for("many"))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=MODEL, prompt=[[5], [6], [7]], max_tokens=3)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    assert client.completions.create(model=MODEL, prompt=[5], max_tokens=3).choices


def test_an_error_after_the_stream_has_begun_is_its_last_event() -> None:
    async def failing() -> AsyncGenerator[dict[str, object], None]:
        yield {"number": 2}
        raise CapacityError("the device is full")

    async def bodies() -> list[dict[str, object]]:
        request = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []})
        return [
            body
            async for body in streams.until_failure(
                {"number": 1}, failing(), lambda error: openai_routes._refusal(error, request)[1]
            )
        ]

    *chunks, last = asyncio.run(bodies())
    assert chunks == [{"number": 1}, {"number": 2}]
    assert last == {"error": {"message": "the device is full", "type": "server_error", "param": None, "code": None}}


# --- clients that disconnect ------------------------------------------------------------------------------------------


def numbers(server: Server) -> tuple[int, int]:
    """Return the number of waiting samples, and of tokens in all finished samples."""
    status = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()["models"][MODEL]
    return status["waiting_samples"], status["sampled_tokens"]


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_who_leaves_cancels(own_server: Callable[..., Server]) -> None:
    """The mock takes a second for 16 tokens of each sample, and the longest samples have some hundred tokens."""
    server = own_server(None, sample=1.0)
    client = client_of(server, key_for("leaves"))
    endless = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "n": 64, "seed": 1}
    stream = client.completions.create(**endless, stream=True)
    next(iter(stream))
    assert numbers(server) == (1, 0)
    stream.close()
    until(lambda: numbers(server) == (0, 0))
    for stream_wanted in (False, True):  # also before the first token
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(**endless, stream=stream_wanted)
        until(lambda: numbers(server) == (0, 0))
    assert "Traceback" not in server.log()


def test_who_reads_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the socket takes no more data, the request is cancelled and the connection closed."""
    monkeypatch.setattr(streams, "UNREAD_SECONDS", 0.05)
    ended = []

    async def bodies() -> AsyncGenerator[dict[str, object], None]:
        try:
            while True:
                yield {}
        finally:
            ended.append(True)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        stream = streams.json_stream(bodies(), streams.EVENTS)
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)

    asyncio.run(main())
    assert ended == [True]


def test_an_open_stream_does_not_hold_up_the_end_of_the_server(own_server: Callable[..., Server]) -> None:
    server = own_server(None, sample=0.05)
    client = client_of(server, key_for("stays"))
    endless = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "n": 64, "seed": 1}
    with ThreadPoolExecutor() as pool:
        stream = client.completions.create(**endless, stream=True)
        next(iter(stream))
        reading = pool.submit(list, stream)
        whole = pool.submit(client.completions.create, **endless)
        until(lambda: numbers(server)[0] == 2)
        assert server.stop() == 0
        with pytest.raises(openai.APIError, match="shutting down"):
            reading.result()
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            whole.result()
    assert refused.value.status_code == 503
    assert "Traceback" not in server.log()
    assert "timeout graceful shutdown exceeded" not in server.log()
