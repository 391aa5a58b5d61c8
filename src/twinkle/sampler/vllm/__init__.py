"""Sampling with vLLM, which runs in its own processes. Only this package and ``data_format.sampling`` import vLLM.

base_folder     the folder of the base model
engine_args     engine arguments: those that the configuration may set, and those that we set
batch_drawing   our own drawing, run inside vLLM: the same noise, truncation and log-probabilities as the torch sampler
samplers        this drawing in place of vLLM's own, in both of its model runners
gpu_worker      vLLM's worker processes on GPUs, with our drawing
cpu_worker      the same on CPUs
worker          methods of worker processes that replace the weights of the base model
prompts         prompts as vLLM takes them, with pictures for a vision model
engine          vLLM's asynchronous engine on a thread of its own
versions        adapter versions as files in memory, each under its own name
requests        an active request: the tokens of its samples, stop strings, streaming
self_check      the check that vLLM computes what the trainer computes, with LoRA on each kind of module
server_watch    ends vLLM's processes when the server's process is gone
vllm_sampler    all of these behind the interface of a sampler
"""

from typing import TYPE_CHECKING

from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.sampler.vllm.vllm_sampler import VllmSampler

__all__ = ["VllmSampler"]


def __getattr__(name: str) -> object:
    if name != "VllmSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load("twinkle.sampler.vllm.vllm_sampler", name)
