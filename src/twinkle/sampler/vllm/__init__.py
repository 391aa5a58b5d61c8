"""Sampling with vLLM, in processes of its own. The only place that imports it.

engine_args     what the configuration may say to vLLM, and what we say to it ourselves
base_weights    a folder with the base model as vLLM reads it
processor       our own drawing, run inside vLLM: same noise, same truncation, same log-probabilities as elsewhere
message         how what was drawn travels through the numbers that vLLM hands out
engine          vLLM's asynchronous engine on a thread of its own
versions        adapters as files in memory, each version under a name of its own
requests        a request under way: the tokens of its samples, stop strings, what is streamed
self_check      whether vLLM computes what the trainer computes, with every kind of adapter
vllm_sampler    all of it behind the interface of a sampler
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.sampler.vllm.vllm_sampler import VllmSampler

__all__ = ["VllmSampler"]


def __getattr__(name: str) -> object:
    if name != "VllmSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("twinkle.sampler.vllm.vllm_sampler"), name)
