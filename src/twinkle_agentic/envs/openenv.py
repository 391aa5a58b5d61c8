"""Environments of the OpenEnv project in this process, and pools of them on the workers of a group.

:class:`~twinkle_agentic.envs.openenv_client.OpenEnvClient` uses an environment that runs as a service.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Tool
from twinkle.environment import read_launch
from twinkle.errors import InvalidInputError
from twinkle.infra import DeviceMesh, driver_function, remote_class, remote_function
from twinkle.utils.logger import get_logger
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.openenv_classes import (
    ActionMapper,
    ClassOrName,
    action_class,
    environment_class,
    make_action,
    named_class,
    step_result,
)
from twinkle_agentic.envs.openenv_client import OpenEnvClient

__all__ = ["EnvPool", "EnvPoolAdapter", "OpenEnv", "OpenEnvClient"]


class OpenEnv(Env):
    """An environment of the OpenEnv project that runs in this process.

    env_name: the package of an environment. Its subpackage ``server`` has a class ``…Environment`` in a module named
    ``…_environment`` or ``…_env``, and the package exports a class ``…Action``. env_cls, action_cls: these classes, or
    their names as 'module:Class' or 'module.Class'. env_kwargs: the arguments of the environment's class.
    action_mapper: a function from a tool's name and arguments to an action, or to the fields of ``action_cls``; without
    one the arguments are the fields. tools: the actions as tools for chat templates, if they have names of their own.
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: ClassOrName | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        action_cls: ClassOrName | None = None,
        action_mapper: ActionMapper | None = None,
        *,
        tools: Sequence[Tool] = (),
    ) -> None:
        if env_name is None and env_cls is None:
            raise InvalidInputError("env_name", env_name, "the package of an environment, or env_cls instead")
        made = environment_class(str(env_name)) if env_cls is None else named_class(env_cls, "env_cls")
        if action_cls is not None:
            self._action_cls: type | None = named_class(action_cls, "action_cls")
        elif action_mapper is not None:
            self._action_cls = None
        elif env_name is not None:
            self._action_cls = action_class(env_name)
        else:
            raise InvalidInputError("action_cls", None, "a class, or action_mapper, beside env_cls")
        self._mapper = action_mapper
        self._tools = list(tools)
        self._env = made(**(env_kwargs or {}))

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        return step_result(self._env.reset())

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        return step_result(self._env.step(make_action(tool_name, arguments, self._mapper, self._action_cls)))

    def tools(self) -> list[Tool]:
        return list(self._tools)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


# --- pools ------------------------------------------------------------------------------------------------------------

Answer = dict[str, Any]  # observation, reward, done, episode_reward


def _the_owners(results: Sequence[Any], *, device_mesh: DeviceMesh) -> Any:
    """Return the one result that is not None: only the worker that owns the place has an answer."""
    return next(result for result in results if result is not None)


def _each_owners(results: Sequence[list[Answer | None]], *, device_mesh: DeviceMesh) -> list[Answer]:
    """Return for each place the answer of the worker that owns it."""
    return [next(answer for answer in answers if answer is not None) for answers in zip(*results, strict=True)]


_by_owner = remote_function(dispatch="all", collect=_the_owners, lazy_collect=False)
_by_owners = remote_function(dispatch="all", collect=_each_owners, lazy_collect=False)
_by_first = remote_function(dispatch="all", collect="first", lazy_collect=False)


@remote_class()
class EnvPool:
    """A pool of ``pool_size`` numbered places, each for one environment, which is made when the place is first reset.

    The places are divided among n workers: worker r owns the places r, r + n, r + 2n, … Every call goes to all workers,
    and the owner of the place answers with a dict: ``observation``, ``reward``, ``done`` and ``episode_reward``, the
    sum of the rewards since the last reset. env_kwargs: the arguments of :class:`OpenEnv`.
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
        self._rewards: dict[int, float] = {}

    @_by_owner
    def reset(self, idx: int) -> Answer | None:
        return self._reset(idx) if self._owns(idx) else None

    @_by_owner
    def step(self, idx: int, tool_name: str, arguments: Mapping[str, Any]) -> Answer | None:
        return self._step(idx, tool_name, arguments) if self._owns(idx) else None

    @_by_owners
    def reset_batch(self, indices: Sequence[int]) -> list[Answer | None]:
        """Reset several places and return their answers in the same order."""
        return [self._reset(idx) if self._owns(idx) else None for idx in indices]

    @_by_owners
    def step_batch(
        self, indices: Sequence[int], tool_names: Sequence[str], arguments_list: Sequence[Mapping[str, Any]]
    ) -> list[Answer | None]:
        """Act in several places, with one tool's name and arguments for each; return their answers in that order."""
        for name, given in (("tool_names", tool_names), ("arguments_list", arguments_list)):
            if len(given) != len(indices):
                raise InvalidInputError(name, f"{len(given)} of them", f"one for each of {len(indices)} indices")
        actions = zip(indices, tool_names, arguments_list, strict=True)
        return [self._step(idx, name, given) if self._owns(idx) else None for idx, name, given in actions]

    @_by_first
    def tools(self) -> list[Tool]:
        """Return the actions of the environments as tools: those of the argument ``tools`` in ``env_kwargs``."""
        return list(self._env_kwargs.get("tools") or ())

    @_by_first
    def size(self) -> int:
        return self._size

    @_by_first
    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()
        self._rewards.clear()

    @driver_function
    def get_adapters(self, n: int) -> list["EnvPoolAdapter"]:
        """Return the first ``n`` places, each as an environment."""
        size = self.size()
        if not 0 <= n <= size:
            raise InvalidInputError("n", n, f"0 to {size}, the size of this pool")
        tools = self.tools()
        return [EnvPoolAdapter(self, idx, tools) for idx in range(n)]

    def _owns(self, idx: int) -> bool:
        if not 0 <= idx < self._size:
            raise InvalidInputError("idx", idx, f"0 to {self._size - 1}, the places of this pool")
        return idx % self._workers == self._rank

    def _reset(self, idx: int) -> Answer:
        if idx not in self._envs:
            self._envs[idx] = OpenEnv(**self._env_kwargs)
        result = self._envs[idx].reset()
        self._rewards[idx] = 0.0
        return self._answer(idx, result)

    def _step(self, idx: int, tool_name: str, arguments: Mapping[str, Any]) -> Answer:
        if idx not in self._envs:
            raise InvalidInputError("idx", idx, "the number of an environment that reset() has started")
        result = self._envs[idx].step(tool_name, arguments)
        self._rewards[idx] += result.reward
        return self._answer(idx, result)

    def _answer(self, idx: int, result: StepResult) -> Answer:
        return {
            "observation": result.observation,
            "reward": result.reward,
            "done": result.done,
            "episode_reward": self._rewards[idx],
        }


class EnvPoolAdapter(Env):
    """One place of a pool as an environment. ``tools``: the actions, if a model calls them by names of their own.

    A step that fails becomes an observation that begins with ``Error:`` and ends the episode.
    """

    def __init__(self, pool: EnvPool, idx: int, tools: Sequence[Tool] = ()) -> None:
        self._pool = pool
        self._idx = idx
        self._tools = list(tools)
        self.episode_reward = 0.0

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        return self._result(self._pool.reset(self._idx))

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        try:
            return self._result(self._pool.step(self._idx, tool_name, arguments))
        except Exception as error:  # noqa: BLE001 - environments and workers may raise anything; the rollout goes on
            get_logger().warning("environment %d of the pool failed: %s", self._idx, error, exc_info=True)
            return StepResult(f"Error: {type(error).__name__}: {error}", done=True)

    def tools(self) -> list[Tool]:
        return list(self._tools)

    def _result(self, answer: Answer | None) -> StepResult:
        if answer is None:  # under torchrun every process has a pool and owns some of its places
            allowed = "a place that this process owns: its rank r, r + n, … with n processes"
            raise InvalidInputError("idx", self._idx, allowed)
        self.episode_reward = answer["episode_reward"]
        return StepResult(answer["observation"], answer["reward"], answer["done"])
