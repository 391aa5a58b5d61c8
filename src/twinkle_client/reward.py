"""The library's rewards, computed on the server. A script's own class that inherits from Reward runs on the client."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle_client.remote import RemoteObject

__all__ = [
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "MultiModalAccuracyReward",
    "OlympiadBenchAccuracyReward",
    "OlympiadBenchFormatReward",
    "OlympiadBenchQualityReward",
    "Reward",
]

Trajectories = Sequence[Mapping[str, Any]]


class Reward(RemoteObject):
    """A reward: it returns a number for each trajectory's completion.

    The right answers are read from the trajectories unless ``ground_truths`` are given. A script's own reward
    inherits from this class and replaces ``__call__``; nothing of it is sent to the server.
    """

    processor_type: ClassVar[str] = "reward"

    def __call__(self, trajectories: Trajectories, ground_truths: Trajectories | None = None) -> list[float]:
        arguments = {"trajectories": trajectories}
        if ground_truths is not None:
            arguments["ground_truths"] = ground_truths
        rewards: list[float] = self.call("__call__", **arguments)
        return rewards


class FormatReward(Reward):
    pass


class GSM8KAccuracyReward(Reward):
    pass


class GSM8KFormatReward(Reward):
    pass


class MathReward(Reward):
    parameters: ClassVar[tuple[str, ...]] = ("ground_truth_key",)


class MultiModalAccuracyReward(Reward):
    pass


class OlympiadBenchAccuracyReward(Reward):
    pass


class OlympiadBenchFormatReward(Reward):
    pass


class OlympiadBenchQualityReward(Reward):
    pass
