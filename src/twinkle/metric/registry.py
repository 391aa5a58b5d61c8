"""Metrics by name."""

from collections.abc import Mapping

from twinkle.errors import UnknownNameError
from twinkle.metric.completion import CompletionRewardMetric
from twinkle.metric.embedding import EmbeddingMetric
from twinkle.metric.interface import Metric
from twinkle.metric.policy import CISPOMetric, GRPOMetric, GSPOMetric, PPOMetric
from twinkle.metric.preference import DPOMetric
from twinkle.metric.training import Accuracy, LossMetric, TrainMetric
from twinkle.metric.value import PPOValueMetric

__all__ = ["METRICS", "metric_by_name"]

METRICS: Mapping[str, type[Metric]] = {
    "Accuracy": Accuracy,
    "CISPOMetric": CISPOMetric,
    "CompletionRewardMetric": CompletionRewardMetric,
    "DPOMetric": DPOMetric,
    "EmbeddingMetric": EmbeddingMetric,
    "GRPOMetric": GRPOMetric,
    "GSPOMetric": GSPOMetric,
    "LossMetric": LossMetric,
    "PPOMetric": PPOMetric,
    "PPOValueMetric": PPOValueMetric,
    "TrainMetric": TrainMetric,
}


def metric_by_name(name: str) -> type[Metric]:
    if name not in METRICS:
        raise UnknownNameError("metric", name, METRICS)
    return METRICS[name]
