"""Conversations with tools over a sampler of the library: the client's rounds, with traces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.infra import remote_class, remote_function
from twinkle_agentic.rollout.base import Rollout, Tools, Trajectory, made_trace_dir, managers_for, write_traces
from twinkle_agentic.rollout.traces import TraceWriter
from twinkle_client.rollout import ClientMultiTurnRollout

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["MultiTurnRollout", "SamplesPrompts"]


class SamplesPrompts(Protocol):
    """A sampler of the library: LocalSampler, vLLMSampler, or any class with this method."""

    def sample(self, inputs: Any, sampling_params: Any = ..., **kwargs: Any) -> list[SampleResponse]: ...


@dataclass(frozen=True)
class _FullBatches:
    """A sampler that always samples with the same adapter, and gives each data rank at least one input.

    Fewer inputs than the sampler's mesh has data ranks are filled up with copies of the last one; what is sampled for
    the copies is dropped.
    """

    sampler: SamplesPrompts
    adapter_name: str

    def sample(self, inputs: list[Any], sampling_params: Any = None) -> list[SampleResponse]:
        mesh = getattr(self.sampler, "device_mesh", None)
        ranks = 1 if mesh is None else mesh.data_world_size
        filled = [*inputs, *[inputs[-1]] * max(0, ranks - len(inputs))]
        params = SamplingParams.from_dict(sampling_params) if sampling_params else None
        chosen = {"adapter_name": self.adapter_name} if self.adapter_name else {}
        return self.sampler.sample(filled, sampling_params=params, **chosen)[: len(inputs)]


@remote_class(execute="first")
class MultiTurnRollout(Rollout):
    """Conversations of several turns. Each turn samples all unfinished conversations in one call.

    A conversation ends when the model calls no tool, when its answer is cut off by ``max_tokens`` (stop_reason
    ``length``), when it has ``max_trajectory_tokens`` tokens, when the answers of tools do not fit into the template's
    ``max_length``, or after ``max_turns`` turns (stop_reason ``max_turns``; the last calls are not run). In the last
    three cases it is ``truncated``.

    tool_manager: a :class:`~twinkle_agentic.tools.ToolManager`, or a function from a tool call to its answer.
    trace_dir, trace_callback, success_callback: see :class:`~twinkle_agentic.rollout.traces.TraceWriter`.
    adapter_name: the adapter to sample with; "" leaves the choice to the sampler.
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
        trace_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        success_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        *,
        adapter_name: str = "",
    ) -> None:
        if getattr(template, "truncation_strategy", None) == "split":
            raise InvalidInputError("truncation_strategy", "split", "another one: a conversation must stay one row")
        self.tool_manager = tool_manager
        self._rounds = ClientMultiTurnRollout(
            cast("Any", _FullBatches(sampler, adapter_name)),
            cast("Any", template),
            None,
            sampling_params,
            max_turns,
            max_trajectory_tokens,
        )
        self._traces = TraceWriter(made_trace_dir(trace_dir), trace_callback, success_callback)

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def __call__(  # type: ignore[override]
        self,
        trajectories: list[Mapping[str, Any]],
        *,
        sampling_params: object = None,
        tool_manager: Tools | Sequence[Tools] | None = None,
        global_step: int | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories, in order, with the final feature (tokens, labels, messages) and ``logprobs`` (or
        None), ``turns``, ``stop_reason`` and ``truncated``.

        sampling_params, tool_manager: those of this call instead of the constructor's; there may be one manager for
        each trajectory. global_step: a number for the names of the traces.
        """
        managers = managers_for(trajectories, tool_manager, self.tool_manager)
        done = self._rounds(trajectories, sampling_params=sampling_params, tool_manager=managers)
        write_traces(self._traces, done, global_step)
        return done
