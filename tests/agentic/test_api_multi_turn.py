"""Conversations with tools over an API, in the place of which a scripted function answers."""

import json
import threading

import pytest

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout as SameRollout
from twinkle_agentic.tools import Tool, ToolManager


class Double(Tool):
    def __call__(self, tool_name, arguments):
        return str(2 * arguments["n"])

    def tool_info(self):
        return {"type": "function", "function": {"name": "double", "description": "", "parameters": {}}}


TOOLS = ToolManager([Double()])


def asks(n, finish_reason="tool_calls", **extra):
    call = {"type": "function", "function": {"name": "double", "arguments": json.dumps({"n": n})}, **extra}
    return {"role": "assistant", "content": "", "tool_calls": [call], "finish_reason": finish_reason}


def says(text, finish_reason="stop"):
    return {"role": "assistant", "content": text, "reasoning_content": "hm", "finish_reason": finish_reason}


class Scripted:
    """An API that answers each trajectory with its own lines, and remembers what it was asked."""

    def __init__(self, **lines):
        self.lines = {name: list(each) for name, each in lines.items()}
        self.asked = []

    def __call__(self, trajectory, sampling_params, **kwargs):
        self.asked.append((trajectory, sampling_params, kwargs))
        answer = self.lines[trajectory["messages"][0]["content"]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def row(name, **more):
    return {"messages": [{"role": "user", "content": name}], **more}


def test_tools_answer_over_an_api():
    api = Scripted(a=[asks(4, id="abc"), asks(8), says("16")], b=[says("at once")])
    rollout = APIMultiTurnRollout(api, TOOLS, SamplingParams(max_tokens=9), extra_body={"x": 1, "y": 1})
    first, second = rollout([row("a", user_data=[("id", "1")]), row("b")], extra_body={"y": 2})
    assert SameRollout is APIMultiTurnRollout
    assert {name: first[name] for name in ("turns", "stop_reason", "truncated", "error", "user_data")} == {
        "turns": 3,
        "stop_reason": "stop",
        "truncated": False,
        "error": None,
        "user_data": [("id", "1")],
    }
    roles = [message["role"] for message in first["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    answers = [message for message in first["messages"] if message["role"] == "tool"]
    assert answers == [
        {"role": "tool", "tool_call_id": "abc", "content": "8"},
        {"role": "tool", "tool_call_id": "call00200", "content": "16"},  # a call without an id gets one
    ]
    assert first["messages"][3]["tool_calls"][0]["id"] == "call00200"
    assert first["messages"][-1] == {"role": "assistant", "content": "16", "reasoning_content": "hm"}
    assert (second["turns"], second["messages"][-1]["content"]) == (1, "at once")
    trajectory, params, kwargs = api.asked[0]
    assert trajectory["tools"] == TOOLS.tool_infos()
    assert (params.max_tokens, kwargs) == (9, {"extra_body": {"x": 1, "y": 2}})


def test_the_tools_of_a_trajectory_come_first():
    api = Scripted(a=[says("x")])
    own = [{"type": "function", "function": {"name": "own"}}]
    APIMultiTurnRollout(api, TOOLS)([row("a", tools=own)], sampling_params={"temperature": 0.5})
    trajectory, params, kwargs = api.asked[0]
    assert (trajectory["tools"], params.temperature, kwargs) == (own, 0.5, {})


def test_how_conversations_end():
    api = Scripted(
        a=[asks(1), asks(2), says("never asked for")],
        b=[says("cut", "length")],
        c=[asks(1, "length")],
        d=[asks(1), ConnectionError("gone")],
        e=[],
    )
    rows = APIMultiTurnRollout(api, TOOLS, max_turns=2)([row(name) for name in "abcde"] + [{"no": "messages"}])
    assert [(each["turns"], each["stop_reason"], each["truncated"]) for each in rows] == [
        (2, "max_turns", True),
        (1, "length", False),
        (1, "length", False),
        (1, "api_error", False),
        (0, "api_error", False),
        (0, "api_error", False),
    ]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert rows[3]["error"] == "ConnectionError: gone"
    assert [message["role"] for message in rows[3]["messages"]] == ["user", "assistant", "tool"]
    assert [each["error"] is None for each in rows] == [True, True, True, False, False, False]


@pytest.mark.parametrize("answer", [None, "text", [says("one of several")]])
def test_an_api_that_returns_no_message(answer):
    (done,) = APIMultiTurnRollout(lambda trajectory, params: answer, TOOLS)([row("a")])
    assert "allowed: a function that returns one message" in done["error"]


def test_traces_that_cannot_be_written_lose_no_trajectory(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    api = Scripted(a=[says("x")], b=[says("y")])
    rollout = APIMultiTurnRollout(api, TOOLS, trace_dir=tmp_path / "traces")
    rows = rollout([row("a", extra={("no", "JSON"): 1}), row("b")])
    assert [each["stop_reason"] for each in rows] == ["stop", "stop"]
    assert "could not be written; the trajectories are complete" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=r"trace_dir: got '.*file', allowed: a folder that can be made"):
        APIMultiTurnRollout(api, TOOLS, trace_dir=tmp_path / "file")


def test_trajectories_have_threads():
    together = threading.Barrier(3)

    def api(trajectory, sampling_params):
        together.wait(60)  # no answer before all three have asked
        return says("x")

    rows = APIMultiTurnRollout(api, TOOLS, concurrency=3)([row(name) for name in "abc"])
    assert [each["messages"][0]["content"] for each in rows] == ["a", "b", "c"]


def test_traces(tmp_path):
    api = Scripted(a=[says("yes")], b=[says("no")])
    rollout = APIMultiTurnRollout(
        api, TOOLS, trace_dir=tmp_path, success_callback=lambda each: each["messages"][-1]["content"] == "yes"
    )
    rollout([row("a", user_data=[("id", "1")]), row("b", user_data=[("id", "1")])], global_step=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step000012-fail-1.json", "step000012-ok-1.json"]


def test_mistakes():
    api = Scripted()
    for wrong, text in (
        ({"max_turns": 0}, "max_turns"),
        ({"concurrency": 0}, "concurrency"),
        ({"sampling_params": SamplingParams(num_samples=2)}, "num_samples"),
    ):
        with pytest.raises(ValueError, match=text):
            APIMultiTurnRollout(api, TOOLS, **wrong)
    with pytest.raises(ValueError, match="tool_manager: got None"):
        APIMultiTurnRollout(api, None)([row("a")])
    with pytest.raises(TypeError, match="allowed: a list"):
        APIMultiTurnRollout(api, TOOLS)(row("a"))
    assert APIMultiTurnRollout(api, TOOLS)([]) == []
