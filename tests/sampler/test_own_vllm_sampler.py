"""vLLMSampler without vLLM or without a GPU; the tests in tests/sampler/vllm sample with it."""

import pytest
import torch

from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle.sampler import vLLMSampler
from twinkle.sampler.script import own_vllm_sampler


@pytest.mark.skipif(own_vllm_sampler.has_vllm(), reason="vLLM is installed")
def test_without_vllm_it_says_what_is_missing():
    with pytest.raises(MissingDependencyError, match="vLLMSampler needs the package 'vllm'"):
        vLLMSampler("random://llama-tiny")


def test_the_copy_of_the_model_gets_the_rest_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 100))
    assert own_vllm_sampler._rest_of_gpu({"gpu_memory_utilization": 0.5}) == 48
    for wrong in (None, 0.99, 0, "half"):
        with pytest.raises(InvalidInputError, match=r"engine_args.gpu_memory_utilization: got .*copy of the model"):
            own_vllm_sampler._rest_of_gpu({"gpu_memory_utilization": wrong})
