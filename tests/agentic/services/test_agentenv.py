"""Sandboxes through the real e2b package, against a local service that speaks its protocol (make test-environments)."""

import json
import os

import pytest

from tests.agentic.services.e2b_service import running
from twinkle.errors import InvalidInputError
from twinkle_agentic.envs import AgentEnv, EnvTool
from twinkle_agentic.tools import ToolManager

pytest.importorskip("e2b", reason="needs the extra e2b: make test-environments")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running(tmp_path_factory.mktemp("sandboxes")) as service:
        yield service


def variables():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def env(service, monkeypatch):
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    before = variables()
    env = AgentEnv("base", api_url=service.url, sandbox_envs={"GREETING": "hello"}, metadata={"run": "7"})
    with env:
        env.reset()
        yield env
    assert variables() == before  # values go to the package by its arguments


def info(name):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def test_the_default_tools(service, env):
    tools = ToolManager(EnvTool.from_env(env))
    assert tools.names() == ["run_command", "write_file", "read_file"]

    def call(name, **arguments):
        return tools({"function": {"name": name, "arguments": json.dumps(arguments)}})

    assert call("write_file", path="a/b.txt", content="one\ntwo\n") == "wrote 8 bytes to a/b.txt"
    assert call("read_file", path="a/b.txt") == "one\ntwo\n"
    assert call("run_command", command="wc -l < a/b.txt; echo $GREETING") == "2\nhello"
    assert call("run_command", command="echo out; echo err >&2; exit 3") == "out\nerr\nexit code: 3"
    assert call("read_file", path="missing").startswith("Error: ")
    assert call("run_command") == "Error: InvalidInputError: command: got None, allowed: a text"
    result = env.step("shell", {})
    assert result.observation == "Error: unknown tool 'shell'; available: run_command, write_file, read_file"
    assert (result.reward, result.done) == (0.0, False)
    assert service.created[-1]["metadata"] == {"run": "7"}
    assert service.created[-1]["timeout"] == 300
    assert service.keys == {"dummy"}
    done = env.run_command("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)


def test_text_of_a_model_is_no_command(service, env):
    env.run_command("echo kept > kept")
    env.register_command_tool(info("find"), 'grep -c -- "{what}" {file} || true').register_command_tool(
        info("say"), "printf '%s' {text}"
    )
    for attack in ("; rm -rf *", "$(rm -rf .)", "`rm kept`", "a\nrm kept", "'; rm kept; '", '"; rm kept; "'):
        assert env.step("say", {"text": attack}).observation == attack
        assert env.step("find", {"what": attack, "file": "kept"}).observation == "0"
    assert env.step("find", {"what": "kept", "file": "kept"}).observation == "1"
    assert env.run_command("cat kept") == "kept"
    assert "arguments with 'text'" in env.step("say", {}).observation
    with pytest.raises(InvalidInputError, match="command substitution"):
        env.register_command_tool(info("bad"), "echo $(cat {file})")


def test_episodes(service):
    env = AgentEnv(
        "python", service.url, "key-1", sandbox_timeout=60, setup_commands=["echo ready > state"], refresh_timeout=True
    )
    assert env.sandbox_id is None
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.sandbox  # noqa: B018
    env.reset()
    first = env.sandbox_id
    assert env.step("run_command", {"command": "cat state"}).observation == "ready"
    assert (first, 60) in service.timeouts
    assert "key-1" in service.keys
    env.reset()
    assert (first in service.killed, env.sandbox_id == first) == (True, False)
    second = env.sandbox_id
    env.close()
    env.close()
    assert service.killed.count(second) == 1
    assert env.step("run_command", {"command": "ls"}).observation.startswith("Error: RuntimeError: there is no sandbox")


def test_options(service):
    with AgentEnv("base", service.url, include_default_tools=False, refresh_timeout=False) as env:
        env.register_tool(info("big"), lambda env, arguments: "ü" * 40_000)
        assert [each["function"]["name"] for each in env.tools()] == ["big"]
        env.reset()
        before = len(service.timeouts)
        observation = env.step("big", {}).observation
        assert observation == "ü" * (16 * 1024) + "\n[cut at 32 KiB]"
        assert len(service.timeouts) == before
    failing = AgentEnv("base", service.url, setup_commands=["true", "exit 9"])
    with pytest.raises(RuntimeError, match="setup command 'exit 9' failed: exit code: 9"):
        failing.reset()
    assert failing.sandbox_id is None


def test_a_sandbox_that_is_gone(service):
    env = AgentEnv("base", service.url)
    env.reset()
    service.kill(env.sandbox_id)
    result = env.step("run_command", {"command": "ls"})
    assert result.observation.startswith("Error: ")
    assert not result.done
    assert service.commands[-1] != "ls"
    env.reset()
    assert env.step("run_command", {"command": "ls"}).observation == ""
    env.close()
