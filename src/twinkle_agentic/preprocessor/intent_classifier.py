"""The rounds of a conversation that are worth learning from, and what each is about."""

import re
from collections import Counter
from collections.abc import Callable, Mapping

from twinkle.data_format.columns import columns_to_rows
from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import (
    Message,
    Result,
    Row,
    Rows,
    messages_of,
    text_of,
    thoughts_and_answer,
    tool_calls_of,
    with_user_data,
)

__all__ = ["IntentClassifier"]

# Says whether the assistant's message at this place has the intent.
Detector = Callable[[list[Message], int], bool]

_TOOL_CALL = "tool_call"
_CODE_WORDS = re.compile(
    r"\b(?:python|javascript|typescript|java|c\+\+|rust|golang|sql|bash|regex|function|compile|debug|refactor|"
    r"unit test|stack trace|api)\b|代码|函数|编程|编译|调试|脚本|报错|算法|コード|関数|코드|함수",
    re.IGNORECASE,
)
_CODE_LINE = re.compile(
    r"^[ \t]{0,40}(?:def |class |import |from \w{1,60} import |return\b|function |const |let |var |public |private |"
    r"#include|for ?\(|while ?\(|if ?\(|SELECT |INSERT |UPDATE )",
    re.MULTILINE,
)
_MATH = re.compile(
    r"\\boxed|\\frac|\\sqrt|\\sum|\\int\b|\\begin\{(?:align|equation|cases|pmatrix)|\$\$|\\\[|"
    r"\b(?:theorem|lemma|derivative|integral|equation|polynomial|probability that)\b|"
    "证明|求解|方程|导数|积分|概率|定理|几何|方程式|証明|증명|방정식",
    re.IGNORECASE,
)
_LOGIC = re.compile(
    r"\b(?:therefore|thus|hence|because|since|however|unless|otherwise|consequently|it follows|if and only if|"
    r"contradiction|assume|suppose|implies)\b|"
    "因此|所以|因为|由于|然而|除非|否则|假设|如果|矛盾|意味着|したがって|なぜなら|따라서|왜냐하면",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"^[ \t]{0,8}(?:step \d{1,2}\b|\d{1,2}[.)] |first(?:ly)?,|second(?:ly)?,|third(?:ly)?,|finally,)|"
    "第[一二三四五六七八九十]步|首先|其次|最后|步骤",
    re.IGNORECASE | re.MULTILINE,
)
_COMPLAINT = re.compile(
    r"\b(?:that(?:'s| is|’s) (?:wrong|not right|not correct|incorrect|not what I)|"
    r"you(?:'re| are) wrong|not what I (?:asked|meant|want)|"
    r"(?:still|doesn't|does not|didn't|did not|isn't) (?:work|working|wrong|help|right)|try again|"
    r"you (?:missed|forgot|ignored)|wrong answer|this is wrong|that makes no sense)\b|"
    "不对|错了|不是这样|不是我要|没有解决|还是不行|还是报错|重新(?:回答|来|做|写)|你(?:没|忘|漏|理解错)|違います|間違|틀렸|아니에요",
    re.IGNORECASE,
)
_MANY_CONNECTIVES = 4
_MANY_STEPS = 3
_LONG_THOUGHTS = 200  # characters


class IntentClassifier:
    """Finds the key rounds of each conversation: assistant messages with an intent.

    It sets the column ``intent_field`` to the most frequent intent (``other`` if there is none), and in ``user_data``
    ``key_rounds`` (the places of these messages, which templates learn from) and ``intents`` (the intent of each).
    With ``drop_no_key_rounds``, rows without key rounds are dropped (``no_key_rounds``).

    detectors: functions ``(messages, place) -> bool`` by intent, asked in this order; the first that claims a round
    keeps it. If ``tool_call`` claims rounds of a row, the detectors after it are not asked. None: tool_call, code,
    math, complex_logic, reasoning, user_dissatisfaction.
    """

    def __init__(
        self,
        detectors: Mapping[str, Detector] | None = None,
        intent_field: str = "intent",
        drop_no_key_rounds: bool = True,
    ) -> None:
        if detectors is not None and not isinstance(detectors, Mapping):
            raise InvalidInputError("detectors", detectors, "functions (messages, place) -> bool, by intent")
        self.detectors = dict(_DETECTORS if detectors is None else detectors)
        self.intent_field = intent_field
        self.drop_no_key_rounds = drop_no_key_rounds

    def __call__(self, rows: Rows) -> Result:
        kept: list[Row] = []
        dropped: list[Row] = []
        for row in columns_to_rows(rows):
            found = self._intents(messages_of(row))
            rounds = sorted(found)
            intents = [found[place] for place in rounds]
            most = Counter(intents).most_common(1)[0][0] if intents else "other"
            classified = with_user_data({**row, self.intent_field: most}, key_rounds=rounds, intents=intents)
            if rounds or not self.drop_no_key_rounds:
                kept.append(classified)
            else:
                dropped.append({**classified, "drop_reason": "no_key_rounds"})
        return kept, dropped

    def _intents(self, messages: list[Message]) -> dict[int, str]:
        """Return the intents of the key rounds, by the place of the assistant's message."""
        places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        found: dict[int, str] = {}
        for intent, detector in self.detectors.items():
            found |= {place: intent for place in places if place not in found and detector(messages, place)}
            if intent == _TOOL_CALL and found:
                break
        return found


def _is_tool_call(messages: list[Message], place: int) -> bool:
    return bool(tool_calls_of(messages[place]))


def _is_code(messages: list[Message], place: int) -> bool:
    answer = thoughts_and_answer(messages[place])[1]
    if answer.count("```") >= 2:
        return True
    lines = sum(1 for _ in _CODE_LINE.finditer(answer))
    return lines >= 3 or (lines >= 1 and _CODE_WORDS.search(_question(messages, place)) is not None)


def _is_math(messages: list[Message], place: int) -> bool:
    answer = thoughts_and_answer(messages[place])[1]
    return _MATH.search(answer) is not None or (
        _MATH.search(_question(messages, place)) is not None and any(character.isdigit() for character in answer)
    )


def _is_complex_logic(messages: list[Message], place: int) -> bool:
    answer = thoughts_and_answer(messages[place])[1]
    return sum(1 for _ in _LOGIC.finditer(answer)) >= _MANY_CONNECTIVES


def _is_reasoning(messages: list[Message], place: int) -> bool:
    thoughts, answer = thoughts_and_answer(messages[place])
    return len(thoughts.strip()) >= _LONG_THOUGHTS or sum(1 for _ in _STEP.finditer(answer)) >= _MANY_STEPS


def _follows_complaint(messages: list[Message], place: int) -> bool:
    """Return whether this reply answers a complaint of the user about an earlier one."""
    asked = next((n for n in range(place - 1, -1, -1) if messages[n].get("role") == "user"), None)
    if asked is None or not any(message.get("role") == "assistant" for message in messages[:asked]):
        return False
    return _COMPLAINT.search(text_of(messages[asked])) is not None


def _question(messages: list[Message], place: int) -> str:
    """Return the user's text that this reply answers."""
    return next((text_of(m) for m in reversed(messages[:place]) if m.get("role") == "user"), "")


_DETECTORS: dict[str, Detector] = {
    _TOOL_CALL: _is_tool_call,
    "code": _is_code,
    "math": _is_math,
    "complex_logic": _is_complex_logic,
    "reasoning": _is_reasoning,
    "user_dissatisfaction": _follows_complaint,
}
