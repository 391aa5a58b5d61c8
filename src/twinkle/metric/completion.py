"""Metrics of a round of sampling: rewards, lengths of completions, and times."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle.metric.interface import Inputs, Metric, Outputs

__all__ = ["CompletionRewardMetric"]


class CompletionRewardMetric(Metric):
    """Mean and standard deviation of each reward, mean length of completions, mean times of a round.

    ``calculate`` does not reset, so that a round can be reported while it grows. A value that was never given is left
    out.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("completion_lengths", "generate_time", "rewards", "weight_sync_time")

    def reset(self) -> None:
        self._rewards: dict[str, list[float]] = {}
        self._lengths: list[float] = []
        self._generate: list[float] = []
        self._sync: list[float] = []

    def accumulate(
        self,
        inputs: Inputs | None = None,
        outputs: Outputs | None = None,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
        completion_lengths: Sequence[float] = (),
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
        **_: Any,
    ) -> None:
        for name, values in (rewards or {}).items():
            self._rewards.setdefault(name, []).extend(float(value) for value in values)
        self._lengths.extend(float(length) for length in completion_lengths)
        if generate_time is not None:
            self._generate.append(float(generate_time))
        if weight_sync_time is not None:
            self._sync.append(float(weight_sync_time))

    def calculate(self) -> dict[str, float]:
        parts = self.gather_results([(self._rewards, self._lengths, self._generate, self._sync)])
        result = self._mean_of("profiling/Time taken: move_model_to_sampler", [x for part in parts for x in part[3]])
        result |= self._mean_of("profiling/Time taken: generate", [x for part in parts for x in part[2]])
        for name in sorted({name for part in parts for name in part[0]}):
            values = [x for part in parts for x in part[0].get(name, [])]
            if values:
                result |= {f"train/{name}_reward": self._mean(values), f"train/{name}_reward_std": self._std(values)}
        return result | self._mean_of("train/completion_length", [x for part in parts for x in part[1]])

    @classmethod
    def _mean_of(cls, key: str, values: Sequence[float]) -> dict[str, float]:
        return {key: cls._mean(values)} if values else {}

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if len(values) > 0 else -1.0

    @staticmethod
    def _std(values: Sequence[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0
