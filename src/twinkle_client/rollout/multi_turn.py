"""Conversations with tools: the model is sampled on the server, tools run in this process.

Each round samples all unfinished conversations in one request. A conversation ends when the model calls no tool, when
its answer is cut off by ``max_tokens``, or when it reaches a limit of turns or tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinkle_client.data_format import sampling_fields
from twinkle_client.errors import invalid
from twinkle_client.protocol.sampling import SampledSequenceModel, SampleResponseModel
from twinkle_client.rollout.bridge import IGNORE, BridgeTemplate, extend_with_bridge

__all__ = ["ClientMultiTurnRollout", "RolloutTemplate", "SamplesFeatures"]

Feature = dict[str, Any]
ToolManager = Callable[[Mapping[str, Any]], str]
Params = dict[str, Any]


class SamplesFeatures(Protocol):
    def sample(self, inputs: Any, sampling_params: Any = None) -> list[SampleResponseModel]: ...


class RolloutTemplate(BridgeTemplate, Protocol):
    def encode(self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False) -> Feature: ...

    def parse_tool_call(self, text: str) -> list[Any]: ...


@dataclass
class _Conversation:
    """The state of one trajectory during a rollout."""

    index: int
    given: Mapping[str, Any]
    feature: Feature
    tools: ToolManager | None
    logprobs: list[Any] = field(default_factory=list)
    has_logprobs: bool = False
    turns: int = 0
    stop_reason: str | None = None
    truncated: bool = False
    over: bool = False

    def result(self) -> Feature:
        labels = self.feature.get("labels")
        if self.has_logprobs and labels is not None:
            learnt = sum(1 for label in labels if label != IGNORE)
            if learnt != len(self.logprobs):
                raise RuntimeError(
                    f"trajectory {self.index}: {len(self.logprobs)} log-probabilities for {learnt} sampled tokens"
                )
        return {
            **self.given,
            **self.feature,
            "logprobs": self.logprobs if self.has_logprobs else None,
            "turns": self.turns,
            "stop_reason": self.stop_reason,
            "truncated": self.truncated,
        }


class ClientMultiTurnRollout:
    """Conversations of several turns over a server's sampler.

    template: a template of the library in this process; it encodes trajectories and parses tool calls. tool_manager: a
    function from a tool call to its answer. A trajectory has at most ``max_turns`` turns of the model; it is stopped
    when it has ``max_trajectory_tokens`` tokens or more. The message of a tool carries the id of its call.
    """

    def __init__(
        self,
        sampler: SamplesFeatures,
        template: RolloutTemplate,
        tool_manager: ToolManager | None = None,
        sampling_params: object = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
    ) -> None:
        if template is None:
            raise invalid("template", None, "a template of the library")
        if max_turns < 1:
            raise invalid("max_turns", max_turns, "an integer ≥ 1")
        if max_trajectory_tokens is not None and max_trajectory_tokens < 1:
            raise invalid("max_trajectory_tokens", max_trajectory_tokens, "an integer ≥ 1, or None")
        self.sampler = sampler
        self.template = template
        self.tool_manager = tool_manager
        self.sampling_params = _params(sampling_params)
        self.max_turns = max_turns
        self.max_trajectory_tokens = max_trajectory_tokens

    def __call__(
        self,
        trajectories: list[Mapping[str, Any]],
        *,
        sampling_params: object = None,
        tool_manager: ToolManager | Sequence[ToolManager] | None = None,
    ) -> list[Feature]:
        """Return the trajectories with tokens, labels, messages, logprobs, turns, stop_reason and truncated.

        tool_manager: one for this call instead of the constructor's, or one for each trajectory.
        """
        if not isinstance(trajectories, list):
            raise TypeError(f"trajectories: got a {type(trajectories).__name__}, allowed: a list")
        params = self.sampling_params if sampling_params is None else _params(sampling_params)
        managers = self._managers(tool_manager, len(trajectories))
        running = [
            _Conversation(index, given, self._encoded(given), managers[index])
            for index, given in enumerate(trajectories)
        ]
        for _ in range(self.max_turns):
            live = [conversation for conversation in running if not conversation.over]
            if not live:
                break
            self._round(live, params)
        return [conversation.result() for conversation in running]

    rollout = __call__

    def _round(self, live: list[_Conversation], params: Params) -> None:
        responses = self.sampler.sample([conversation.feature for conversation in live], sampling_params=params)
        for position, (conversation, response) in enumerate(zip(live, responses, strict=True)):
            self._take(conversation, response.sequences[0], position)
            if not conversation.over:
                self._answer(conversation, response.sequences[0])

    def _take(self, conversation: _Conversation, sequence: SampledSequenceModel, position: int) -> None:
        feature = sequence.new_input_feature
        if feature is None or "input_ids" not in feature:
            raise RuntimeError(
                f"batch index {position} (trajectory {conversation.index}): the sampler returned no new_input_feature"
            )
        conversation.feature = dict(feature)
        conversation.turns += 1
        conversation.stop_reason = sequence.stop_reason
        if sequence.logprobs is not None:
            if len(sequence.logprobs) != len(sequence.tokens):
                raise RuntimeError(
                    f"batch index {position} (trajectory {conversation.index}): {len(sequence.logprobs)} "
                    f"log-probabilities for {len(sequence.tokens)} tokens"
                )
            conversation.logprobs += sequence.logprobs
            conversation.has_logprobs = True
        conversation.over = sequence.stop_reason == "length"
        self._check_length(conversation)

    def _check_length(self, conversation: _Conversation) -> None:
        limit = self.max_trajectory_tokens
        if limit is not None and len(conversation.feature["input_ids"]) >= limit:
            conversation.over = conversation.truncated = True

    def _answer(self, conversation: _Conversation, sequence: SampledSequenceModel) -> None:
        """Run the tools that the model called and append their answers; without calls the conversation is over."""
        calls = self._identified(conversation, self._calls(conversation, sequence))
        if not calls:
            conversation.over = True
            return
        if conversation.turns >= self.max_turns:
            conversation.over = conversation.truncated = True
            conversation.stop_reason = "max_turns"
            return
        if conversation.tools is None:
            raise ValueError(f"trajectory {conversation.index} produced tool_calls but no tool_manager was given")
        answers = [
            {"role": "tool", "content": str(conversation.tools(call)), "tool_call_id": str(call["id"])}
            for call in calls
        ]
        grown = extend_with_bridge(conversation.feature, answers, self.template)
        if grown is None:
            conversation.over = conversation.truncated = True
            return
        conversation.feature = grown
        self._check_length(conversation)

    def _calls(self, conversation: _Conversation, sequence: SampledSequenceModel) -> list[Any]:
        messages = conversation.feature.get("messages") or [{}]
        return messages[-1].get("tool_calls") or self.template.parse_tool_call(sequence.decoded or "")

    def _identified(self, conversation: _Conversation, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the calls, each with an id, and put the ids into the assistant's message if it holds the calls.

        Most models write no ids. The ids made here have the nine letters and digits that Mistral's chat template needs.
        """
        made = [
            {**call, "id": call.get("id") or f"call{conversation.turns:03d}{number:02d}"}
            for number, call in enumerate(calls)
        ]
        messages = conversation.feature.get("messages") or [{}]
        if made and messages[-1].get("tool_calls"):
            conversation.feature["messages"] = [*messages[:-1], {**messages[-1], "tool_calls": made}]
        return made

    def _encoded(self, given: Mapping[str, Any]) -> Feature:
        feature = dict(self.template.encode(given, add_generation_prompt=True))
        feature.setdefault("messages", given["messages"])
        return feature

    def _managers(self, given: ToolManager | Sequence[ToolManager] | None, count: int) -> Sequence[ToolManager | None]:
        if given is None:
            return [self.tool_manager] * count
        if not isinstance(given, Sequence):
            return [given] * count
        if len(given) != count:
            raise invalid("tool_manager", f"{len(given)} of them", f"one, or one for each of {count} trajectories")
        return given


def _params(sampling_params: object) -> Params:
    params = {} if sampling_params is None else sampling_fields(sampling_params)
    if params.get("num_samples", 1) != 1:
        raise invalid("num_samples", params["num_samples"], "1: a conversation goes on with one sample")
    return params
