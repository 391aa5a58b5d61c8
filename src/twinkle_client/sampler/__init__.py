"""Sampling from a server's models."""

from twinkle_client.sampler.sampler import LocalSampler, Sampler, hand_over, vLLMSampler

__all__ = ["LocalSampler", "Sampler", "hand_over", "vLLMSampler"]
