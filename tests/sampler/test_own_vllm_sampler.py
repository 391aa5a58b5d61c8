"""vLLMSampler without vLLM or without a GPU; the tests in tests/sampler/vllm sample with it."""

import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle.sampler import vLLMSampler
from twinkle.sampler.script import own_vllm_sampler
from twinkle.sampler.script.vllm_options import VllmOptions


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


def test_engine_arguments_that_the_sampler_follows_itself():
    plain = VllmOptions.read({"max_model_len": 64, "enforce_eager": True, "logprobs_mode": "processed_logprobs"})
    assert plain.engine_args == {"max_model_len": 64, "enforce_eager": True, "logprobs_mode": "processed_logprobs"}
    assert plain.adapters
    plain.check(SamplingParams(temperature=0.5, logprobs=8, max_tokens=4))
    teacher = VllmOptions.read({"logprobs_mode": "raw_logprobs", "max_logprobs": 64, "enable_lora": False})
    assert (teacher.engine_args, teacher.adapters) == ({}, False)
    teacher.check(SamplingParams(temperature=0.5, prompt_logprobs=64, max_tokens=0))  # prompts have no temperature
    teacher.check(SamplingParams(temperature=0.5, max_tokens=4))  # nothing is reported
    teacher.check(SamplingParams(temperature=1.0, logprobs=1, max_tokens=4))
    with pytest.raises(InvalidInputError, match=r"temperature: got 0.5, .*raw_logprobs"):
        teacher.check(SamplingParams(temperature=0.5, logprobs=1, max_tokens=4))
    with pytest.raises(InvalidInputError, match=r"prompt_logprobs: got 65, .*max_logprobs"):
        teacher.check(SamplingParams(max_tokens=0, prompt_logprobs=65))


@pytest.mark.parametrize(
    "given",
    [{"enable_lora": 1}, {"enable_lora": False, "max_lora_rank": 8}, {"max_logprobs": -1}, {"max_logprobs": 10**6}],
)
def test_engine_arguments_that_would_change_nothing(given):
    with pytest.raises(InvalidInputError, match=r"engine_args\."):
        VllmOptions.read(given)
