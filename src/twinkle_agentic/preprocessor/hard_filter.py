"""Rules about the size and form of a conversation that need no model."""

import re
from collections.abc import Sequence

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import (
    Message,
    Result,
    Row,
    Rows,
    drop_rows,
    has_media,
    has_valid_messages,
    is_agent_row,
    is_mostly_cjk,
    messages_of,
    reasoning_of,
    text_of,
    thoughts_and_answer,
    tool_calls_of,
)

__all__ = ["HardFilter"]

# A message that is nothing but one or two of these, with punctuation around them.
_GREETING_WORDS = (
    "hi|hello|hey|yo|hiya|howdy|greetings|thanks|thank you|thx|ok|okay|test|testing|ping|bye|goodbye|"
    "good morning|good afternoon|good evening|good night|how are you|what's up|sup|are you there|hello there|"
    "你好|您好|你好啊|你好呀|嗨|哈喽|哈啰|在吗|在么|在不在|早上好|下午好|晚上好|早安|晚安|谢谢|多谢|测试|再见|"
    "こんにちは|こんばんは|おはよう|ありがとう|テスト|안녕|안녕하세요|감사합니다|테스트"
)
_GREETING = re.compile(
    rf"[\s\W]*(?:{_GREETING_WORDS})(?:[\s\W]{{1,8}}(?:{_GREETING_WORDS}))?[\s\W]*",
    re.IGNORECASE,
)
_LONGEST_GREETING = 60  # characters; longer messages are not compared with greetings


class HardFilter:
    """Drops rows that are malformed, trivial, shallow or too long.

    min_user_chars, min_user_chars_cjk: a single question below this length is trivial; the second counts for texts
    that are mostly Chinese, Japanese or Korean. min_assistant_chars_2turn: a reply below it, in a conversation of one
    question and one reply, is shallow. Neither applies to agent rows, nor if the thoughts have ``min_thinking_chars``.
    allow_incomplete_role: keep rows without a user's or without an assistant's message.
    system_deny_keywords: texts that a system message must not contain, in any case.
    max_chars_per_round, max_total_chars, max_rounds: limits, None for none. A round begins with a user's message.

    Reasons, the first that applies: invalid_messages, no_user, trivial_single_turn, shallow_reply,
    all_empty_assistant, system_deny_keyword, round_too_long, total_too_long, too_many_rounds.
    """

    def __init__(
        self,
        min_user_chars: int = 10,
        min_user_chars_cjk: int = 6,
        min_assistant_chars_2turn: int = 80,
        min_thinking_chars: int = 200,
        allow_incomplete_role: bool = False,
        system_deny_keywords: Sequence[str] | None = None,
        max_chars_per_round: int | None = None,
        max_total_chars: int | None = None,
        max_rounds: int | None = None,
    ) -> None:
        if isinstance(system_deny_keywords, str):
            raise InvalidInputError("system_deny_keywords", system_deny_keywords, "a list of texts")
        self.min_user_chars = min_user_chars
        self.min_user_chars_cjk = min_user_chars_cjk
        self.min_assistant_chars_2turn = min_assistant_chars_2turn
        self.min_thinking_chars = min_thinking_chars
        self.allow_incomplete_role = allow_incomplete_role
        self.system_deny_keywords = [word.casefold() for word in system_deny_keywords or () if word]
        self.max_chars_per_round = max_chars_per_round
        self.max_total_chars = max_total_chars
        self.max_rounds = max_rounds

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        if not has_valid_messages(row):
            return "invalid_messages"
        messages = messages_of(row)
        users = [message for message in messages if message["role"] == "user"]
        if not self.allow_incomplete_role and not any(text_of(each).strip() or has_media(each) for each in users):
            return "no_user"
        return self._small(row, messages, users) or self._system(messages) or self._long(messages, len(users))

    def _small(self, row: Row, messages: list[Message], users: list[Message]) -> str | None:
        assistants = [message for message in messages if message["role"] == "assistant"]
        parts = [thoughts_and_answer(message) for message in assistants]
        thinks_long = sum(len(thoughts.strip()) for thoughts, _ in parts) >= self.min_thinking_chars
        if len(users) == 1 and not thinks_long and not is_agent_row(row):
            if self._trivial(users[0]):
                return "trivial_single_turn"
            if len(assistants) == 1 and len(parts[0][1]) < self.min_assistant_chars_2turn:
                return "shallow_reply"
        if not assistants and self.allow_incomplete_role:
            return None
        said = zip(assistants, parts, strict=True)
        if not any(thoughts.strip() or answer or tool_calls_of(message) for message, (thoughts, answer) in said):
            return "all_empty_assistant"
        return None

    def _trivial(self, user: Message) -> bool:
        if has_media(user):
            return False
        text = text_of(user).strip()
        least = self.min_user_chars_cjk if is_mostly_cjk(text) else self.min_user_chars
        return len(text) < least or (len(text) <= _LONGEST_GREETING and _GREETING.fullmatch(text) is not None)

    def _system(self, messages: list[Message]) -> str | None:
        systems = [text_of(each).casefold() for each in messages if each["role"] in ("system", "developer")]
        if any(word in text for text in systems for word in self.system_deny_keywords):
            return "system_deny_keyword"
        return None

    def _long(self, messages: list[Message], rounds: int) -> str | None:
        sizes = [0]  # characters before the first user's message, then of each round
        for message in messages:
            if message["role"] == "user":
                sizes.append(0)
            sizes[-1] += len(text_of(message)) + len(reasoning_of(message))
        if self.max_chars_per_round is not None and max(sizes[1:], default=0) > self.max_chars_per_round:
            return "round_too_long"
        if self.max_total_chars is not None and sum(sizes) > self.max_total_chars:
            return "total_too_long"
        if self.max_rounds is not None and rounds > self.max_rounds:
            return "too_many_rounds"
        return None
