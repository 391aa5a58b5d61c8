"""Rounds of conversations by the scores that a model gives them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from twinkle.data_format import user_data_get
from twinkle.data_format.columns import columns_to_rows
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.scoring.backend import LLMBackend
from twinkle_agentic.preprocessor.scoring.scorers import Round, Score, Scorer
from twinkle_agentic.preprocessor.scoring.traces import TraceFolder
from twinkle_agentic.preprocessor.utils import (
    Result,
    Row,
    Rows,
    messages_of,
    reasoning_of,
    text_of,
    tool_calls_of,
    with_user_data,
)

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["ScoreFilter"]

_SHORTEST_REPLY = 2  # tokens: the first one is not scored


@dataclass
class _Scored:
    """The rounds of one row, by the place of their message, and what the scorers say about them."""

    rounds: dict[int, Round]
    others: list[int]  # key rounds of other intents, which are not scored and stay
    scores: dict[int, dict[str, Score]] = field(default_factory=dict)

    def passed(self) -> list[int]:
        return [place for place in self.rounds if all(score.passed for score in self.scores[place].values())]

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "round": place,
                "scores": {name: score.value for name, score in scores.items()},
                "passed": all(score.passed for score in scores.values()),
            }
            for place, scores in self.scores.items()
        ]


class ScoreFilter:
    """Keeps the rounds that all scorers pass, and rows by their rounds.

    The rounds of a row are ``key_rounds`` of its ``user_data`` or, without them, all messages of the assistant. With
    ``intents`` only key rounds of these intents are scored; other key rounds stay as they are. A round needs a user's
    message before it and a reply of at least two tokens. Scorers are asked in order; a round that one of them fails is
    not given to the next. ``key_rounds`` is rewritten to the rounds that passed, and ``intents`` with it.

    Reasons: score_no_context (no round can be scored; such rows stay with ``keep_if_no_key_rounds``),
    score_all_rounds_failed, score_round_failed (one failed, and ``drop_row_on_any_fail``).

    template: encodes the conversation before a reply, of which the last ``max_prompt_tokens`` tokens are used.
    trace_dir: one file for each scored row; see :class:`TraceFolder`, also for the callbacks.
    """

    def __init__(
        self,
        template: "Template",
        backend: LLMBackend,
        scorers: Sequence[Scorer],
        intents: Sequence[str] | None = None,
        keep_if_no_key_rounds: bool = False,
        drop_row_on_any_fail: bool = True,
        max_prompt_tokens: int = 1024,
        trace_dir: str | PathLike[str] | None = None,
        trace_callback: Callable[[Row], bool] | None = None,
        success_callback: Callable[[Row], bool] | None = None,
    ) -> None:
        scorers = [scorers] if isinstance(scorers, Scorer) else list(scorers)
        if not scorers:
            raise InvalidInputError("scorers", scorers, "at least one scorer")
        if not isinstance(max_prompt_tokens, int) or max_prompt_tokens < 1:
            raise InvalidInputError("max_prompt_tokens", max_prompt_tokens, "an integer ≥ 1")
        if isinstance(intents, str):
            raise InvalidInputError("intents", intents, "a list of intents")
        self.template = template
        self.backend = backend
        self.scorers = scorers
        self.intents = None if intents is None else frozenset(intents)
        self.keep_if_no_key_rounds = keep_if_no_key_rounds
        self.drop_row_on_any_fail = drop_row_on_any_fail
        self.max_prompt_tokens = max_prompt_tokens
        self._traces = TraceFolder(trace_dir, trace_callback, success_callback) if trace_dir else None

    def __call__(self, rows: Rows) -> Result:
        table = columns_to_rows(rows)
        scored = [self._rounds(row) for row in table]
        self._score(scored)
        kept: list[Row] = []
        dropped: list[Row] = []
        for number, (row, each) in enumerate(zip(table, scored, strict=True)):
            result, reason = self._judged(row, each)
            if reason is None:
                kept.append(result)
            else:
                result = {**row, "drop_reason": reason}
                dropped.append(result)
            if self._traces is not None and each.rounds:
                self._traces.write(number, result, reason is None, each.report())
        return kept, dropped

    def _rounds(self, row: Row) -> _Scored:
        messages = messages_of(row)
        places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        chosen = user_data_get(row.get("user_data"), "key_rounds")
        others: list[int] = []
        if chosen is not None:
            if not isinstance(chosen, list) or not set(chosen) <= set(places):
                raise InvalidInputError("key_rounds", chosen, f"a list of numbers of assistant messages, of {places}")
            places = chosen
            if self.intents is not None:
                intents = user_data_get(row.get("user_data"), "intents") or []
                wanted = {place for place, intent in zip(places, intents, strict=False) if intent in self.intents}
                others = [place for place in places if place not in wanted]
                places = [place for place in places if place in wanted]
        rounds = {place: self._round(row, messages, place) for place in places}
        return _Scored({place: each for place, each in rounds.items() if each is not None}, others)

    def _round(self, row: Row, messages: list[dict[str, Any]], place: int) -> Round | None:
        context = messages[:place]
        reply = _reply_text(messages[place])
        if not reply or not any(message.get("role") == "user" and text_of(message) for message in context):
            return None
        conversation = {"messages": context, **({"tools": row["tools"]} if row.get("tools") else {})}
        encoded = self.template.encode(conversation, add_generation_prompt=True)
        prompt_ids = [int(token) for token in encoded["input_ids"]][-self.max_prompt_tokens :]
        reply_ids = [int(token) for token in self.template.tokenizer.encode(reply, add_special_tokens=False)]
        return Round(context, reply, prompt_ids, reply_ids) if len(reply_ids) >= _SHORTEST_REPLY else None

    def _score(self, scored: Sequence[_Scored]) -> None:
        """Let each scorer score all rounds of all rows that have passed so far, in one call."""
        alive = [(each, place) for each in scored for place in each.rounds]
        for each, place in alive:
            each.scores[place] = {}
        for scorer in self.scorers:
            if not alive:
                return
            results = scorer([each.rounds[place] for each, place in alive], self.backend)
            for (each, place), score in zip(alive, results, strict=True):
                each.scores[place][_name(scorer, each.scores[place])] = score
            alive = [pair for pair, score in zip(alive, results, strict=True) if score.passed]

    def _judged(self, row: Row, scored: _Scored) -> tuple[Row, str | None]:
        """Return the row with its new key rounds, and why it is dropped, if it is."""
        if not scored.rounds:
            return row, None if scored.others or self.keep_if_no_key_rounds else "score_no_context"
        passed = scored.passed()
        if not passed and not scored.others:
            return row, "score_all_rounds_failed"
        if self.drop_row_on_any_fail and len(passed) < len(scored.rounds):
            return row, "score_round_failed"
        return _with_key_rounds(row, sorted([*passed, *scored.others])), None


def _with_key_rounds(row: Row, rounds: list[int]) -> Row:
    before = user_data_get(row.get("user_data"), "key_rounds")
    intents = user_data_get(row.get("user_data"), "intents")
    values: dict[str, Any] = {"key_rounds": rounds}
    if isinstance(before, list) and isinstance(intents, list) and len(before) == len(intents):
        by_place = dict(zip(before, intents, strict=True))
        values["intents"] = [by_place[place] for place in rounds]
    return with_user_data(row, **values)


def _reply_text(message: dict[str, Any]) -> str:
    """Return what the assistant wrote: thoughts, text, and its tool calls as JSON."""
    reasoning = reasoning_of(message)
    calls = tool_calls_of(message)
    parts = [
        f"<think>\n{reasoning}\n</think>" if reasoning else "",
        text_of(message),
        json.dumps(calls, ensure_ascii=False) if calls else "",
    ]
    return "\n".join(part for part in parts if part.strip())


def _name(scorer: Scorer, taken: dict[str, Score]) -> str:
    """Return the name of a scorer's class, with a number if another scorer of the class stands before it."""
    name, number = type(scorer).__name__, 1
    while (unique := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return unique
