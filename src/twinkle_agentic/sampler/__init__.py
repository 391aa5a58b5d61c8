"""Samplers made of other samplers."""

from twinkle_agentic.sampler.router_sampler import RoutedSequence, RouterSampler

__all__ = ["RoutedSequence", "RouterSampler"]
