"""``twinkle_agentic.protocol.OpenAI`` and the model of ``twinkle-auto`` against this server, with the mock model."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.servers.running import MODEL, Server, Tenant
from twinkle.data_format import SamplingParams
from twinkle_agentic.protocol import OpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager
from twinkle_client.auto.chat import ChatModel
from twinkle_client.errors import ServerError

CALL = {"function": {"name": "find", "arguments": {"what": "cat"}}}
TRAJECTORY = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello there"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},  # as a rollout with a template makes it: no id
        {"role": "tool", "content": "here"},
    ],
}


@pytest.fixture
def api(server: Server, tenant: Tenant) -> OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return OpenAI(MODEL, tenant.key, f"{server.url}/v1", {"max_retries": 0, "http_client": http})


def test_an_answer_and_its_parameters(api: OpenAI) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=20, seed=3, stop="zzz")
    answer = api(TRAJECTORY, params)
    assert isinstance(answer, dict)
    assert answer["role"] == "assistant"
    assert answer["finish_reason"] in ("length", "stop")
    assert api(TRAJECTORY, params) == answer  # the seed reached the server
    assert api({"messages": [*TRAJECTORY["messages"], answer]}, params)  # an answer can be sent back


def test_several_samples(api: OpenAI) -> None:
    answers = api(TRAJECTORY, {"max_tokens": 3, "num_samples": 3})
    assert isinstance(answers, list)
    assert len(answers) == 3


def test_a_penalty_reaches_the_server(api: OpenAI) -> None:
    assert api(TRAJECTORY, SamplingParams(max_tokens=2, repetition_penalty=1.5))
    with pytest.raises(openai.BadRequestError, match=r"frequency_penalty: got 3\.0"):
        api(TRAJECTORY, SamplingParams(max_tokens=2, repetition_penalty=4.0))


def test_conversations_with_tools_over_this_server(api: OpenAI, tmp_path: Path) -> None:
    """The mock model calls no tools, so the first answer is scripted; the server reads it back with the tool's."""
    info = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}

    def first_scripted(trajectory: Any, params: Any, **options: Any) -> Any:
        if trajectory["messages"][-1]["role"] == "user":
            return {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], "finish_reason": "tool_calls"}
        return api({**trajectory, "tools": [info]}, params, **options)

    tools = ToolManager({"find": lambda name, arguments: f"found {arguments['what']}"})
    rollout = APIMultiTurnRollout(
        first_scripted, tools, {"max_tokens": 4, "seed": 1, "top_k": 20}, concurrency=3, trace_dir=tmp_path
    )
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": f"row {n}"}], "tools": [info], "user_data": [("id", "same")]}
        for n in range(6)
    ]
    done = rollout(rows)
    assert [each["messages"][0]["content"] for each in done] == [f"row {n}" for n in range(6)]
    for each in done:
        assert (each["error"], each["turns"], each["stop_reason"] in ("stop", "length")) == (None, 2, True)
        roles = [message["role"] for message in each["messages"]]
        assert roles == ["user", "assistant", "tool", "tool", "assistant"]
        assert each["messages"][2]["content"] == "found cat"
        assert "finish_reason" not in each["messages"][-1]
    assert len(list(tmp_path.glob("unjudged-same*.json"))) == 6
    again = rollout([{"messages": [*done[0]["messages"], {"role": "user", "content": "go on"}], "tools": [info]}])
    assert again[0]["error"] is None


def test_a_refusal_of_the_server_is_the_error_of_its_trajectory(api: OpenAI) -> None:
    rows: list[Any] = [{"messages": [{"role": "user", "content": "hello"}]}, {"messages": [{"role": "robot"}]}]
    good, bad = APIMultiTurnRollout(api, ToolManager({}), {"max_tokens": 2})(rows)
    assert (good["error"], bad["stop_reason"], bad["turns"]) == (None, "api_error", 0)
    assert bad["error"].startswith("BadRequestError: Error code: 400")


def test_the_model_of_twinkle_auto_is_streamed(server: Server, tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pieces: list[str] = []
    question = [{"role": "user", "content": "hello there"}]
    answer = ChatModel(f"{server.url}/v1", MODEL, tenant.key).answer(question, [], pieces.append)
    assert answer["role"] == "assistant"
    assert answer["content"] == "".join(pieces)
    with pytest.raises(ServerError, match="unknown model 'nothing'"):
        ChatModel(f"{server.url}/v1", "nothing", tenant.key).answer(question, [], pieces.append)
