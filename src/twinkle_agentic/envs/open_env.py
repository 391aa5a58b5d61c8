"""Environments of the OpenEnv project: a client of an environment that runs as a service, or one in this process.

An OpenEnv environment has ``reset()`` and ``step(action)``. Their result either has an observation, a reward and
``done``, or is itself the observation, with the attributes ``reward`` and ``done``. Asynchronous clients have a method
``sync()``, which returns a synchronous client; that one is used.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle_agentic.envs.env import Env, StepResult

__all__ = ["OpenEnv"]

ActionMapper = Callable[[str, Mapping[str, Any]], Any]


@runtime_checkable
class _Asynchronous(Protocol):
    def sync(self) -> Any: ...


@runtime_checkable
class _Result(Protocol):
    observation: Any
    reward: float | None
    done: bool


@runtime_checkable
class _Observation(Protocol):
    reward: float | None
    done: bool


@runtime_checkable
class _Model(Protocol):
    """A pydantic model."""

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> Any: ...


class OpenEnv(Env):
    """An environment of the OpenEnv project.

    ``env_name``: the package of an environment, which has one class named ``…Env`` (or ``…Environment``) and one named
    ``…Action``; or give the classes with ``env_cls`` and ``action_cls``. ``env_kwargs``: the arguments of the
    environment's class, most often the ``base_url`` of a service. ``action_mapper``: a function from a tool's name and
    arguments to an action or to its fields; without one the arguments are the fields.
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: type | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        action_cls: type | None = None,
        action_mapper: ActionMapper | None = None,
    ) -> None:
        if (env_name is None) == (env_cls is None):
            raise InvalidInputError("env_name", env_name, "either env_name or env_cls")
        package = None if env_name is None else _package(env_name)
        if package is not None:
            env_cls = _only_class(package, ("Env", "Environment"), "env_cls")
            if action_cls is None and action_mapper is None:
                action_cls = _only_class(package, ("Action",), "action_cls")
        assert env_cls is not None
        self._action_cls = action_cls
        self._mapper = action_mapper
        made = env_cls(**(env_kwargs or {}))
        self._env = made.sync() if isinstance(made, _Asynchronous) else made

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        return _step_result(self._env.reset())

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        return _step_result(self._env.step(self._action(tool_name, arguments)))

    def close(self) -> None:
        if isinstance(self._env, _Closable):
            self._env.close()

    def _action(self, tool_name: str, arguments: Mapping[str, Any]) -> Any:
        action = arguments if self._mapper is None else self._mapper(tool_name, arguments)
        if self._action_cls is None or not isinstance(action, Mapping):
            return action
        return self._action_cls(**action)


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(name, None, "OpenEnv") from error


def _only_class(package: ModuleType, endings: tuple[str, ...], option: str) -> type:
    classes = {name: value for name, value in vars(package).items() if isclass(value) and name.endswith(endings)}
    if len(set(classes.values())) != 1:
        found = ", ".join(sorted(classes)) or "none"
        raise InvalidInputError(option, None, f"a class of {package.__name__}, which must have one but has: {found}")
    return next(iter(classes.values()))


def _step_result(result: Any) -> StepResult:
    if isinstance(result, _Result):
        observation = result.observation
    elif isinstance(result, _Observation):
        observation = result
    else:
        raise InvalidInputError("result of the environment", result, "an observation, a reward and done")
    return StepResult(_text(observation), float(result.reward or 0.0), bool(result.done), {"observation": observation})


def _text(observation: Any) -> str:
    """Return an observation as the text that a model reads: a text unchanged, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, _Model):
        observation = observation.model_dump(mode="json")
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        observation = dataclasses.asdict(observation)
    return json.dumps(observation, ensure_ascii=False, default=str)
