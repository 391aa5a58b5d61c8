"""A client of an environment that runs as a service of the OpenEnv project, through OpenEnv's own library."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from twinkle.data_format import Tool
from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.utils.logger import get_logger
from twinkle_agentic.environment import read_environment
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.openenv_classes import (
    ActionMapper,
    ClassOrName,
    action_class,
    client_class,
    make_action,
    named_class,
    step_result,
)
from twinkle_agentic.tools.base import tool_name as name_of

__all__ = ["OpenEnvClient"]

Handler = Callable[["OpenEnvClient", Mapping[str, Any]], str]

_RUN_PYTHON: Tool = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run a Python program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class OpenEnvClient(Env):
    """An environment on an OpenEnv server: one connection, which is opened by :meth:`reset`, is one session there.

    env_name: the package of the environment, which exports a client class ``…Env`` and a class ``…Action``. env_cls,
    action_cls: these classes, or their names as 'module:Class' or 'module.Class'. Without a client class OpenEnv's
    ``GenericEnvClient`` is used, whose actions are dicts. base_url: the server's address (default: the variable
    OPENENV_BASE_URL). action_mapper: a function from a tool's name and arguments to an action, or to its fields.
    tools: the actions as tools for chat templates; the default is one tool ``run_python(code)``. reset_kwargs: the
    arguments of the server's reset. client_kwargs: further arguments of the client class.

    An action that fails becomes an observation that begins with ``Error:``, and the episode goes on. A reset that fails
    raises the error, because there is no episode then.
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: ClassOrName | None = None,
        base_url: str | None = None,
        action_cls: ClassOrName | None = None,
        action_mapper: ActionMapper | None = None,
        tools: Sequence[Tool] | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 120.0,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        url = base_url or read_environment().openenv_base_url
        if url is None:
            raise InvalidInputError("base_url", base_url, "the address of an OpenEnv server, or OPENENV_BASE_URL")
        self._client_cls = _client_class(env_name, env_cls)
        if action_cls is not None:
            self._action_cls: type | None = named_class(action_cls, "action_cls")
        else:
            self._action_cls = None if env_name is None or action_mapper is not None else action_class(env_name)
        self._mapper = action_mapper
        self._infos = {name_of(info): info for info in ([_RUN_PYTHON] if tools is None else tools)}
        self._handlers: dict[str, Handler] = {}
        self._reset_kwargs = dict(reset_kwargs or {})
        timeouts = {"connect_timeout_s": connect_timeout_s, "message_timeout_s": message_timeout_s}
        self._client_kwargs = {"base_url": url, **timeouts, **(client_kwargs or {})}
        self._client: Any = None
        self.last_result: StepResult | None = None
        self.episode_reward = 0.0

    @property
    def client(self) -> Any:
        """Return OpenEnv's client of the open connection; None before the first reset and after close."""
        return self._client

    def register_tool(self, info: Tool, handler: Handler) -> Self:
        """Add a tool that ``handler(env, arguments)`` answers; it can act with ``env.execute``. Return this object."""
        name = name_of(info)
        if not name:
            raise InvalidInputError("info", info, "the description of a tool, with function.name")
        self._infos[name] = info
        self._handlers[name] = handler
        return self

    def tools(self) -> list[Tool]:
        return list(self._infos.values())

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        self.episode_reward, self.last_result = 0.0, None
        try:
            if self._client is None:
                made = self._client_cls(**self._client_kwargs)
                self._client = made.sync() if hasattr(made, "sync") else made
                if hasattr(self._client, "connect"):
                    self._client.connect()
            self.last_result = step_result(self._client.reset(**self._reset_kwargs))
            return self.last_result
        except Exception:
            self.close()
            raise

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        before = self.episode_reward
        try:
            if tool_name not in self._handlers:
                self.execute(make_action(tool_name, arguments, self._mapper, self._action_cls))
                assert self.last_result is not None
                return self.last_result
            text = self._handlers[tool_name](self, arguments)
            done = self.last_result is not None and self.last_result.done
            self.last_result = StepResult(str(text), self.episode_reward - before, done)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; the model gets the error
            get_logger().debug("action %r failed", tool_name, exc_info=True)
            self.last_result = StepResult(f"Error: {type(error).__name__}: {error}", self.episode_reward - before)
        return self.last_result

    def execute(self, action: Any) -> Any:
        """Send an action and return the result as OpenEnv's client gives it; its reward counts for the episode."""
        if self._client is None:
            raise RuntimeError("the environment has no connection: call reset() first")
        result = self._client.step(action)
        self.last_result = step_result(result)
        self.episode_reward += self.last_result.reward
        return result

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _client_class(env_name: str | None, env_cls: ClassOrName | None) -> Any:
    if env_cls is not None:
        return named_class(env_cls, "env_cls")
    if env_name is not None:
        return client_class(env_name)
    require("openenv", "OpenEnvClient")
    from openenv.core import GenericEnvClient

    return GenericEnvClient
