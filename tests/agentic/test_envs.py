"""Environments: used as tools, loaded from packages of the OpenEnv project, and run in pools."""

import dataclasses
import sys
from types import ModuleType

import pytest

from twinkle.errors import InvalidInputError, MissingDependencyError, UnsupportedError
from twinkle_agentic.envs import Env, EnvPool, EnvPoolAdapter, EnvTool, OpenEnv, StepResult
from twinkle_agentic.tools import ToolManager


class Counter(Env):
    """Counts to three; each step has reward 0.5."""

    def __init__(self, *names):
        self.names = names
        self.count = 0
        self.closed = False

    def reset(self, trajectory=None):
        self.count = 0
        return StepResult("0")

    def step(self, tool_name, arguments):
        self.count += arguments.get("by", 1)
        return StepResult(f"{tool_name}: {self.count}", 0.5, self.count >= 3)

    def tools(self):
        return [{"type": "function", "function": {"name": name, "description": "counts"}} for name in self.names]

    def close(self):
        self.closed = True


def test_an_environment_is_a_tool():
    tool = EnvTool(Counter(), "count", "Counts.", {"type": "object", "properties": {"by": {"type": "integer"}}})
    manager = ToolManager([tool])
    assert tool.tool_info()["function"]["parameters"]["properties"] == {"by": {"type": "integer"}}
    assert (tool.last_result, tool.done, tool.episode_reward) == (None, False, 0.0)
    assert manager({"function": {"name": "count", "arguments": {"by": 2}}}) == "count: 2"
    assert (tool.done, tool.episode_reward) == (False, 0.5)
    assert tool("count", {}) == "count: 3"
    assert (tool.done, tool.episode_reward, tool.last_result.observation) == (True, 1.0, "count: 3")
    assert tool("count", {}) == "Error: the episode is over"
    assert tool.episode_reward == 1.0


def test_one_tool_for_each_action_and_one_episode_for_all():
    first, second = EnvTool.from_env(Counter("up", "more"))
    assert (first.tool_name, second.tool_name) == ("up", "more")
    first("up", {})
    second("more", {"by": 2})
    assert first.done
    assert first.episode_reward == second.episode_reward == 1.0
    (only,) = EnvTool.from_env(Counter())
    assert only.tool_name == "env_action"


def test_an_environment_is_closed_at_the_end():
    with Counter() as env:
        assert env.reset().observation == "0"
        with pytest.raises(UnsupportedError, match="Counter: evaluate"):
            env.evaluate({})
    assert env.closed


# --- packages in the layout of the OpenEnv project --------------------------------------------------------------------


@dataclasses.dataclass
class GuessAction:
    number: int


@dataclasses.dataclass
class Seen:
    hint: str
    reward: float | None = None
    done: bool = False


@dataclasses.dataclass
class Result:
    observation: object
    reward: float | None
    done: bool


class GuessEnv:
    """An environment in which ``secret`` must be guessed. If it is a service, ``sync`` returns the blocking client."""

    closed = 0

    def __init__(self, secret=5, plain=False):
        self.secret, self.plain = secret, plain

    def reset(self):
        return Seen("guess") if self.plain else Result("guess", None, False)

    def step(self, action):
        assert isinstance(action, GuessAction)
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        seen = Seen(hint, float(right), right)
        return seen if self.plain else Result(Seen(hint), float(right), right)

    def close(self):
        GuessEnv.closed += 1


class GuessClientEnv:
    def __init__(self, **options):
        self.options = options

    def sync(self):
        return GuessEnv(**self.options)


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("guess_env")
    module.GuessEnv, module.GuessAction = GuessEnv, GuessAction
    monkeypatch.setitem(sys.modules, "guess_env", module)
    return module


@pytest.mark.parametrize("plain", [True, False])
def test_a_package_by_its_name(package, plain):
    env = OpenEnv("guess_env", env_kwargs={"secret": 7, "plain": plain})
    assert "guess" in env.reset().observation
    result = env.step("guess", {"number": 3})
    assert '"hint": "higher"' in result.observation
    assert (result.reward, result.done) == (0.0, False)
    assert env.step("guess", {"number": 7}).done
    before = GuessEnv.closed
    env.close()
    assert GuessEnv.closed == before + 1


def test_actions_of_ones_own(package):
    env = OpenEnv("guess_env", action_mapper=lambda name, arguments: GuessAction(int(arguments["text"])))
    assert env.step("guess", {"text": "5"}).reward == 1.0
    fields = OpenEnv(env_cls=GuessEnv, action_cls=GuessAction, action_mapper=lambda name, said: {"number": said["n"]})
    assert fields.step("guess", {"n": 5}).done


def test_a_client_that_is_asynchronous(package):
    env = OpenEnv(env_cls=GuessClientEnv, env_kwargs={"secret": 2}, action_cls=GuessAction)
    assert env.step("guess", {"number": 2}).done


def test_mistakes_about_packages(package):
    with pytest.raises(InvalidInputError, match="either env_name or env_cls"):
        OpenEnv()
    with pytest.raises(MissingDependencyError, match="OpenEnv needs the package 'no_such_env'"):
        OpenEnv("no_such_env")
    package.OtherEnv = Counter
    with pytest.raises(InvalidInputError, match="GuessEnv, OtherEnv"):
        OpenEnv("guess_env")

    class Odd(GuessEnv):
        def reset(self):
            return "guess"

    with pytest.raises(InvalidInputError, match="an observation, a reward and done"):
        OpenEnv(env_cls=Odd, action_cls=GuessAction).reset()


# --- pools ------------------------------------------------------------------------------------------------------------


def test_a_pool_has_many(package, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    pool = EnvPool(3, env_kwargs={"env_name": "guess_env"})
    first, second = pool.get_adapters(2)
    assert isinstance(first, EnvPoolAdapter)
    assert first.reset().observation == "guess"
    with pytest.raises(InvalidInputError, match="an environment that reset"):
        second.step("guess", {"number": 5})
    assert first.step("guess", {"number": 5}).done
    assert first.episode_reward == 1.0
    first.reset()
    assert first.episode_reward == 0.0
    assert list(pool.reset_batch([1, 2])) == [1, 2]
    results = pool.step_batch({1: ("guess", {"number": 5}), 2: ("guess", {"number": 9})})
    assert [result.reward for result in results.values()] == [1.0, 0.0]
    with pytest.raises(InvalidInputError, match="0 to 2"):
        pool.reset(3)
    before = GuessEnv.closed
    pool.close()
    assert GuessEnv.closed == before + 3


def test_workers_share_the_places(package, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    pools = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        pools.append(EnvPool(4, env_kwargs={"env_name": "guess_env"}))
    assert [pool.reset(1) is None for pool in pools] == [True, False]
    collect = EnvPool.reset._collect
    assert collect([pool.reset(2) for pool in pools], device_mesh=None).observation == "guess"
    batches = [pool.reset_batch([0, 1, 2, 3]) for pool in pools]
    assert [list(batch) for batch in batches] == [[0, 2], [1, 3]]
    assert set(EnvPool.reset_batch._collect(batches, device_mesh=None)) == {0, 1, 2, 3}
    with pytest.raises(InvalidInputError, match="a place that this process owns"):
        pools[0].get_adapters(2)[1].reset()


def test_actions_of_a_pool_may_have_names(package):
    pool = EnvPool(1, env_kwargs={"env_name": "guess_env"})
    play = {"type": "function", "function": {"name": "play", "description": "", "parameters": {}}}
    (tool,) = EnvTool.from_env(EnvPoolAdapter(pool, 0, [play]))
    assert tool.tool_name == "play"
