"""A condenser that asks a model for a shorter version of each chunk."""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any, Protocol

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle_agentic.condenser.base import SKIPPED_ROLES, Condenser, condensed, may_condense, require_ratio
from twinkle_agentic.data_format import Chunk, Chunks
from twinkle_agentic.data_format.thinking import split_thinking

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["ModelCondenser"]

_SYSTEM = (
    "You shorten passages for another model, which reads your version in the place of the passage. Keep names, "
    "numbers, dates and every relation between them. Do not add anything, and do not comment."
)
_TASK = "Rewrite the passage in at most {budget} characters. Answer with the new text alone.\n\n{text}"
_TASK_FOR_QUESTION = (
    "Rewrite the passage in at most {budget} characters. Keep above all what helps to answer this question: {query}\n"
    "Answer with the new text alone.\n\n{text}"
)
_SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|</?s>|<(?:bos|eos|pad)>")
_FENCED = re.compile(r"\A```[^\n`]*\n(.*?)\n?```\Z", re.DOTALL)


class SamplesTrajectories(Protocol):
    """A sampler of the library or of the client."""

    def sample(self, inputs: Any, sampling_params: Any = ...) -> Sequence[Any]: ...


@dataclass(frozen=True)
class _Task:
    """One chunk to condense: its conversation and place there, its text, its budget in characters, its question."""

    conversation: int
    place: int
    text: str
    budget: int
    query: str


class ModelCondenser(Condenser):
    """Asks a model to rewrite each chunk in at most ``ceil(length / compression_ratio)`` characters.

    The budget is never below ``min_budget_chars``. An answer is used only if it is strictly shorter than the chunk.

    sampler: samples from its base model unless ``lora_path`` names an adapter. sampling_params: instead of greedy
    sampling; without ``max_tokens`` that is max(512, 3 · budget + 128) of the largest budget in a call.
    system_prompt, user_prompt_template: instead of ours; the template holds ``{budget}`` and ``{text}`` and may hold
    ``{query}``. min_chars: shorter chunks are not condensed, nor are those of ``skip_roles``, those in which
    ``skip_pattern`` is found, and those of other rounds than ``rounds`` (None: all rounds).
    template: decodes the answer if the sampler returns tokens without text. related_query: called with each chunk in
    order; the text that it returns is the question for the following chunks of that conversation, until it returns
    another. batch_size: the most chunks in one call of the sampler (None: all of them).
    """

    def __init__(
        self,
        sampler: SamplesTrajectories,
        compression_ratio: float = 2.0,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        user_prompt_template: str | None = None,
        min_chars: int = 200,
        min_budget_chars: int = 250,
        template: "Template | None" = None,
        skip_roles: Collection[str] = SKIPPED_ROLES,
        skip_pattern: str | re.Pattern[str] | None = None,
        related_query: Callable[[Chunk], str | None] | None = None,
        rounds: Collection[int] | None = None,
        batch_size: int | None = None,
        lora_path: str | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise InvalidInputError("batch_size", batch_size, "a number of chunks ≥ 1, or None")
        if user_prompt_template is not None:
            _check_template(user_prompt_template, needs_query=related_query is not None)
        self.sampler = sampler
        self.compression_ratio = require_ratio(compression_ratio)
        self.sampling_params = _params(sampling_params)
        self.system_prompt = _SYSTEM if system_prompt is None else system_prompt
        self.user_prompt_template = user_prompt_template
        self.min_chars = min_chars
        self.min_budget_chars = min_budget_chars
        self.template = template
        self.skip_roles = skip_roles
        self.skip_pattern = None if skip_pattern is None else re.compile(skip_pattern)
        self.related_query = related_query
        self.rounds = rounds
        self.batch_size = batch_size
        self.lora_path = lora_path

    def condense(
        self,
        conversations: list[Chunks],
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        rounds: Collection[int] | None = None,
        lora_path: str | None = None,
    ) -> list[Chunks]:
        """Return the conversations with condensed chunks. The keywords replace the constructor's for this call."""
        params = _params(sampling_params) or self.sampling_params
        adapter = _adapter_option(self.sampler, lora_path or self.lora_path)
        tasks = [
            task
            for number, conversation in enumerate(conversations)
            for task in self._tasks(number, conversation, self.rounds if rounds is None else rounds)
        ]
        results = [list(conversation) for conversation in conversations]
        size = self.batch_size or max(len(tasks), 1)
        for batch in (tasks[start : start + size] for start in range(0, len(tasks), size)):
            prompts = [{"messages": self._messages(task)} for task in batch]
            responses = self.sampler.sample(prompts, _with_limit(params, batch), **adapter)
            for task, response in zip(batch, responses, strict=True):
                text = self._cleaned(response)
                if text and len(text) < len(task.text):
                    chunk = results[task.conversation][task.place]
                    results[task.conversation][task.place] = condensed(chunk, text)
        return [Chunks(chunks) for chunks in results]

    def _tasks(self, number: int, conversation: Chunks, rounds: Collection[int] | None) -> Iterator[_Task]:
        query = ""
        for place, chunk in enumerate(conversation):
            if may_condense(chunk, self.min_chars, self.skip_roles, rounds, self.skip_pattern):
                text = chunk["content"]
                budget = max(self.min_budget_chars, math.ceil(len(text) / self.compression_ratio))
                yield _Task(number, place, text, budget, query)
            if self.related_query is not None:
                query = self.related_query(chunk) or query

    def _messages(self, task: _Task) -> list[dict[str, str]]:
        template = self.user_prompt_template or (_TASK_FOR_QUESTION if task.query else _TASK)
        question = template.format(budget=task.budget, text=task.text, query=task.query)
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def _cleaned(self, response: Any) -> str:
        """Return the answer's text without the model's reasoning, special tokens and a fence around the whole."""
        sequence = response.sequences[0]
        text: str | None = sequence.decoded
        if text is None:
            if self.template is None:
                raise InvalidInputError("template", None, "a template, because the sampler returns tokens without text")
            text = self.template.decode(sequence.tokens)
        for token in () if self.template is None else self.template.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        _, answer = split_thinking(text)
        text = _SPECIAL.sub("", answer).strip()
        fenced = _FENCED.match(text)
        return fenced[1].strip() if fenced else text


def _params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams | None:
    params = SamplingParams.from_dict(given) if isinstance(given, Mapping) else given
    if params is not None and params.num_samples != 1:
        raise InvalidInputError("num_samples", params.num_samples, "1: a chunk has one condensed text")
    return params


def _with_limit(params: SamplingParams | None, tasks: Sequence[_Task]) -> SamplingParams:
    limit = max(512, 3 * max(task.budget for task in tasks) + 128)
    if params is None:
        return SamplingParams(temperature=0.0, max_tokens=limit)
    return replace(params, max_tokens=limit) if params.max_tokens is None else params


def _check_template(template: str, needs_query: bool) -> None:
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        allowed = f"a template for str.format; write single braces as {{{{ and }}}} ({error})"
        raise InvalidInputError("user_prompt_template", template, allowed) from error
    if not {"budget", "text"} <= names <= {"budget", "text", "query"}:
        allowed = "a text with {budget} and {text}, perhaps {query}, and no other field"
        raise InvalidInputError("user_prompt_template", template, allowed)
    if needs_query and "query" not in names:
        raise InvalidInputError("user_prompt_template", template, "a text with {query}, which related_query fills")


def _adapter_option(sampler: SamplesTrajectories, lora_path: str | None) -> dict[str, Any]:
    """Return the keyword with which this sampler chooses the weights.

    Samplers of the library read an adapter from a path, those of the client from an address. A sampler that has no
    ``use_base_model`` samples from the base model if no adapter is named.
    """
    names = inspect.signature(sampler.sample).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
    if lora_path is None:
        return {"use_base_model": True} if takes_any or "use_base_model" in names else {}
    for option in ("adapter_path", "adapter_uri"):
        if takes_any or option in names:
            return {option: lora_path}
    raise UnsupportedError(f"lora_path: {type(sampler).__name__}.sample has neither adapter_path nor adapter_uri")
