"""Environments: used as tools, loaded from packages of the OpenEnv project, and run in pools."""

import json

import pytest

from tests.agentic.sample_env import GuessAction
from tests.agentic.sample_env.server.guess_environment import GuessEnvironment
from twinkle.errors import InvalidInputError, MissingDependencyError, UnsupportedError
from twinkle_agentic.envs import Env, EnvPool, EnvPoolAdapter, EnvTool, OpenEnv, OpenEnvClient, StepResult
from twinkle_agentic.tools import ToolManager

PACKAGE = "tests.agentic.sample_env"


class Counter(Env):
    """Counts to three; each step has reward 0.5."""

    def __init__(self, *names):
        self.names = names
        self.count = 0
        self.closed = False

    def step(self, tool_name, arguments):
        self.count += arguments.get("by", 1)
        return StepResult(f"{tool_name}: {self.count}", 0.5, self.count >= 3)

    def tools(self):
        return [{"type": "function", "function": {"name": name, "description": "counts"}} for name in self.names]

    def close(self):
        self.closed = True


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


def test_a_result_can_be_changed():
    result = StepResult()
    assert (result.observation, result.reward, result.done, result.info) == ("", 0.0, False, {})
    result.reward += 0.5
    result.info["a"] = 1
    assert (result.reward, StepResult().info) == (0.5, {})


def test_an_environment_needs_only_a_step():
    with Counter() as env:
        assert env.reset() == StepResult()
        assert env.tools() == []
        with pytest.raises(UnsupportedError, match="Counter: evaluate"):
            env.evaluate([{}], strict=True)
    assert env.closed
    with pytest.raises(TypeError, match="step"):
        Env()


def test_an_environment_is_a_tool():
    tool = EnvTool(Counter(), "count", "Counts.", {"type": "object", "properties": {"by": {"type": "integer"}}})
    manager = ToolManager([tool])
    assert tool.tool_info()["function"]["parameters"]["properties"] == {"by": {"type": "integer"}}
    assert (tool.last_result, tool.done, tool.episode_reward) == (None, False, 0.0)
    assert manager(call("count", by=2)) == "count: 2"
    assert (tool.done, tool.episode_reward) == (False, 0.5)
    assert tool("count", {}) == "count: 3"
    assert (tool.done, tool.episode_reward, tool.last_result.observation) == (True, 1.0, "count: 3")
    assert tool("count", {}) == "count: 4"  # the environment decides what happens after the end
    assert manager(call("other")).startswith("Error: unknown tool 'other'")


def test_one_tool_for_each_action_and_one_episode_for_all():
    first, second = EnvTool.from_env(Counter("up", "more"))
    assert (first.tool_name, second.tool_name) == ("up", "more")
    first("up", {})
    second("more", {"by": 2})
    assert first.done
    assert first.episode_reward == second.episode_reward == 1.0


def test_actions_without_names_answer_to_the_name_in_the_prompt():
    (only,) = EnvTool.from_env(Counter())
    assert only.tool_name == "env_action"
    manager = ToolManager([only])
    assert manager(call("env_action")) == "env_action: 1"
    assert manager(call("play")) == "play: 2"
    manager.register(EnvTool(Counter(), "other"))  # it is not the only tool any more
    assert manager(call("play")) == "Error: unknown tool 'play'; available: env_action, other"


# --- packages in the layout of the OpenEnv project --------------------------------------------------------------------


def test_a_package_by_its_name():
    env = OpenEnv(PACKAGE, env_kwargs={"secret": 7})
    assert json.loads(env.reset().observation) == {"hint": "guess", "reward": None, "done": False}
    result = env.step("guess", {"number": 3})
    assert json.loads(result.observation)["hint"] == "higher"
    assert (result.reward, result.done) == (-0.25, False)
    assert (env.step("guess", {"number": 7}).reward, env.step("guess", {"number": 7}).done) == (1.0, True)
    before = GuessEnvironment.closed
    env.close()
    assert GuessEnvironment.closed == before + 1


@pytest.mark.parametrize(
    "names",
    [
        (GuessEnvironment, GuessAction),
        (f"{PACKAGE}.server.guess_environment:GuessEnvironment", f"{PACKAGE}:GuessAction"),
        (f"{PACKAGE}.server.guess_environment.GuessEnvironment", f"{PACKAGE}.GuessAction"),
    ],
)
def test_classes_and_their_names(names):
    env = OpenEnv(env_cls=names[0], action_cls=names[1])
    assert env.step("guess", {"number": 5}).done


def test_actions_of_ones_own():
    env = OpenEnv(PACKAGE, action_mapper=lambda name, arguments: GuessAction(int(arguments["text"])))
    assert env.step("guess", {"text": "5"}).reward == 1.0
    fields = OpenEnv(PACKAGE, action_cls=GuessAction, action_mapper=lambda name, said: {"number": said["n"]})
    assert fields.step("guess", {"n": 5}).done


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, InvalidInputError, "the package of an environment, or env_cls"),
        ({"env_name": "no_such_env"}, MissingDependencyError, "OpenEnv needs the package 'no_such_env'"),
        ({"env_name": "json"}, InvalidInputError, "with a subpackage server"),
        ({"env_name": PACKAGE, "action_cls": f"{PACKAGE}:Nothing"}, InvalidInputError, "has no class Nothing"),
        ({"env_name": PACKAGE, "action_cls": "Nothing"}, InvalidInputError, "'module:Class'"),
        ({"env_name": PACKAGE, "action_cls": 3}, InvalidInputError, "action_cls: got 3"),
        ({"env_cls": GuessEnvironment}, InvalidInputError, "or action_mapper, beside env_cls"),
    ],
)
def test_mistakes_about_packages(options, error, text):
    with pytest.raises(error, match=text):
        OpenEnv(**options)


def test_an_answer_that_is_no_result_is_refused():
    class Odd(GuessEnvironment):
        def reset(self):
            return "guess"

    with pytest.raises(InvalidInputError, match="an observation, a reward and done"):
        OpenEnv(env_cls=Odd, action_cls=GuessAction).reset()


def test_a_client_needs_an_address(monkeypatch):
    monkeypatch.delenv("OPENENV_BASE_URL", raising=False)
    with pytest.raises(InvalidInputError, match="or OPENENV_BASE_URL"):
        OpenEnvClient()


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def mapper(name, arguments):
    return GuessAction(arguments["number"])


POOL = {"env_name": PACKAGE, "env_kwargs": {"secret": 5}, "action_mapper": mapper}


def test_a_pool_answers_with_dicts(alone):
    pool = EnvPool(3, env_kwargs=POOL)
    first = pool.reset(0)
    assert (first["reward"], first["done"], first["episode_reward"]) == (0.0, False, 0.0)
    wrong = pool.step(0, "guess", {"number": 9})
    assert (json.loads(wrong["observation"])["hint"], wrong["reward"]) == ("lower", -0.25)
    right = pool.step(0, "guess", {"number": 5})
    assert {**right, "observation": ""} == {"observation": "", "reward": 1.0, "done": True, "episode_reward": 0.75}
    assert pool.reset(0)["episode_reward"] == 0.0
    assert len(pool.reset_batch([2, 1])) == 2
    answers = pool.step_batch([2, 0, 1], ["guess"] * 3, [{"number": 5}, {"number": 4}, {"number": 5}])
    assert [answer["reward"] for answer in answers] == [1.0, -0.25, 1.0]
    with pytest.raises(InvalidInputError, match="0 to 2"):
        pool.reset(3)
    with pytest.raises(InvalidInputError, match="tool_names: got '1 of them', allowed: one for each of 2 indices"):
        pool.step_batch([0, 1], ["guess"], [{}, {}])
    before = GuessEnvironment.closed
    pool.close()
    assert GuessEnvironment.closed == before + 3


def test_places_of_a_pool_are_environments(alone):
    pool = EnvPool(2, env_kwargs=POOL)
    first, second = pool.get_adapters(2)
    assert isinstance(first, EnvPoolAdapter)
    assert "guess" in first.reset().observation
    assert first.step("guess", {"number": 4}).reward == -0.25
    assert first.step("guess", {"number": 5}).done
    assert (first.episode_reward, second.episode_reward) == (0.75, 0.0)
    first.reset()
    assert first.episode_reward == 0.0
    failed = first.step("guess", {"number": -1})
    assert (failed.observation, failed.reward, failed.done) == ("Error: ValueError: no negative numbers", 0.0, True)
    never_reset = second.step("guess", {"number": 5})
    assert (never_reset.observation[:6], never_reset.done) == ("Error:", True)
    with pytest.raises(ValueError, match="0 to 2, the size of this pool"):
        pool.get_adapters(3)


def test_the_tool_of_a_place_has_the_advertised_name(alone):
    """Prompts of the existing scripts advertise ``play``, and the pool does not know this name."""
    (adapter,) = EnvPool(1, env_kwargs=POOL).get_adapters(1)
    adapter.reset()
    tools = ToolManager(EnvTool.from_env(adapter))
    assert '"right"' in tools(call("play", number=5))
    play = {"type": "function", "function": {"name": "play", "description": "", "parameters": {}}}
    (named,) = EnvPool(1, env_kwargs={**POOL, "tools": [play]}).get_adapters(1)
    assert named.tools() == [play]
    assert ToolManager(EnvTool.from_env(named)).names() == ["play"]


def test_workers_share_the_places(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    pools = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        pools.append(EnvPool(4, env_kwargs=POOL))
    assert [pool.reset(1) is None for pool in pools] == [True, False]
    collect = EnvPool.reset._collect
    assert "guess" in collect([pool.reset(2) for pool in pools], device_mesh=None)["observation"]
    batches = [pool.reset_batch([3, 0, 1]) for pool in pools]
    assert [[answer is None for answer in batch] for batch in batches] == [[True, False, True], [False, True, False]]
    assert None not in EnvPool.reset_batch._collect(batches, device_mesh=None)
    with pytest.raises(InvalidInputError, match="a place that this process owns"):
        pools[0].get_adapters(2)[1].reset()
