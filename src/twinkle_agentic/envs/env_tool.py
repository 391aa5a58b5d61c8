"""An environment as a tool: a call is an action, and its answer is the observation after the action."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.data_format import Tool as ToolInfo
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.tools.base import Tool

__all__ = ["EnvTool"]

_ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass
class _Episode:
    """The last result and the total reward of an episode; the tools that one ``from_env`` made share it."""

    last_result: StepResult | None = None
    reward: float = 0.0

    def add(self, result: StepResult) -> None:
        self.last_result = result
        self.reward += result.reward


class EnvTool(Tool):
    """A tool that acts in an environment, which must be reset first. ``parameters``: a JSON schema.

    A call is always passed on to the environment: what an action after the end of an episode does is its decision.
    """

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Act in the environment.",
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.env = env
        self.tool_name = tool_name
        self._description = description
        self._parameters = dict(_ANYTHING if parameters is None else parameters)
        self._episode = _Episode()

    @classmethod
    def from_env(cls, env: Env) -> list["EnvTool"]:
        """Return one tool for each action that the environment names, or one tool ``env_action`` if it names none.

        That one tool answers calls of any name, because a prompt may well advertise another name for the actions.
        """
        tools = [_from_info(env, info) for info in env.tools()]
        if not tools:
            tools = [cls(env)]
            tools[0].answers_any_name = True
        for tool in tools:
            tool._episode = tools[0]._episode
        return tools

    @property
    def last_result(self) -> StepResult | None:
        return self._episode.last_result

    @property
    def done(self) -> bool:
        return self.last_result is not None and self.last_result.done

    @property
    def episode_reward(self) -> float:
        """Return the sum of the rewards of all calls so far, also of other tools that the same ``from_env`` made."""
        return self._episode.reward

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        result = self.env.step(tool_name, arguments)
        self._episode.add(result)
        return result.observation

    def tool_info(self) -> ToolInfo:
        return {
            "type": "function",
            "function": {
                "name": self.tool_name,
                "description": self._description,
                "parameters": self._parameters,
            },
        }


def _from_info(env: Env, info: ToolInfo) -> EnvTool:
    function: Mapping[str, Any] = info["function"]
    return EnvTool(env, function["name"], function.get("description") or "", function.get("parameters"))
