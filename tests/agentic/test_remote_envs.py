"""Environments elsewhere, with stand-ins for OpenEnv's and E2B's packages.

The tests in ``services`` use the packages themselves, and ``make test-environments`` runs them.
"""

import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle_agentic.envs import AgentEnv, OpenEnvClient

# --- a client of an OpenEnv server ------------------------------------------------------------------------------------


@dataclass
class Result:
    observation: object
    reward: float | None = None
    done: bool = False


class EchoEnv:
    """A client that needs no server. Like OpenEnv's, it is asynchronous and has a synchronous one."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.closed, self.connected, self.resets = options, False, False, []
        EchoEnv.made.append(self)

    def sync(self):
        return self

    def connect(self):
        if self.options["base_url"] == "http://nowhere":
            raise ConnectionError("refused")
        self.connected = True

    def reset(self, **options):
        self.resets.append(options)
        return Result("ready")

    def step(self, action):
        if "fail" in action:
            raise TimeoutError("too slow")
        return Result(dict(action), 0.5, action.get("code") == "end")

    def close(self):
        self.closed = True


def test_a_connection_is_opened_by_reset_and_kept():
    env = OpenEnvClient(
        env_cls=EchoEnv, base_url="http://here", reset_kwargs={"seed": 3}, client_kwargs={"mode": "simulation"}
    )
    assert env.client is None
    assert env.reset().observation == "ready"
    made = env.client
    assert made.options == {
        "base_url": "http://here",
        "connect_timeout_s": 10.0,
        "message_timeout_s": 120.0,
        "mode": "simulation",
    }
    assert made.connected
    assert env.step("run_python", {"code": "1"}).observation == '{"code": "1"}'
    assert env.step("run_python", {"code": "end"}).done
    assert env.episode_reward == 1.0
    env.reset()
    assert (env.client is made, made.resets, env.episode_reward) == (True, [{"seed": 3}] * 2, 0.0)
    env.close()
    assert (made.closed, env.client) == (True, None)


def test_failures_of_a_step_and_of_a_reset():
    env = OpenEnvClient(env_cls=EchoEnv, base_url="http://here")
    env.reset()
    result = env.step("run_python", {"fail": 1})
    assert (result.observation, result.reward, result.done) == ("Error: TimeoutError: too slow", 0.0, False)
    assert env.last_result is result
    lost = OpenEnvClient(env_cls=EchoEnv, base_url="http://nowhere")
    with pytest.raises(ConnectionError, match="refused"):
        lost.reset()
    assert (lost.client, EchoEnv.made[-1].closed) == (None, True)


def test_handlers_act_and_their_rewards_count():
    def twice(env, arguments):
        first = env.execute({"code": arguments["code"]})
        env.execute({"code": "end"})
        return first.observation["code"]

    info = {"type": "function", "function": {"name": "twice"}}
    env = OpenEnvClient(env_cls=EchoEnv, base_url="http://here").register_tool(info, twice)
    assert [each["function"]["name"] for each in env.tools()] == ["run_python", "twice"]
    env.reset()
    result = env.step("twice", {"code": "x"})
    assert (result.observation, result.reward, result.done) == ("x", 1.0, True)
    failed = env.step("twice", {})
    assert (failed.observation, failed.reward) == ("Error: KeyError: 'code'", 0.0)
    with pytest.raises(InvalidInputError, match=r"function\.name"):
        env.register_tool({}, twice)


# --- sandboxes --------------------------------------------------------------------------------------------------------


class CommandExitException(Exception):  # noqa: N818 - the name in the e2b package
    def __init__(self, stdout, stderr, exit_code):
        self.stdout, self.stderr, self.exit_code = stdout, stderr, exit_code


class Sandbox:
    """A sandbox that repeats its commands; ``fail`` exits with 4."""

    made: ClassVar[list] = []

    def __init__(self, template, **options):
        self.template, self.options, self.files = template, options, {}
        self.sandbox_id = f"box{len(Sandbox.made)}"
        self.commands = SimpleNamespace(run=self._run)
        self.killed, self.timeouts = 0, []

    @classmethod
    def create(cls, template, **options):
        cls.made.append(cls(template, **options))
        return cls.made[-1]

    def _run(self, command, timeout):
        if command == "fail":
            raise CommandExitException("", "no\n", 4)
        return SimpleNamespace(stdout=f"{command} ({timeout} s)\n", stderr="", exit_code=0)

    def set_timeout(self, seconds):
        self.timeouts.append(seconds)

    def kill(self):
        self.killed += 1


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("e2b")
    module.__spec__ = ModuleSpec("e2b", None)
    module.Sandbox, module.CommandExitException = Sandbox, CommandExitException
    monkeypatch.setitem(sys.modules, "e2b", module)
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)


def test_a_sandbox_for_each_episode(package):
    before = dict(os.environ)
    env = AgentEnv("base", "http://here", sandbox_timeout=60, command_timeout=5, setup_commands=["prepare"])
    env.reset()
    first = env.sandbox
    assert first.options == {
        "timeout": 60,
        "metadata": {},
        "envs": {},
        "api_url": "http://here",
        "sandbox_url": "http://here",
        "api_key": "dummy",
    }
    assert env.step("run_command", {"command": "ls"}).observation == "ls (5 s)"
    assert env.step("run_command", {"command": "fail"}).observation == "no\nexit code: 4"
    assert first.timeouts == [60, 60]
    env.register_command_tool({"function": {"name": "say"}}, 'echo "{text}"')
    assert env.step("say", {"text": "$(id)"}).observation == 'echo ""\'$(id)\'"" (5 s)'
    env.reset()
    assert (first.killed, env.sandbox_id) == (1, Sandbox.made[-1].sandbox_id)
    env.close()
    assert Sandbox.made[-1].killed == 1
    assert dict(os.environ) == before  # nothing is written to this process's environment


def test_addresses_and_keys(package, monkeypatch):
    def connection(**options):
        env = AgentEnv("base", **options)
        env.reset()
        return {name: env.sandbox.options.get(name) for name in ("api_url", "sandbox_url", "api_key")}

    assert connection() == {"api_url": None, "sandbox_url": None, "api_key": None}  # as the package reads its variables
    assert connection(api_key="k")["api_key"] == "k"
    monkeypatch.setenv("E2B_API_URL", "http://mine")
    assert connection()["api_key"] == "dummy"
    monkeypatch.setenv("E2B_API_KEY", "own")
    assert connection(api_url="http://here")["api_key"] == "own"


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("twinkle.extras.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"AgentEnv needs .*pip install 'twinkle-posttrain\[e2b\]'"):
        AgentEnv("base")
    with pytest.raises(MissingDependencyError, match=r"OpenEnvClient needs .*twinkle-posttrain\[openenv\]'"):
        OpenEnvClient(base_url="http://here")
