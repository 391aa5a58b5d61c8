"""``twinkle_agentic.protocol.OpenAI`` and the model of ``twinkle-auto`` against this server, with the mock model."""

import openai
import pytest

from tests.support.servers.running import MODEL, Server, Tenant
from twinkle.data_format import SamplingParams
from twinkle_agentic.protocol import OpenAI
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


def test_a_penalty_reaches_the_server_which_refuses_it(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"frequency_penalty: got 0\.5"):
        api(TRAJECTORY, SamplingParams(repetition_penalty=1.5))


def test_the_model_of_twinkle_auto_is_streamed(server: Server, tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pieces: list[str] = []
    question = [{"role": "user", "content": "hello there"}]
    answer = ChatModel(f"{server.url}/v1", MODEL, tenant.key).answer(question, [], pieces.append)
    assert answer["role"] == "assistant"
    assert answer["content"] == "".join(pieces)
    with pytest.raises(ServerError, match="unknown model 'nothing'"):
        ChatModel(f"{server.url}/v1", "nothing", tenant.key).answer(question, [], pieces.append)
