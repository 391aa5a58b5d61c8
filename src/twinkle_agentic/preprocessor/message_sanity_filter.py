"""Conversations that a chat template and a loss can use: order, tool calls, content, language, words."""

import json
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.data_format.columns import columns_to_rows
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import (
    Message,
    Result,
    Row,
    Rows,
    cjk_count,
    has_media,
    has_valid_messages,
    is_agent_row,
    reasoning_of,
    text_of,
    thoughts_and_answer,
    tool_calls_of,
    with_user_data,
)

__all__ = ["MessageSanityFilter"]

# A question that names a language may be answered in it.
_NAMES_LANGUAGE = re.compile(
    r"translat|\b(?:chinese|english|japanese|korean|mandarin|cantonese|language)\b|"
    "翻译|英文|英语|中文|汉语|日文|日语|韩文|韩语|普通话|日本語|英語|中国語|翻訳|번역|영어|한국어|중국어",
    re.IGNORECASE,
)
_SHORT_QUESTION, _SHORT_REPLY = 8, 20  # letters; shorter texts do not show their language
_OTHER_LANGUAGE = 0.05  # a reply with a smaller share of CJK characters is in another script


class MessageSanityFilter:
    """Drops conversations that are broken, and brings the others into shape.

    All system messages become one at the front. With ``trim_to_assistant``, what follows the last assistant message is
    cut off; ``key_rounds`` in ``user_data`` are renumbered.

    Reasons, the first that applies: invalid_messages (malformed, or fewer than ``min_turns`` messages without the
    system's), no_assistant, or the name of the argument that asks for the check:

    - check_role_order: the user begins; user and assistant take turns; tool messages follow calls only.
    - check_tool_matching: each call has one result, before the conversation goes on, and each result a call. Calls of
      the last message need none. Ids are compared where both sides have them, otherwise numbers of calls and results.
    - check_content_integrity: no empty message, none over ``max_msg_chars`` characters, no ``<think>`` or code block
      left open, and every call names a function and has an object as arguments.
    - check_lang_match: a question in Chinese, Japanese or Korean has no reply without these scripts, and a question
      without them has no reply in them, unless the question names a language.
    - check_agent_min_visible: the assistant of an agent row writes ``min_agent_visible_chars`` characters outside of
      thoughts and calls.
    - filter_sensitive: no message contains a word of ``sensitive_words_file`` (one in each line) or of
      ``extra_sensitive_words``, in any case. Without words nothing is checked.
    """

    def __init__(
        self,
        check_role_order: bool = True,
        check_tool_matching: bool = True,
        check_content_integrity: bool = True,
        check_lang_match: bool = True,
        check_agent_min_visible: bool = True,
        trim_to_assistant: bool = True,
        filter_sensitive: bool = True,
        sensitive_words_file: str | PathLike[str] | None = None,
        extra_sensitive_words: Sequence[str] | None = None,
        min_turns: int = 2,
        max_msg_chars: int = 80000,
        min_agent_visible_chars: int = 50,
    ) -> None:
        if isinstance(extra_sensitive_words, str):
            raise InvalidInputError("extra_sensitive_words", extra_sensitive_words, "a list of words")
        self.trim_to_assistant = trim_to_assistant
        self.min_turns = min_turns
        self.max_msg_chars = max_msg_chars
        self.min_agent_visible_chars = min_agent_visible_chars
        words = [*_words_in(sensitive_words_file), *(extra_sensitive_words or ())]
        self._sensitive = _word_pattern(words) if words else None
        checks = {
            "check_role_order": (check_role_order, _has_role_order),
            "check_tool_matching": (check_tool_matching, _has_matching_tools),
            "check_content_integrity": (check_content_integrity, self._is_whole),
            "check_lang_match": (check_lang_match, _has_one_language),
            "check_agent_min_visible": (check_agent_min_visible, self._is_visible),
            "filter_sensitive": (filter_sensitive, self._is_clean),
        }
        self._checks = {name: check for name, (wanted, check) in checks.items() if wanted}

    def __call__(self, rows: Rows) -> Result:
        kept: list[Row] = []
        dropped: list[Row] = []
        for row in columns_to_rows(rows):
            shaped, reason = self._shaped(row)
            if reason is None:
                kept.append(shaped)
            else:
                dropped.append({**row, "drop_reason": reason})
        return kept, dropped

    def _shaped(self, row: Row) -> tuple[Row, str | None]:
        if not has_valid_messages(row):
            return row, "invalid_messages"
        numbered = list(enumerate(row["messages"]))
        systems = [(n, m) for n, m in numbered if m["role"] in ("system", "developer")]
        others = [(n, m) for n, m in numbered if m["role"] not in ("system", "developer")]
        assistants = [place for place, (_, m) in enumerate(others) if m["role"] == "assistant"]
        if not assistants:
            return row, "no_assistant"
        if self.trim_to_assistant:
            others = others[: assistants[-1] + 1]
        if len(others) < self.min_turns:
            return row, "invalid_messages"
        first = _one_system([message for _, message in systems])
        shaped = _renumbered({**row, "messages": [*first, *(m for _, m in others)]}, [n for n, _ in others], len(first))
        turns = [message for _, message in others]
        reason = next((name for name, check in self._checks.items() if not check(shaped, turns)), None)
        return shaped, reason

    def _is_whole(self, row: Row, turns: list[Message]) -> bool:
        short = all(len(text_of(message)) <= self.max_msg_chars for message in row["messages"])
        return short and all(_is_whole(message) for message in turns)

    def _is_visible(self, row: Row, turns: list[Message]) -> bool:
        if not is_agent_row(row):
            return True
        visible = sum(len(thoughts_and_answer(m)[1]) for m in turns if m["role"] == "assistant")
        return visible >= self.min_agent_visible_chars

    def _is_clean(self, row: Row, turns: list[Message]) -> bool:
        if self._sensitive is None:
            return True
        texts = (f"{text_of(message)}\n{reasoning_of(message)}" for message in row["messages"])
        return not any(self._sensitive.search(text) for text in texts)


# --- shape ------------------------------------------------------------------------------------------------------------


def _one_system(systems: list[Message]) -> list[Message]:
    if len(systems) <= 1:
        return [{**message, "role": "system"} for message in systems]
    return [{"role": "system", "content": "\n\n".join(text for text in map(text_of, systems) if text)}]


def _renumbered(row: Row, places: list[int], shift: int) -> Row:
    """Return the row with ``key_rounds`` for the new places of its messages; ``intents`` lose the same entries."""
    rounds = user_data_get(row.get("user_data"), "key_rounds")
    if not isinstance(rounds, list):
        return row
    new = {old: number + shift for number, old in enumerate(places)}
    stay = [place for place, old in enumerate(rounds) if old in new]
    intents = user_data_get(row.get("user_data"), "intents")
    values: dict[str, Any] = {"key_rounds": [new[rounds[place]] for place in stay]}
    if isinstance(intents, list) and len(intents) == len(rounds):
        values["intents"] = [intents[place] for place in stay]
    return with_user_data(row, **values)


# --- checks -----------------------------------------------------------------------------------------------------------


def _has_role_order(row: Row, turns: list[Message]) -> bool:
    before = ""
    for message in turns:
        role = message["role"]
        allowed = {
            "": ("user",),
            "user": ("assistant",),
            "assistant": ("user",),
            "call": ("tool",),
            "tool": ("tool", "assistant"),
        }[before]
        if role not in allowed:
            return False
        before = "call" if role == "assistant" and tool_calls_of(message) else role
    return True


def _has_matching_tools(row: Row, turns: list[Message]) -> bool:
    waiting: list[Any] = []  # the ids of calls without a result; None for a call without an id
    for message in turns:
        if message["role"] != "tool":
            if waiting:
                return False
            waiting = [call.get("id") if isinstance(call, dict) else None for call in tool_calls_of(message)]
            continue
        name = message.get("tool_call_id")
        if name in waiting:
            waiting.remove(name)
        elif waiting and (name is None or None in waiting):
            waiting.remove(None if None in waiting else waiting[0])
        else:
            return False
    return not waiting or turns[-1]["role"] == "assistant"


def _is_whole(message: Message) -> bool:
    text = text_of(message)
    if message["role"] == "tool":  # a tool may answer with nothing
        return True
    if message["role"] != "assistant":
        return bool(text.strip()) or has_media(message)
    calls = tool_calls_of(message)
    thoughts, answer = thoughts_and_answer(message)
    if not (answer or calls or thoughts.strip()) or not all(_is_call(call) for call in calls):
        return False
    return text.count("<think>") <= text.count("</think>") and answer.count("```") % 2 == 0


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return False
    return arguments is None or arguments == "" or isinstance(arguments, dict)


def _has_one_language(row: Row, turns: list[Message]) -> bool:
    asked = "\n".join(text_of(message) for message in turns if message["role"] == "user")
    said = "\n".join(_without_code(thoughts_and_answer(m)[1]) for m in turns if m["role"] == "assistant")
    question, reply = _cjk_share(_without_code(asked), _SHORT_QUESTION), _cjk_share(said, _SHORT_REPLY)
    if question is None or reply is None or _NAMES_LANGUAGE.search(asked):
        return True
    if question >= 0.5:
        return reply >= _OTHER_LANGUAGE
    return question >= _OTHER_LANGUAGE or reply < 0.5


def _cjk_share(text: str, fewest: int) -> float | None:
    """Return the share of Chinese, Japanese and Korean characters among letters; None for a text too short to say."""
    letters = sum(1 for character in text if character.isalpha())
    cjk = cjk_count(text)
    if letters < fewest and cjk < 4:
        return None
    return cjk / max(letters, 1)


def _without_code(text: str) -> str:
    """Return the text outside of fenced code blocks."""
    return "".join(text.split("```")[::2])


# --- words ------------------------------------------------------------------------------------------------------------


def _words_in(path: str | PathLike[str] | None) -> list[str]:
    if path is None:
        return []
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError("sensitive_words_file", str(path), "a text file with one word in each line")
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _word_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for these words. One that begins or ends with an ASCII letter must begin or end there."""
    return re.compile("|".join(sorted({_bounded(word.strip()) for word in words if word.strip()})), re.IGNORECASE)


def _bounded(word: str) -> str:
    start = "(?<![A-Za-z0-9_])" if word[0].isascii() and word[0].isalnum() else ""
    end = "(?![A-Za-z0-9_])" if word[-1].isascii() and word[-1].isalnum() else ""
    return f"{start}{re.escape(word)}{end}"
