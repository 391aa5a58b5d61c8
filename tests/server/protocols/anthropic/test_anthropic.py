"""Anthropic's protocol: the ``anthropic`` package against the mock model, whose text of tokens 5, 6 is ``"5 6 "``."""

import json
import time
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from tests.support.servers.running import MODEL, Server, Tenant, key_for
from twinkle.errors import InvalidInputError
from twinkle.sampler.types import Progress, SampledSequence
from twinkle.server.protocols.anthropic.answers import MessageFormat
from twinkle.server.protocols.anthropic.requests import MessagesRequest
from twinkle.server.protocols.openai.choices import Choice
from twinkle.server.protocols.openai.generation import Usage
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import parse

CHAT = [{"role": "user", "content": "hello there"}]
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def client(server: Server, tenant: Tenant) -> anthropic.Anthropic:
    return client_of(f"{server.url}/anthropic", tenant.key)


def client_of(base_url: str, key: str) -> anthropic.Anthropic:
    # trust_env: there may be a proxy; max_retries: tests must see the first refusal
    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0, http_client=http)


def ask(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    """Send a request. The newest package passes temperature, top_p and top_k on only as ``extra_body``."""
    return client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": CHAT, **more})


def until(wanted: Callable[[], Any]) -> Any:
    """Return the first result that is not None. Some of the mock's answers are empty, because they end at once."""
    return next(result for result in (wanted() for _ in range(200)) if result is not None)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = ask(client, system="be brief", metadata={"user_id": "me"}, extra_body={"temperature": 0, "top_k": 5})
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text"
    assert answer.usage.input_tokens == 7  # "system be brief user hello there assistant"
    assert answer.usage.output_tokens <= 5
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.stop_sequence is None


@pytest.mark.parametrize("prefix", ["/anthropic", "/anthropic/api"])
def test_both_addresses_and_both_headers(server: Server, prefix: str) -> None:
    """Hosted Tinker's address ends in /anthropic/api; a key may be sent as x-api-key or as a bearer token."""
    http = anthropic.DefaultHttpxClient(trust_env=False)
    for key in ({"api_key": "tml-a"}, {"auth_token": "tml-a"}):
        client = anthropic.Anthropic(base_url=server.url + prefix, max_retries=0, http_client=http, **key)
        assert ask(client).content


def test_a_stream_builds_up_a_message(client: anthropic.Anthropic) -> None:
    def streamed() -> tuple[str, anthropic.types.Message] | None:
        with client.messages.stream(model=MODEL, max_tokens=40, messages=CHAT) as stream:
            text = "".join(stream.text_stream)
            return (text, stream.get_final_message()) if text else None

    text, message = until(streamed)
    assert [block.text for block in message.content] == [text]
    assert message.stop_reason == ("max_tokens" if message.usage.output_tokens == 40 else "end_turn")
    assert len(text.split()) == message.usage.output_tokens - (message.stop_reason == "end_turn")
    assert message.usage.input_tokens == 4


def test_events_of_a_stream(server: Server, tenant: Tenant) -> None:
    body = {"model": MODEL, "max_tokens": 40, "messages": CHAT, "stream": True}

    def streamed() -> httpx.Response | None:
        answer = httpx.post(
            f"{server.url}/anthropic/v1/messages", json=body, headers={"X-API-Key": tenant.key}, trust_env=False
        )
        return answer if "content_block_delta" in answer.text else None

    answer = until(streamed)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in answer.text.strip().split("\n\n")]
    names = [event["event"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    def stopped() -> anthropic.types.Message | None:
        answer = ask(client, max_tokens=40, stop_sequences=["nothing", " "])
        return answer if answer.stop_reason == "stop_sequence" else None

    answer = until(stopped)
    assert answer.stop_sequence == " "
    assert answer.content[0].text.isdecimal()  # the first word, without the space after it


def test_the_number_of_tokens_of_a_chat(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=CHAT, system="be brief", tools=[TOOL])
    assert counted.input_tokens == ask(client, system="be brief", tools=[TOOL]).usage.input_tokens
    assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens


# --- what reaches the chat template -----------------------------------------------------------------------------------


def chat_of(**fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "max_tokens": 1, **fields}
    return parse(MessagesRequest, json.dumps(body).encode()).chat()


def test_blocks_and_tools_as_a_template_reads_them() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    chat = chat_of(
        system=[{"type": "text", "text": "Be brief. ", **cached}, {"type": "text", "text": "Be kind."}],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Weather in ", **cached}, {"type": "text", "text": "X?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "X"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "user", "content": "Tell me."},
        ],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "X"}}}
    assert chat == [
        {"role": "system", "content": "Be brief. Be kind."},
        {"role": "user", "content": "Weather in X?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "t1"},
        {"role": "user", "content": "So?\n\nTell me."},
    ]


def test_tools_are_offered_unless_they_are_switched_off() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": CHAT, "tools": [TOOL]}
    function = {"name": "weather", "description": "Tells it.", "parameters": TOOL["input_schema"]}
    for choice, expected in ((None, 1), ({"type": "auto"}, 1), ({"type": "none"}, 0)):
        asked = parse(MessagesRequest, json.dumps({**body, "tool_choice": choice}).encode())
        assert asked.offered_tools == [{"type": "function", "function": function}] * expected


def test_many_messages_of_one_role_are_joined_quickly() -> None:
    """As many as a body can hold: joining them one by one would take many seconds."""
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
    body = {"model": "m", "max_tokens": 1, "messages": [*[call] * 40_000, CHAT[0]]}
    wanted = parse(MessagesRequest, json.dumps(body).encode())
    started = time.process_time()
    calls, last = wanted.chat()
    assert time.process_time() - started < 3
    assert len(calls["tool_calls"]) == 40_000
    assert last == CHAT[0]


# --- tool calls in answers --------------------------------------------------------------------------------------------


class Letters:
    """A codec in which each token is the character with this number."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "X"}}</tool_call>'


def numbers(text: str) -> Any:
    return np.array([ord(letter) for letter in text], np.int64)


@pytest.mark.parametrize(
    ("text", "kinds"), [(f"I look. {CALL}", ["text", "tool_use"]), (CALL + CALL, ["tool_use"] * 2)]
)
def test_tool_calls_become_blocks(text: str, kinds: list[str]) -> None:
    tokens = numbers(text)
    usage = Usage(3, len(tokens), 0)
    choice = Choice(Letters(), (), tools=True)  # type: ignore[arg-type]
    whole = MessageFormat("m", 3).whole([choice.push(SampledSequence(tokens, np.zeros(len(tokens)), "stop"))], usage)
    assert [block["type"] for block in whole["content"]] == kinds  # type: ignore[attr-defined]
    assert whole["stop_reason"] == "tool_use"

    form, choice = MessageFormat("m", 3), Choice(Letters(), (), tools=True)  # type: ignore[arg-type]
    events = form.opening(0)
    for number in range(len(tokens)):
        is_last = number == len(tokens) - 1
        part = Progress("", 0, tokens[number : number + 1], np.zeros(1), None, "stop" if is_last else None)
        delta = choice.push(part)
        events += [] if delta.empty else form.chunk(0, delta)
    events += form.ending(usage)
    started = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in started] == kinds  # type: ignore[index]
    assert [event["index"] for event in started] == list(range(len(kinds)))
    assert sum(event["type"] == "content_block_stop" for event in events) == len(kinds)
    partial = [event["delta"]["partial_json"] for event in events if "partial_json" in str(event.get("delta"))]  # type: ignore[index]
    assert all(json.loads(each) == {"city": "X"} for each in partial)
    assert len(partial) == kinds.count("tool_use")
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_with_a_number_that_is_not_json_stays_text(number: str) -> None:
    text = CALL.replace('"X"', number)
    choice = Choice(Letters(), (), tools=True)  # type: ignore[arg-type]
    delta = choice.push(SampledSequence(numbers(text), np.zeros(len(text)), "stop"))
    whole = MessageFormat("m", 3).whole([delta], Usage(3, len(text), 0))
    assert whole["content"] == [{"type": "text", "text": text}]
    assert whole["stop_reason"] == "end_turn"


def test_an_empty_answer_has_a_block_of_empty_text() -> None:
    choice, form = Choice(Letters(), (), tools=False), MessageFormat("m", 3)  # type: ignore[arg-type]
    delta = choice.push(Progress("", 0, numbers(""), np.zeros(0), None, "stop"))
    names = [event["type"] for event in [*form.opening(0), *form.chunk(0, delta), *form.ending(Usage(3, 0, 0))]]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", "ping", *block, "message_delta", "message_stop"]
    assert form.whole([delta], Usage(3, 0, 0))["content"] == [{"type": "text", "text": ""}]


# --- refusals ---------------------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
ELSEWHERE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content: got"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}, *CHAT]}, "messages[0].content[0].type: got 'image'"),
        ({"messages": [{"role": "user", "content": [ELSEWHERE]}]}, "messages[0].content[0].source: got"),
        ({"messages": [{"role": "user", "content": [ELSEWHERE]}]}, "the server opens no URL"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]: "),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "text": "x"}]}]}, "without the field 'text'"),
        (
            {"messages": [{"role": "user", "content": [{**IMAGE, "type": "text", "text": "x"}]}]},
            "without the field 'source'",
        ),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [*CHAT, {"role": "assistant", "content": "I"}]}, "messages[1].role: got 'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content[0].type: got 'tool_use'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            "messages[0].content[0].content: ",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: got"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type: got 'any'"),
        ({"mcp_servers": []}, "mcp_servers: unknown field"),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], message: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": CHAT, **fields}
    if fields.get("max_tokens", 1) is None:
        del body["max_tokens"]
    with pytest.raises((InvalidInputError, MalformedRequestError)) as error:
        parse(MessagesRequest, json.dumps(body).encode()).chat()
    assert message in str(error.value)


def test_errors_have_this_protocols_form(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(client, model="nobody")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(client, max_tokens=0)
    assert wrong.value.body["type"] == "error"
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in wrong.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match="fewer than"):
        ask(client, messages=[{"role": "user", "content": "5 " * 40_000}])
    answer = httpx.post(f"{server.url}/anthropic/v1/messages", content=b"{", trust_env=False)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    large = httpx.post(
        f"{server.url}/anthropic/api/v1/messages",
        content=b"," * (4 * 2**20 + 1),
        headers={"X-API-Key": "tml-a"},
        trust_env=False,
    )
    assert large.status_code == 413
    assert large.json()["error"]["type"] == "request_too_large"
    rebound = {"X-API-Key": "tml-a", "Host": "evil.example"}
    for path in ("anthropic/api/v1/messages", "anthropic/v1/messages", "oai/api/v1/chat/completions"):
        answer = httpx.post(f"{server.url}/{path}", json={}, headers=rebound, trust_env=False)
        assert answer.status_code == 400
        assert "Host header" in answer.text


def test_the_runs_of_others_are_unknown(server: Server, tenant: Tenant, other_tenant: Tenant) -> None:
    model = tenant.model()
    with pytest.raises(anthropic.NotFoundError):
        ask(client_of(f"{server.url}/anthropic/api", other_tenant.key), model=model)


def test_a_client_that_leaves_is_noticed(server: Server, tenant: Tenant) -> None:
    """The samples of a stream that its client closed leave the queue."""
    client = client_of(f"{server.url}/anthropic", tenant.key)
    with client.messages.stream(model=MODEL, max_tokens=2000, messages=CHAT) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 120
    while httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()["models"][MODEL]["waiting_samples"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- keys in open mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sk-anything", "EMPTY", key_for("usual")])
def test_any_key_in_open_mode(server: Server, key: str) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    for base in ("/v1", "/api/v1", "/oai/api/v1"):
        client = openai.OpenAI(base_url=server.url + base, api_key=key, max_retries=0, http_client=http)
        assert MODEL in [model.id for model in client.models.list()]
        assert client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2).choices
        assert client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=2).choices
    assert ask(client_of(f"{server.url}/anthropic", key)).content
