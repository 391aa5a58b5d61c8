"""Sampling: generate with the base model and with published adapter versions.

The heavy dependencies of :class:`TorchSampler`, :class:`LocalSampler` and :class:`vLLMSampler` (above all torch and
transformers) are imported when one of them is first used; vLLM itself when a :class:`vLLMSampler` is made.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load
from twinkle.sampler.types import (
    DrawnTokens,
    Finished,
    Progress,
    SampledSequence,
    SampleFailure,
    Sampler,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TopLogprobs,
)

if TYPE_CHECKING:
    from twinkle.sampler.script.local_sampler import LocalSampler, hand_over
    from twinkle.sampler.script.own_vllm_sampler import vLLMSampler
    from twinkle.sampler.torch_sampler.sampler import TorchSampler

__all__ = [
    "DrawnTokens",
    "Finished",
    "LocalSampler",
    "Progress",
    "SampleFailure",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "Sampler",
    "SamplingParams",
    "TopLogprobs",
    "TorchSampler",
    "hand_over",
    "vLLMSampler",
]

_LAZY = {
    "LocalSampler": "twinkle.sampler.script.local_sampler",
    "TorchSampler": "twinkle.sampler.torch_sampler.sampler",
    "hand_over": "twinkle.sampler.script.local_sampler",
    "vLLMSampler": "twinkle.sampler.script.own_vllm_sampler",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        return find_name(__name__, name)
    return load(_LAZY[name], name)
