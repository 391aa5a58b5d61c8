"""Conversations with tools over a sampler of the library in this process: the client's rollout, with traces."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from twinkle.data_format import SampleResponse
from twinkle.errors import InvalidInputError
from twinkle_client.rollout import ClientMultiTurnRollout

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["MultiTurnRollout", "SamplesPrompts"]

Trajectory = dict[str, Any]
Tools = Callable[[Mapping[str, Any]], str]

_TRACED = ("messages", "user_data", "turns", "stop_reason", "truncated", "success")


class SamplesPrompts(Protocol):
    """A sampler of the library: LocalSampler, vLLMSampler."""

    def sample(self, inputs: Any, sampling_params: Any = ..., adapter_name: Any = ...) -> list[SampleResponse]: ...


@dataclass(frozen=True)
class _OneAdapter:
    """A sampler that always samples with the same adapter."""

    sampler: SamplesPrompts
    adapter_name: str

    def sample(self, inputs: Any, sampling_params: Any = None) -> Any:
        return self.sampler.sample(inputs, sampling_params, self.adapter_name)


class MultiTurnRollout:
    """Conversations of several turns. Each round samples all unfinished conversations in one call.

    A conversation ends when the model calls no tool, when its answer is cut off by ``max_tokens``, or when it has
    ``max_turns`` turns or ``max_trajectory_tokens`` tokens.

    tool_manager: a function from a tool call to its answer. adapter_name: the adapter to sample with; "" is the base
    model. success_callback: returns whether a finished trajectory succeeded; the answer is stored under the key
    ``success``. trace_dir: finished conversations are appended there as JSON lines, one file for each ``global_step``.
    trace_callback: is called with each such line as a dict.
    """

    def __init__(
        self,
        sampler: SamplesPrompts,
        template: "Template",
        tool_manager: Tools | None = None,
        sampling_params: object = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[Mapping[str, Any]], None] | None = None,
        success_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        *,
        adapter_name: str = "",
    ) -> None:
        if template is not None and template.truncation_strategy == "split":
            raise InvalidInputError("truncation_strategy", "split", "another one: a conversation must stay one row")
        self._rounds = ClientMultiTurnRollout(
            cast("Any", _OneAdapter(sampler, adapter_name)),
            cast("Any", template),
            tool_manager,
            sampling_params,
            max_turns,
            max_trajectory_tokens,
        )
        self._trace_dir = None if trace_dir is None else Path(trace_dir)
        self._trace_callback = trace_callback
        self._success_callback = success_callback

    def __call__(
        self,
        trajectories: list[Mapping[str, Any]],
        *,
        sampling_params: object = None,
        tool_manager: Tools | Sequence[Tools] | None = None,
        global_step: int | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories, in order, with the final feature (tokens, labels, messages) and ``logprobs`` (or
        None), ``turns``, ``stop_reason`` and ``truncated``.

        tool_manager: one for this call instead of the constructor's, or one for each trajectory. global_step: a number
        for the trace.
        """
        done = self._rounds(trajectories, sampling_params=sampling_params, tool_manager=tool_manager)
        if self._success_callback is not None:
            done = [{**each, "success": bool(self._success_callback(each))} for each in done]
        self._trace(done, global_step)
        return done

    def _trace(self, done: Sequence[Mapping[str, Any]], global_step: int | None) -> None:
        if self._trace_dir is None and self._trace_callback is None:
            return
        lines = [
            {"global_step": global_step, **{name: each[name] for name in _TRACED if name in each}} for each in done
        ]
        if self._trace_callback is not None:
            for line in lines:
                self._trace_callback(line)
        if self._trace_dir is not None:
            self._trace_dir.mkdir(parents=True, exist_ok=True)
            name = "rollouts" if global_step is None else f"step-{global_step}"
            with (self._trace_dir / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
