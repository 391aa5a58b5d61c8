"""Metrics of training. The module behind a name, and with it torch, is imported when the name is first used."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.metric.completion import CompletionRewardMetric
    from twinkle.metric.embedding import EmbeddingMetric
    from twinkle.metric.interface import Metric
    from twinkle.metric.policy import CISPOMetric, GRPOMetric, GSPOMetric, PPOMetric
    from twinkle.metric.preference import DPOMetric
    from twinkle.metric.registry import metric_by_name
    from twinkle.metric.training import Accuracy, LossMetric, TrainMetric
    from twinkle.metric.value import PPOValueMetric

__all__ = [
    "Accuracy",
    "CISPOMetric",
    "CompletionRewardMetric",
    "DPOMetric",
    "EmbeddingMetric",
    "GRPOMetric",
    "GSPOMetric",
    "LossMetric",
    "Metric",
    "PPOMetric",
    "PPOValueMetric",
    "TrainMetric",
    "metric_by_name",
]

_HOME = {
    "Accuracy": "twinkle.metric.training",
    "CISPOMetric": "twinkle.metric.policy",
    "CompletionRewardMetric": "twinkle.metric.completion",
    "DPOMetric": "twinkle.metric.preference",
    "EmbeddingMetric": "twinkle.metric.embedding",
    "GRPOMetric": "twinkle.metric.policy",
    "GSPOMetric": "twinkle.metric.policy",
    "LossMetric": "twinkle.metric.training",
    "Metric": "twinkle.metric.interface",
    "PPOMetric": "twinkle.metric.policy",
    "PPOValueMetric": "twinkle.metric.value",
    "TrainMetric": "twinkle.metric.training",
    "metric_by_name": "twinkle.metric.registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
