"""The sampler in plain torch: continuous batching over a paged cache, with different adapter versions in one batch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.sampler.torch_sampler.sampler import TorchSampler

__all__ = ["TorchSampler"]


def __getattr__(name: str) -> object:
    if name != "TorchSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("twinkle.sampler.torch_sampler.sampler"), name)  # imports torch
