"""Preprocessors of text datasets: instruction following, self-cognition, mathematics."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Message, Trajectory
from twinkle.data_format.columns import Columns, Row
from twinkle.preprocessor.interface import Preprocessor, by_row, column, notes, text_message

__all__ = [
    "AlpacaProcessor",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "GSM8KProcessor",
    "SelfCognitionProcessor",
]

_SELF_COGNITION_SYSTEM = "You are a helpful assistant."
_MATH_SYSTEM = "You are a math assistant. Solve the problem and reply with nothing but the final answer, in \\boxed{}."
_GSM8K_SYSTEM = "You are a careful math assistant. Reason step by step and write the final answer in \\boxed{}."
_COUNTDOWN_SYSTEM = (
    "You are a helpful assistant. Think about the problem first, then answer. Put your thoughts between <think> and "
    "</think> and your answer between <answer> and </answer>."
)
_COUNTDOWN_TASK = (
    "Write an equation that equals {target}, from the numbers {nums}. You may use +, -, * and / and brackets, and must "
    "use every number exactly once. Think between <think> and </think>, then give the equation between <answer> and "
    "</answer>, for example <answer>(1 + 2) * 3</answer>."
)


class CompetitionMathProcessor(Preprocessor):
    """Reads the columns ``problem`` (the question) and ``solution`` (the answer)."""

    def preprocess(self, row: Row) -> Trajectory:
        problem, solution = column(row, "problem"), column(row, "solution")
        return {"messages": [text_message("user", problem), text_message("assistant", solution)]}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


class CompetitionMathGRPOProcessor(Preprocessor):
    """Reads ``problem`` and ``solution`` for reinforcement learning.

    The solution goes to ``user_data``; the assistant's message is empty.
    """

    def preprocess(self, row: Row) -> Trajectory:
        messages = [
            text_message("system", _MATH_SYSTEM),
            text_message("user", column(row, "problem")),
            text_message("assistant", ""),
        ]
        return {"messages": messages, "user_data": notes(solution=column(row, "solution"))}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


class SelfCognitionProcessor(Preprocessor):
    """Reads the columns ``query`` and ``response``, and fills in ``{{NAME}}`` and ``{{AUTHOR}}`` in both."""

    def __init__(self, model_name: str | None = None, model_author: str | None = None) -> None:
        self.model_name = "twinkle robot" if model_name is None else model_name
        self.model_author = "twinkle lab" if model_author is None else model_author

    def preprocess(self, row: Row) -> Trajectory:
        messages = [
            text_message("system", _SELF_COGNITION_SYSTEM),
            text_message("user", self._filled(column(row, "query"))),
            text_message("assistant", self._filled(column(row, "response"))),
        ]
        return {"messages": messages}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)

    def _filled(self, text: str) -> str:
        return text.replace("{{NAME}}", self.model_name).replace("{{AUTHOR}}", self.model_author)


class AlpacaProcessor(Preprocessor):
    """Reads the columns ``instruction``, ``input`` and ``output``. A missing column counts as empty text."""

    def preprocess(self, row: Row) -> Trajectory:
        instruction, context, output = (row.get(name) or "" for name in ("instruction", "input", "output"))
        question = f"{instruction}\n{context}" if context else instruction
        return {"messages": [text_message("user", question), text_message("assistant", output)]}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


class CountdownProcessor(Preprocessor):
    """Reads the columns ``nums`` and ``response`` or ``target``. The task is to reach the target with these numbers."""

    def preprocess(self, row: Row) -> Trajectory:
        nums, target = list(column(row, "nums")), column(row, "response", "target")
        task = _COUNTDOWN_TASK.format(target=target, nums=nums)
        return {
            "messages": [text_message("system", _COUNTDOWN_SYSTEM), text_message("user", task)],
            "user_data": notes(target=target, nums=nums),
        }

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)


class GSM8KProcessor(Preprocessor):
    """Reads the columns ``question`` and ``answer``.

    The number after ``####`` in the answer goes to ``user_data`` as ``ground_truth``. The answer is a message only with
    ``add_assistant``.
    """

    def __init__(self, system: str | None = None, add_assistant: bool = False) -> None:
        self.system = _GSM8K_SYSTEM if system is None else system
        self.add_assistant = add_assistant

    def extract_ground_truth(self, answer: str) -> str:
        """Return the last number after ``####``, without commas; an empty text if there is none."""
        found = re.findall(r"####\s*(-?[\d,]+(?:\.\d+)?)", answer)
        return found[-1].replace(",", "") if found else ""

    def preprocess(self, row: Row) -> Trajectory:
        answer = column(row, "answer")
        messages: list[Message] = [text_message("system", self.system), text_message("user", column(row, "question"))]
        if self.add_assistant:
            messages.append(text_message("assistant", answer))
        return {"messages": messages, "user_data": notes(ground_truth=self.extract_ground_truth(answer))}

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        return by_row(self.preprocess, columns)
