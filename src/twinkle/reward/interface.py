"""The interface of rewards: a number for each completion, computed from its text and the correct answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import user_data_get
from twinkle.errors import InvalidInputError

__all__ = ["Reward", "completion_text", "ground_truth", "paired"]

Trajectory = Mapping[str, Any]


class Reward(ABC):
    """The base class of rewards. A completion is the last assistant message of its trajectory.

    The correct answer is read from ``ground_truths``, one trajectory for each completion, or else from the trajectories
    themselves.
    """

    @abstractmethod
    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]: ...


def paired(
    trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None
) -> list[tuple[Trajectory, Trajectory]]:
    """Return each trajectory with the trajectory that holds its correct answer."""
    truths = trajectories if ground_truths is None else ground_truths
    if len(truths) != len(trajectories):
        raise InvalidInputError("ground_truths", f"{len(truths)} of them", f"one for each of {len(trajectories)}")
    return list(zip(trajectories, truths, strict=True))


def completion_text(trajectory: Trajectory) -> str:
    """Return the text of the last assistant message, or "" if there is none."""
    for message in reversed(_messages(trajectory)):
        if message.get("role") == "assistant":
            return content_text(message.get("content"))
    return ""


def last_message_text(trajectory: Trajectory) -> str:
    messages = _messages(trajectory)
    return content_text(messages[-1].get("content")) if messages else ""


def ground_truth(trajectory: Trajectory, *keys: str) -> Any:
    """Return the value of the first of ``keys`` in ``user_data``. Raise InvalidInputError if there is none."""
    for key in keys:
        value = user_data_get(trajectory.get("user_data"), key)
        if value is not None:
            return value
    raise InvalidInputError("user_data", trajectory.get("user_data"), f"must hold {' or '.join(map(repr, keys))}")


def content_text(content: object) -> str:
    """Return the text of a message's content. Blocks other than text are left out."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(block["text"] for block in content if isinstance(block, Mapping) and block.get("type") == "text")
    raise InvalidInputError("content", content, "text, or a list of blocks")


def _messages(trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
    messages = trajectory.get("messages")
    if messages is None:
        raise InvalidInputError("trajectories", sorted(trajectory), "must hold 'messages'")
    return messages
