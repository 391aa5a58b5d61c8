"""A pool of environments on workers: its places are spread over the workers, and the driver can use all of them."""

import pytest

from twinkle.errors import InvalidInputError
from twinkle_agentic.envs import EnvPool, EnvPoolAdapter, EnvTool

pytestmark = pytest.mark.ray


def test_places_are_spread_over_the_workers(program):
    pool = EnvPool(4, env_kwargs={"env_name": "tests.on_ray.guess_env"}, remote_group="work")
    adapters = pool.get_adapters(3)
    assert all(isinstance(adapter, EnvPoolAdapter) for adapter in adapters)
    assert [adapter.reset().observation for adapter in adapters] == ["rank 0", "rank 1", "rank 0"]
    (tool,) = EnvTool.from_env(adapters[1])
    assert tool("env_action", {"number": 5}) == "right"
    assert (tool.done, adapters[1].episode_reward, adapters[0].episode_reward) == (True, 1.0, 0.0)
    results = pool.step_batch({0: ("guess", {"number": 5}), 1: ("guess", {"number": 4})})
    assert {place: result.reward for place, result in results.items()} == {0: 1.0, 1: 0.0}
    with pytest.raises(InvalidInputError, match="0 to 3"):
        pool.reset(9)
    pool.close()
