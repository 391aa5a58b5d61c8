"""Sampling from a server's models."""

from twinkle_client.compatibility import PATHS, missing
from twinkle_client.sampler.sampler import LocalSampler, Sampler, hand_over, vLLMSampler

__all__ = ["LocalSampler", "Sampler", "hand_over", "vLLMSampler"]


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
