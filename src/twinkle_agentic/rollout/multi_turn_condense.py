"""Conversations whose long texts are condensed before the first turn; a tool gives the originals back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinkle.errors import InvalidInputError
from twinkle.infra import remote_class, remote_function
from twinkle.utils.logger import note_once
from twinkle_agentic.data_format import condensed_blocks
from twinkle_agentic.rollout.base import Tools, Trajectory, managers_for, write_traces
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout, SamplesPrompts
from twinkle_agentic.tools.extract_condensed import TOOL_NAME, ExtractCondensed
from twinkle_agentic.tools.tool_manager import ToolManager

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["ChunkList", "MultiTurnCondenseRollout"]


class ChunkList(Protocol):
    """The part of :class:`twinkle_agentic.data_format.Chunks` that is used here."""

    def __iter__(self) -> Iterator[Any]: ...

    def to_trajectory(self) -> Mapping[str, Any]: ...


Chunker = Callable[[Mapping[str, Any]], ChunkList]
Condenser = Callable[..., list[ChunkList]]


@remote_class(execute="first")
class MultiTurnCondenseRollout(MultiTurnRollout):
    """Conversations of several turns, in which the model first sees condensed texts.

    Each trajectory is cut into chunks by ``chunker(trajectory)``. One call ``condenser(list_of_chunks)`` condenses all
    of them; equal ones are condensed once. The model reads the condensed conversation, in which condensed texts stand
    in ``<block_N>``, and can call the tool ``extract_condensed`` to read an original.

    tool_manager: a :class:`ToolManager`, of which each trajectory gets a copy with that tool added. condenser_kwargs:
    further arguments of the condenser. post_compress_callback: ``(compressed, chunks, **call arguments)`` returns the
    trajectory to use instead of ``compressed``. The other arguments are those of :class:`MultiTurnRollout`. Traces have
    two more fields: ``blocks`` and ``passages``, the user's texts that were not condensed.
    """

    def __init__(
        self,
        sampler: SamplesPrompts,
        template: "Template",
        tool_manager: ToolManager | None,
        chunker: Chunker,
        condenser: Condenser,
        sampling_params: object = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        success_callback: Callable[[Mapping[str, Any]], bool] | None = None,
        condenser_kwargs: Mapping[str, Any] | None = None,
        post_compress_callback: Callable[..., Mapping[str, Any]] | None = None,
        *,
        adapter_name: str = "",
    ) -> None:
        super().__init__(
            sampler,
            template,
            ToolManager() if tool_manager is None else tool_manager,
            sampling_params,
            max_turns,
            max_trajectory_tokens,
            trace_dir,
            trace_callback,
            success_callback,
            adapter_name=adapter_name,
        )
        if tool_manager is not None and TOOL_NAME in tool_manager.names():
            raise InvalidInputError(
                "tool_manager", TOOL_NAME, "a manager without this tool, which each trajectory gets"
            )
        self._chunker = chunker
        self._condenser = condenser
        self._condenser_kwargs = dict(condenser_kwargs or {})
        self._post_compress_callback = post_compress_callback

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def __call__(
        self,
        trajectories: list[Mapping[str, Any]],
        *,
        sampling_params: object = None,
        tool_manager: Tools | Sequence[Tools] | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Return the finished trajectories, as :class:`MultiTurnRollout` does.

        tool_manager: has no effect, because each trajectory has its own copy of the constructor's; a log line says so.
        kwargs: further arguments for ``post_compress_callback``, which gets all arguments of this call.
        """
        managers_for(trajectories, None, self.tool_manager)
        if tool_manager is not None:
            note_once(
                "tool_manager: no effect in a call of MultiTurnCondenseRollout; each trajectory has a copy of the "
                "constructor's"
            )
        if kwargs and self._post_compress_callback is None:
            raise TypeError(f"unknown arguments {', '.join(kwargs)}: there is no post_compress_callback for them")
        if not trajectories:
            return []
        condensed = self._condense([self._chunker(trajectory) for trajectory in trajectories])
        named = {"sampling_params": sampling_params, "tool_manager": tool_manager, "global_step": global_step}
        for_callback = {**{name: value for name, value in named.items() if value is not None}, **kwargs}
        managers: list[Tools] = []
        prompts: list[Mapping[str, Any]] = []
        for given, chunks in zip(trajectories, condensed, strict=True):
            manager = self.tool_manager.copy()  # type: ignore[union-attr]
            manager.register(ExtractCondensed(chunks))
            compressed: Mapping[str, Any] = {**given, **chunks.to_trajectory()}
            if self._post_compress_callback is not None:
                compressed = self._post_compress_callback(compressed, chunks, **for_callback)
            managers.append(manager)
            prompts.append(_with_tools(compressed, manager))
        done = self._rounds(prompts, sampling_params=sampling_params, tool_manager=managers)
        write_traces(self._traces, done, global_step, [_traced_texts(chunks) for chunks in condensed])
        return done

    def _condense(self, chunked: Sequence[ChunkList]) -> list[ChunkList]:
        """Return the condensed chunks of each trajectory; the condenser gets equal ones only once."""
        keys = [json.dumps(list(chunks), sort_keys=True, default=repr) for chunks in chunked]
        different = dict(zip(reversed(keys), reversed(chunked), strict=True))
        order = list(dict.fromkeys(keys))
        answers = self._condenser([different[key] for key in order], **self._condenser_kwargs)
        if len(answers) != len(order):
            raise InvalidInputError("condenser", f"{len(answers)} results", f"one for each of {len(order)} inputs")
        by_key = dict(zip(order, answers, strict=True))
        return [by_key[key] for key in keys]


def _with_tools(trajectory: Mapping[str, Any], manager: ToolManager) -> Trajectory:
    """Return the trajectory with the description of ``extract_condensed`` among its tools, or all of the manager's."""
    given = list(trajectory.get("tools") or ())
    if not given:
        return {**trajectory, "tools": manager.tool_infos()}
    names = {(info.get("function") or {}).get("name") for info in given}
    own = [info for info in manager.tool_infos() if info["function"]["name"] == TOOL_NAME]
    return {**trajectory, "tools": given if TOOL_NAME in names else [*given, *own]}


def _traced_texts(chunks: ChunkList) -> dict[str, Any]:
    """Return two fields of a trace: the condensed blocks, and the passages of the user that were not condensed."""
    blocks = {
        f"block_{number}": {"original": (chunk.get("raw") or {}).get("original"), "compressed": chunk["content"]}
        for number, chunk in condensed_blocks(chunks).items()
    }
    plain = [
        chunk["content"]
        for chunk in chunks
        if chunk.get("role") == "user" and chunk.get("type") == "text" and not (chunk.get("raw") or {}).get("condensed")
    ]
    return {
        "blocks": blocks,
        "passages": {f"passage_{number}": {"content": text} for number, text in enumerate(plain, start=1)},
    }
