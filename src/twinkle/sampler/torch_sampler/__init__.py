"""The sampler in plain torch: continuous batching over a paged cache, with different adapter versions in one batch."""

from typing import TYPE_CHECKING

from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.sampler.torch_sampler.sampler import TorchSampler

__all__ = ["TorchSampler"]


def __getattr__(name: str) -> object:
    if name != "TorchSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load("twinkle.sampler.torch_sampler.sampler", name)  # imports torch
