"""Sampling: generate with the base model and with published adapter versions.

What :class:`TorchSampler` needs (torch and transformers, above all) is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle.sampler.types import (
    Finished,
    SampledSequence,
    SampleFailure,
    Sampler,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TopLogprobs,
)

if TYPE_CHECKING:
    from twinkle.sampler.torch_sampler import TorchSampler

__all__ = [
    "Finished",
    "SampleFailure",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "Sampler",
    "SamplingParams",
    "TopLogprobs",
    "TorchSampler",
]


def __getattr__(name: str) -> object:
    if name != "TorchSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("twinkle.sampler.torch_sampler"), name)
