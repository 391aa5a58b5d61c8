"""Agents on workers: the places of a pool are spread over them, and a rollout runs on the first of them."""

import pytest

from tests.clients.twinkle.test_client_sampler import LettersTemplate, Scripted, trajectory, upper
from twinkle.errors import InvalidInputError
from twinkle_agentic.envs import EnvPool, EnvPoolAdapter, EnvTool
from twinkle_agentic.rollout import MultiTurnRollout

pytestmark = pytest.mark.ray


def test_places_are_spread_over_the_workers(program):
    play = {"type": "function", "function": {"name": "play", "description": "", "parameters": {}}}
    pool = EnvPool(4, env_kwargs={"env_name": "tests.on_ray.guess_env", "tools": [play]}, remote_group="work")
    adapters = pool.get_adapters(3)
    assert all(isinstance(adapter, EnvPoolAdapter) for adapter in adapters)
    assert [adapter.reset().observation for adapter in adapters] == ["rank 0", "rank 1", "rank 0"]
    (tool,) = EnvTool.from_env(adapters[1])
    assert tool.tool_name == "play"
    assert tool("play", {"number": 5}) == "right"
    assert (tool.done, adapters[1].episode_reward, adapters[0].episode_reward) == (True, 1.0, 0.0)
    answers = pool.step_batch([2, 0, 1], ["play"] * 3, [{"number": 5}, {"number": 5}, {"number": 4}])
    assert [(answer["reward"], answer["episode_reward"]) for answer in answers] == [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
    assert [answer["observation"] for answer in pool.reset_batch([1, 0])] == ["rank 1", "rank 0"]
    failed = adapters[0].step("play", {"word": 5})
    assert (failed.observation[:6], failed.done) == ("Error:", True)
    with pytest.raises(ValueError, match="0 to 4, the size of this pool"):
        pool.get_adapters(5)
    with pytest.raises(InvalidInputError, match="0 to 3"):
        pool.reset(9)
    pool.close()


def test_a_rollout_runs_on_the_first_worker(program):
    sampler = Scripted(["!up", "done"], ["at once"])
    rollout = MultiTurnRollout(sampler, LettersTemplate(), upper, max_turns=3, remote_group="work")
    first, second = rollout([trajectory(0), trajectory(1)], global_step=1)
    assert "".join(map(chr, first["input_ids"])) == "<u>go<a>!up<t>UP<a>done"
    assert (first["turns"], second["turns"], first["stop_reason"]) == (2, 1, "stop")
