"""Samplers of a server."""

from twinkle_client.sampler.sampler import LocalSampler, Sampler, vLLMSampler

__all__ = ["LocalSampler", "Sampler", "vLLMSampler"]
