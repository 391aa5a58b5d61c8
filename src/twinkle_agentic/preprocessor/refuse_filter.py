"""Replies in which the assistant refuses."""

import re

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, drop_rows, messages_of, thoughts_and_answer

__all__ = ["RefuseFilter"]

# Each pattern speaks of the speaker ("I", "as an AI", 我, 私, 저): a reply about somebody else's refusal is no refusal.
_NOT = (
    r"(?:can(?:'|’)?t|cannot|can not|am unable to|am not able to|won(?:'|’)?t|will not|must decline to|must refuse to)"
)
_HELP = (
    r"(?:assist|help|comply|fulfil|fulfill|answer (?:that|this|your)|discuss|engage|do (?:that|this)|continue with|"
    r"participate|"
    r"(?:provide|create|generate|write|share|offer|support|give you) (?:\w+ )?"
    r"(?:that|this|such|any|content|code|instructions|information|advice|details|help|guidance|assistance)\b)"
)
_ENGLISH = (
    rf"\bI(?:'m| am)? (?:\w+ )?{_NOT} (?:\w+ )?{_HELP}",
    r"\bI(?:'m|’m| am) (?:\w+ )?(?:unable|not able|not allowed|not permitted|not comfortable) (?:to|with)\b",
    r"\bI(?:'m|’m| am) (?:\w+ )?sorry,? but (?:as an AI|I (?:can(?:'|’)?t|cannot|won(?:'|’)?t|am unable|am not able))",
    r"\bI (?:must|have to|need to) (?:\w+ )?(?:decline|refuse)\b",
    r"\bas an? (?:AI|artificial intelligence|language model)[^.!?\n]{0,60}?"
    r"\bI (?:can(?:'|’)?t|cannot|am unable|am not able)",
    r"\b(?:goes|is) against my (?:programming|guidelines|principles)\b",
)
_CHINESE = (
    r"我(?:无法|不能|没办法|没有办法|不可以|不会)(?:为您|为你|给您|给你|向您|向你|直接|继续)?"
    r"(?:提供|回答|协助|帮助|帮您|帮你|满足|完成|生成|讨论|参与|支持|执行)",
    r"(?:作为|身为)(?:一个|一名)?(?:AI|人工智能|语言模型|大模型|智能助手)[^。！？\n]{0,40}?(?:无法|不能|不会)",
    r"(?:很抱歉|抱歉|对不起|非常抱歉)[，,]?(?:但)?我(?:无法|不能|没办法|不会)",
    r"我(?:必须|只能|不得不)拒绝",
)
_JAPANESE = (
    r"(?:申し訳(?:ありません|ございません)|すみません)[^。\n]{0,40}?(?:できません|お答えできません|致しかねます|いたしかねます)",
    r"私(?:は|には)[^。\n]{0,40}?(?:お手伝い|お答え|提供|対応|支援)(?:する(?:こと)?(?:は|が))?(?:できません|できかねます)",
)
_KOREAN = (
    r"(?:죄송하지만|죄송합니다만|죄송합니다)[^。.\n]{0,40}?(?:수 없습니다|드릴 수 없|할 수 없|어렵습니다)",
    r"저는 [^.\n]{0,40}?(?:도와드릴|제공할|답변할|대답할) 수 없습니다",
)
_REFUSAL = re.compile("|".join((*_ENGLISH, *_CHINESE, *_JAPANESE, *_KOREAN)), re.IGNORECASE)


class RefuseFilter:
    """Drops rows whose first assistant text, without its thoughts, refuses to answer (``refusal``).

    Only a refusal in the first person counts, in English, Chinese, Japanese or Korean, and only within the first
    ``check_window`` characters.
    """

    def __init__(self, check_window: int = 600) -> None:
        if not isinstance(check_window, int) or check_window < 1:
            raise InvalidInputError("check_window", check_window, "a number of characters ≥ 1")
        self.check_window = check_window

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        for message in messages_of(row):
            if message.get("role") != "assistant":
                continue
            answer = thoughts_and_answer(message)[1]
            if answer:  # a message without text, for example a tool call, is not the first text
                return "refusal" if _REFUSAL.search(answer[: self.check_window]) else None
        return None
