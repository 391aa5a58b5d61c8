"""Conversations with tools over an API: messages, without tokens to train on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger
from twinkle_agentic.rollout.base import Rollout, Tools, Trajectory, made_trace_dir, managers_for, write_traces
from twinkle_agentic.rollout.traces import TraceWriter

__all__ = ["APIMultiTurnRollout"]

# twinkle_agentic.protocol.OpenAI, or any function that answers like it: (trajectory, sampling_params, **kw) -> message
API = Callable[..., Any]


class APIMultiTurnRollout(Rollout):
    """Conversations of several turns over an API. Each trajectory has a thread, at most ``concurrency`` at once.

    api: ``(trajectory, sampling_params, **kw) -> message``; the message has role, content, ``finish_reason`` and, if
    there are any, ``reasoning_content`` and ``tool_calls``. The tools that it is told of are those of the trajectory,
    else those of the manager. extra_body: goes to the API with each request. The other arguments are those of
    :class:`~twinkle_agentic.rollout.MultiTurnRollout`.
    """

    def __init__(
        self,
        api: API,
        tool_manager: Tools | None,
        sampling_params: object = None,
        max_turns: int = 6,
        concurrency: int = 8,
        extra_body: Mapping[str, Any] | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        success_callback: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("concurrency", concurrency)):
            if value < 1:
                raise InvalidInputError(name, value, "an integer ≥ 1")
        self.api = api
        self.tool_manager = tool_manager
        self.sampling_params = _params(sampling_params)
        self.max_turns = max_turns
        self.concurrency = concurrency
        self.extra_body = dict(extra_body or {})
        self._traces = TraceWriter(made_trace_dir(trace_dir), trace_callback, success_callback)

    def __call__(  # type: ignore[override]
        self,
        trajectories: list[Mapping[str, Any]],
        *,
        sampling_params: object = None,
        tool_manager: Tools | Sequence[Tools] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        global_step: int | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories, in order, with ``messages``, ``turns``, ``stop_reason`` (stop, length, max_turns or
        api_error), ``truncated`` and ``error`` (a text, or None).

        extra_body: merged over the constructor's. A failure of one trajectory is its ``error`` and is not raised.
        """
        managers = managers_for(trajectories, tool_manager, self.tool_manager)
        params = self.sampling_params if sampling_params is None else _params(sampling_params)
        body = {**self.extra_body, **(extra_body or {})}
        if not trajectories:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(trajectories))) as threads:
            done = list(
                threads.map(lambda given, manager: self._converse(given, manager, params, body), trajectories, managers)
            )
        write_traces(self._traces, done, global_step)
        return done

    def _converse(
        self, given: Mapping[str, Any], manager: Tools, params: SamplingParams | None, body: Mapping[str, Any]
    ) -> Trajectory:
        """Return one finished trajectory. Runs in a thread of its own."""
        messages: list[Any] = []
        turns, stop_reason, error = 0, "max_turns", None
        try:
            messages = [dict(message) for message in given["messages"]]
            tools = given.get("tools") or _tool_infos(manager)
            while turns < self.max_turns:
                request = {**given, "messages": list(messages), **({"tools": tools} if tools else {})}
                answer = self.api(request, params, **({"extra_body": dict(body)} if body else {}))
                if not isinstance(answer, Mapping):
                    raise InvalidInputError("api", type(answer).__name__, "a function that returns one message, a dict")
                message = dict(answer)
                finish_reason = message.pop("finish_reason", None)
                messages.append(message)
                turns += 1
                calls = _identified(message, turns)
                if finish_reason == "length" or not calls:
                    stop_reason = "length" if finish_reason == "length" else "stop"
                    break
                if turns < self.max_turns:
                    messages += [
                        {"role": "tool", "tool_call_id": call["id"], "content": str(manager(call))} for call in calls
                    ]
        except Exception as failure:  # noqa: BLE001 - one trajectory must not lose the others
            get_logger().warning("a conversation over the API failed", exc_info=True)
            stop_reason, error = "api_error", f"{type(failure).__name__}: {failure}"
        ended = {"turns": turns, "stop_reason": stop_reason, "truncated": stop_reason == "max_turns", "error": error}
        return {**given, "messages": messages, **ended}


def _identified(message: dict[str, Any], turn: int) -> list[dict[str, Any]]:
    """Return the calls of a message; those without an id get one, also in the message."""
    calls = [
        {**call, "id": call.get("id") or f"call{turn:03d}{number:02d}"}
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    if calls:
        message["tool_calls"] = calls
    return calls


def _tool_infos(manager: Any) -> list[Any]:
    """Return the descriptions of a manager's tools; a plain function has none."""
    return list(manager.tool_infos()) if hasattr(manager, "tool_infos") else []


def _params(given: object) -> SamplingParams | None:
    """Return sampling parameters, or None, with which the API uses its own defaults."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = SamplingParams.from_dict(given)
    if not isinstance(given, SamplingParams):
        raise InvalidInputError("sampling_params", given, "a SamplingParams, its fields as a mapping, or None")
    if given.num_samples != 1:
        raise InvalidInputError("num_samples", given.num_samples, "1: a conversation goes on with one sample")
    return given
