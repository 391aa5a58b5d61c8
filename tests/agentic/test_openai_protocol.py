"""Models behind OpenAI's protocol: what is sent for a trajectory and its sampling parameters, and what comes back."""

import builtins

import openai
import pytest

from tests.support.agents.chat_endpoint import ChatEndpoint
from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError, MissingDependencyError, UnknownNameError
from twinkle.utils.logger import get_logger
from twinkle_agentic.protocol import API, OpenAI

QUESTION = {"messages": [{"role": "user", "content": "2 + 3?"}]}
FIVE = {"content": "5"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


@pytest.fixture(scope="module")
def running():
    with pytest.MonkeyPatch.context() as patch, ChatEndpoint(FIVE) as endpoint:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield endpoint, OpenAI("stub", "k", f"{endpoint.url}/v1", {"max_retries": 0})


@pytest.fixture
def endpoint(running):
    running[0].script(FIVE)
    return running[0]


@pytest.fixture
def ask(running, endpoint):
    return lambda params=None, trajectory=QUESTION, **options: running[1](trajectory, params, **options)


@pytest.fixture
def sent(endpoint, ask):
    """Return the body that is sent for these arguments."""

    def send(*arguments, **options):
        ask(*arguments, **options)
        return endpoint.bodies[-1]

    return send


def test_an_answer_is_a_message(endpoint, ask):
    assert ask() == {"role": "assistant", "content": "5", "finish_reason": "stop"}
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert body == {"model": "stub", "messages": QUESTION["messages"]}  # the endpoint's own defaults


def test_reasoning_and_calls_come_back(endpoint, ask):
    full = {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL], "finish_reason": "tool_calls"}
    endpoint.script(full, {"content": "x", "reasoning": "Hm."})
    assert ask() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
        "finish_reason": "tool_calls",
    }
    assert ask()["reasoning_content"] == "Hm."


def test_several_samples_are_a_list(endpoint, ask):
    endpoint.script([FIVE, {"content": "6", "finish_reason": "length"}])
    found = ask(SamplingParams(num_samples=2))
    assert [(each["content"], each["finish_reason"]) for each in found] == [("5", "stop"), ("6", "length")]
    assert endpoint.bodies[0]["n"] == 2


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (SamplingParams(), {}),
        (
            SamplingParams(max_tokens=7, temperature=0.0, top_p=0.5, seed=3, stop="END"),
            {"max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "seed": 3, "stop": ["END"]},
        ),
        (SamplingParams(repetition_penalty=1.25), {"frequency_penalty": 0.25}),
        (SamplingParams(repetition_penalty=0.5), {"frequency_penalty": -0.5}),
        (SamplingParams(top_k=20), {"top_k": 20}),
        (
            SamplingParams(frequency_penalty=0.5, presence_penalty=-1.0),
            {"frequency_penalty": 0.5, "presence_penalty": -1.0},
        ),
        (SamplingParams(min_p=0.1, ignore_eos=True), {"min_p": 0.1, "ignore_eos": True}),
        (SamplingParams(stop=[1, 2]), {"stop_token_ids": [1, 2]}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ],
)
def test_parameters_are_mapped(sent, params, fields):
    assert sent(params) == {
        "model": "stub",
        "messages": QUESTION["messages"],
        "temperature": 1.0,
        "top_p": 1.0,
        **fields,
    }


def test_options_reach_the_package(sent):
    body = sent(SamplingParams(top_k=20), extra_body={"chat_template_kwargs": {"enable_thinking": False}}, top_p=0.9)
    assert (body["top_k"], body["chat_template_kwargs"], body["top_p"]) == (20, {"enable_thinking": False}, 0.9)


def test_what_has_no_effect_is_logged_once(sent, caplog):
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        bodies = [sent(SamplingParams(logprobs=1)) for _ in range(2)]
    finally:
        logger.removeHandler(caplog.handler)
    assert "logprobs" not in bodies[0]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["logprobs, prompt_logprobs"]


def test_unknown_parameters_are_refused(sent):
    with pytest.raises(UnknownNameError, match="unknown sampling parameter 'typical_p'; known: "):
        sent({"typical_p": 0.1})


def test_two_parameters_for_one_field_are_refused(sent):
    with pytest.raises(InvalidInputError, match=r"frequency_penalty: got 0\.5, allowed: 0, because repetition_penalty"):
        sent(SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5))


def test_conversations_of_rollouts_are_written_as_the_protocol_wants_them(sent):
    """Templates make calls without ids and with dicts as arguments, and answers without ids."""
    calls = [{"function": {"name": name, "arguments": {"a": "ä"}}} for name in ("add", "sub")]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls, "finish_reason": "tool_calls"},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "Both.", "tool_calls": [], "reasoning_content": "Hm."},
    ]
    body = sent(trajectory={"messages": messages, "tools": tools})
    functions = [{"name": name, "arguments": '{"a": "ä"}'} for name in ("add", "sub")]
    assert body["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call_0_{place}", "type": "function", "function": function}
                for place, function in enumerate(functions)
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_0_0"},
        {"role": "tool", "content": "6", "tool_call_id": "call_0_1"},
        {"role": "assistant", "content": "Both.", "reasoning_content": "Hm."},
    ]
    assert body["tools"] == tools
    own = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    assert sent(trajectory={"messages": own})["messages"] == own


def test_failures_are_those_of_the_package(endpoint, ask):
    endpoint.script(500, [])
    with pytest.raises(openai.InternalServerError):
        ask()
    with pytest.raises(InvalidInputError, match=r"choices: got .*at least one"):
        ask()


def test_the_extra_is_named(monkeypatch):
    load = builtins.__import__

    def without_openai(name, *args, **kwargs):
        if name == "openai":
            raise ModuleNotFoundError(name="openai")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_openai)
    with pytest.raises(MissingDependencyError, match=r"needs .*'openai'.*pip install 'twinkle-posttrain\[agentic\]'"):
        OpenAI("m", "k")


def test_a_model_of_ones_own():
    class Echo(API):
        def __call__(self, trajectory, sampling_params=None, **options):
            return {"role": "assistant", "content": trajectory["messages"][-1]["content"], "finish_reason": "stop"}

    assert Echo()(QUESTION)["content"] == "2 + 3?"
    with pytest.raises(TypeError, match="abstract"):
        API()
