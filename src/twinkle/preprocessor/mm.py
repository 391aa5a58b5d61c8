"""Preprocessors of datasets with images. Images are passed on unchanged."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, Trajectory
from twinkle.data_format.columns import Columns, Row
from twinkle.errors import InvalidInputError
from twinkle.preprocessor.interface import Preprocessor, by_row, column, notes, text_message

__all__ = ["CLEVRProcessor", "OlympiadBenchProcessor"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OLYMPIAD_IMAGES = [f"image_{number}" for number in range(1, 10)]

_CLEVR_SYSTEM = (
    "You are a helpful assistant that answers questions about pictures. Think between <think> and </think>, then give "
    "the answer between <answer> and </answer>."
)
_OLYMPIAD_SYSTEM = {
    "zh": "你是数学与物理竞赛的解题助手。请逐步推理，并把最终答案写在 \\boxed{} 中。",
    "en": "You solve olympiad problems of mathematics and physics. Reason step by step; put the answer in \\boxed{}.",
}


class CLEVRProcessor(Preprocessor):
    """Reads the columns ``image``, ``problem`` and ``solution``.

    What the solution has between <answer> tags, else the whole solution, goes to ``user_data`` as ``ground_truth``; the
    whole solution also as ``solution``.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = _CLEVR_SYSTEM if system is None else system

    def preprocess(self, row: Row) -> Trajectory:
        solution = str(column(row, "solution"))
        tagged = _ANSWER.search(solution)
        answer = tagged[1] if tagged else solution
        messages = [
            _block_message("system", _text(self.system)),
            _block_message("user", _image(column(row, "image")), _text(column(row, "problem"))),
        ]
        return {"messages": messages, "user_data": notes(ground_truth=answer.strip(), solution=solution)}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


class OlympiadBenchProcessor(Preprocessor):
    """Reads the column ``question`` and, if present, ``context``, ``final_answer`` and ``image_1`` to ``image_9``.

    The final answers are joined by commas and go to ``user_data`` as ``ground_truth``.
    """

    def __init__(self, system: str | None = None, language: str = "zh") -> None:
        if language not in _OLYMPIAD_SYSTEM:
            raise InvalidInputError("language", language, ", ".join(_OLYMPIAD_SYSTEM))
        self.system = _OLYMPIAD_SYSTEM[language] if system is None else system

    def preprocess(self, row: Row) -> Trajectory:
        images = [_image(row[name]) for name in _OLYMPIAD_IMAGES if row.get(name) is not None]
        texts = [text for text in (row.get("context"), column(row, "question")) if text]
        messages: list[Message]
        if images:
            user = _block_message("user", *images, *map(_text, texts))
            messages = [_block_message("system", _text(self.system)), user]
        else:
            messages = [text_message("system", self.system), text_message("user", "\n\n".join(texts))]
        answers = row.get("final_answer")
        listed = answers if isinstance(answers, list | tuple) else [] if answers is None else [answers]
        joined = ", ".join(str(answer) for answer in listed)
        known: dict[str, object] = {"ground_truth": joined}
        if row.get("is_multiple_answer") is not None:  # tells whether commas separate answers
            known["is_multiple_answer"] = row["is_multiple_answer"]
        return {"messages": messages, "user_data": notes(**known)}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


def _block_message(role: str, *blocks: dict[str, Any]) -> Message:
    return {"role": role, "content": list(blocks)}  # type: ignore[typeddict-item]  # role is one of four names


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: object) -> dict[str, Any]:
    return {"type": "image", "image": image}
