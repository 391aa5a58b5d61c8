"""Sleep mode, which vLLM has on GPUs only: what it frees, and what the sampler can do afterwards."""

from collections.abc import Iterator

import pytest
import torch

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import UserError
from twinkle.model import TransformersModel
from twinkle.sampler import vLLMSampler

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = "random://llama-1b"
PROMPT = {"input_ids": list(range(40, 72))}
GIB = 2**30


@pytest.fixture(scope="module")
def sampler() -> Iterator[vLLMSampler]:
    arguments = {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True, "enforce_eager": True, "max_model_len": 1024}
    sampler = vLLMSampler(MODEL, arguments)
    yield sampler
    sampler.shutdown()


def drawn(sampler: vLLMSampler) -> list[int]:
    (response,) = sampler.sample([PROMPT], SamplingParams(max_tokens=8, temperature=0))
    return response.sequences[0].tokens


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_sleep_frees_the_cache_and_the_weights(sampler: vLLMSampler) -> None:
    before, tokens = free_bytes(), drawn(sampler)
    sampler.sleep()
    asleep = free_bytes()
    cache = 0.3 * torch.cuda.mem_get_info()[1] - 6 * GIB  # less the weights, and what vLLM keeps for itself
    assert asleep - before > cache
    with pytest.raises(UserError, match="wake_up"):
        drawn(sampler)
    sampler.wake_up(["weights"])
    with pytest.raises(UserError, match="wake_up"):
        drawn(sampler)
    sampler.wake_up()
    assert free_bytes() < asleep - cache
    assert drawn(sampler) == tokens


def test_weights_that_were_discarded_must_be_synchronised(sampler: vLLMSampler) -> None:
    tokens = drawn(sampler)
    model = TransformersModel(model_id=MODEL)
    sampler.sleep(level=2)
    sampler.wake_up()
    with pytest.raises(UserError, match="discarded"):
        drawn(sampler)
    CheckpointEngineManager(model, sampler).sync_weights()
    assert drawn(sampler) == tokens
