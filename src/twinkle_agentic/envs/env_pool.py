"""A pool of environments, on the workers of a group or in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Tool
from twinkle.environment import read_launch
from twinkle.errors import InvalidInputError
from twinkle.infra import DeviceMesh, driver_function, remote_class, remote_function
from twinkle_agentic.envs.env import Env, StepResult
from twinkle_agentic.envs.open_env import OpenEnv

__all__ = ["EnvPool", "EnvPoolAdapter"]


def _the_owners(results: Sequence[Any], *, device_mesh: DeviceMesh) -> Any:
    """Return the one result that is not None: only the worker that owns the place has an answer."""
    return next(result for result in results if result is not None)


def _all_in_order(results: Sequence[dict[int, StepResult]], *, device_mesh: DeviceMesh) -> dict[int, StepResult]:
    return {place: answer for result in results for place, answer in result.items()}


_by_owner = remote_function(dispatch="all", collect=_the_owners, lazy_collect=False)
_by_owners = remote_function(dispatch="all", collect=_all_in_order, lazy_collect=False)


@remote_class()
class EnvPool:
    """A pool of ``pool_size`` numbered places, each for one environment, which is made when the place is first reset.

    The places are divided among n workers: worker r owns the places r, r + n, r + 2n, … Every call goes to all workers,
    and the owner of the place answers. env_kwargs: the arguments of :class:`OpenEnv`.
    """

    def __init__(
        self,
        pool_size: int = 32,
        device_mesh: DeviceMesh | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if pool_size < 1:
            raise InvalidInputError("pool_size", pool_size, "an integer ≥ 1")
        launch = read_launch()
        self._rank, self._workers = max(0, launch.rank), launch.world_size
        self._size = pool_size
        self._env_kwargs = dict(env_kwargs or {})
        self._envs: dict[int, OpenEnv] = {}

    @_by_owner
    def reset(self, idx: int) -> StepResult | None:
        return self._reset(idx) if self._owns(idx) else None

    @_by_owner
    def step(self, idx: int, tool_name: str, arguments: Mapping[str, Any]) -> StepResult | None:
        return self._env(idx).step(tool_name, arguments) if self._owns(idx) else None

    @_by_owners
    def reset_batch(self, indices: Sequence[int]) -> dict[int, StepResult]:
        """Reset several places and return their results by place."""
        return {idx: self._reset(idx) for idx in indices if self._owns(idx)}

    @_by_owners
    def step_batch(self, actions: Mapping[int, tuple[str, Mapping[str, Any]]]) -> dict[int, StepResult]:
        """Act in several places (a tool's name and arguments for each) and return the results by place."""
        return {idx: self._env(idx).step(*action) for idx, action in actions.items() if self._owns(idx)}

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()

    @driver_function
    def get_adapters(self, n: int) -> list["EnvPoolAdapter"]:
        """Return the first ``n`` places, each as an environment."""
        return [EnvPoolAdapter(self, idx) for idx in range(n)]

    def _owns(self, idx: int) -> bool:
        if not 0 <= idx < self._size:
            raise InvalidInputError("idx", idx, f"0 to {self._size - 1}, the places of this pool")
        return idx % self._workers == self._rank

    def _reset(self, idx: int) -> StepResult:
        if idx not in self._envs:
            self._envs[idx] = OpenEnv(**self._env_kwargs)
        return self._envs[idx].reset()

    def _env(self, idx: int) -> OpenEnv:
        if idx not in self._envs:
            raise InvalidInputError("idx", idx, "the number of an environment that reset() has started")
        return self._envs[idx]


class EnvPoolAdapter(Env):
    """One place of a pool as an environment. ``tools``: the actions, if a model calls them by names of their own."""

    def __init__(self, pool: EnvPool, idx: int, tools: Sequence[Tool] = ()) -> None:
        self._pool = pool
        self._idx = idx
        self._tools = list(tools)
        self.episode_reward = 0.0

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        self.episode_reward = 0.0
        return _answer(self._pool.reset(self._idx), self._idx)

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        result = _answer(self._pool.step(self._idx, tool_name, arguments), self._idx)
        self.episode_reward += result.reward
        return result

    def tools(self) -> list[Tool]:
        return list(self._tools)


def _answer(result: StepResult | None, idx: int) -> StepResult:
    if result is None:  # under torchrun every process has a pool and owns some of its places
        raise InvalidInputError("idx", idx, "a place that this process owns: its rank r, r + n, … with n processes")
    return result
