"""A conversation of a random model with an environment, in which everything but the sampled tokens is known.

Sampling stops at even tokens (the server allows 256 of them), so each turn has some odd tokens and then an even one.
Each turn counts as a call of the environment's tool.
"""

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import SamplingParams
from twinkle_agentic.envs import Env, EnvTool, StepResult
from twinkle_agentic.tools import ToolManager

TURNS = 3
QUESTION = {"messages": [{"role": "user", "content": "go"}], "user_data": [["id", "q1"]]}


class Counter(Env):
    """Counts its steps; the first has reward 0.5, the second 1.0, and so on."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        self.count += 1
        return StepResult(f"step {self.count}", self.count / 2, self.count >= 2)


def until_an_even_token() -> SamplingParams:
    return SamplingParams(max_tokens=60, seed=1, logprobs=1, stop=list(range(0, 512, 2)))


def calls_every_turn(template: Any) -> Any:
    """Make the template read every text as a call of the tool ``count``, and return it."""
    template.parse_tool_call = lambda text: [{"type": "function", "function": {"name": "count", "arguments": "{}"}}]
    return template


def environment_tool() -> tuple[EnvTool, ToolManager]:
    (tool,) = EnvTool.from_env(Counter())
    return tool, ToolManager([tool])


def check(done: Mapping[str, Any], tool: EnvTool) -> None:
    """Check all that is known about the finished trajectory of one conversation with :class:`Counter`."""
    assert (done["turns"], done["stop_reason"], done["truncated"]) == (TURNS, "max_turns", True)
    roles = [message["role"] for message in done["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    answers = [(message["content"], message["tool_call_id"]) for message in done["messages"][2::2]]
    assert answers == [("step 1", "call00100"), ("step 2", "call00200")]
    assert (tool.episode_reward, tool.done) == (1.5, True)  # 0.5 + 1.0; the calls of the last turn are not run
    learnt = [label for label in done["labels"] if label != -100]
    assert [token % 2 for token in learnt].count(0) == TURNS
    assert learnt[-1] % 2 == 0
    assert learnt == [pairs[0][0] for pairs in done["logprobs"]]
    places = [place for place, label in enumerate(done["labels"]) if label != -100]
    assert learnt == [done["input_ids"][place + 1] for place in places]  # labels are shifted by one
    assert done["user_data"] == QUESTION["user_data"]
