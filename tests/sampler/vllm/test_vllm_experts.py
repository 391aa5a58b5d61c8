"""Adapters on experts in vLLM: it applies them on a GPU, and on a CPU they are refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sampler.vllm.vllm_model import make_adapter, prompt, request, run
from twinkle.errors import UnsupportedError
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import TorchSampler

pytestmark = pytest.mark.vllm

# The share must be free when vLLM starts; it is not the size of the cache.
CACHE = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
SPECS = {
    "shared-outer": LoraSpec(8, seed=1),
    "independent": LoraSpec(8, seed=2, experts="independent"),
    "attention": LoraSpec(16, seed=3, train_mlp=False),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["qwen3-moe-tiny", "qwen3-vl-moe-tiny", "gpt-oss-tiny", "qwen3.5-moe-tiny"])
def test_vllm_computes_what_the_trainer_does(model: str) -> None:
    from twinkle.sampler.vllm import VllmSampler

    trainer = Trainer.from_pretrained(f"random://{model}", device="cuda", dtype="bf16", memory_budget_bytes=8 * 2**30)
    # Where several layers are one for vLLM, the adapter has the sum of their ranks there.
    options = {"max_model_len": 512, "max_num_seqs": 16, "max_loras": 4, "max_lora_rank": 64, **CACHE}
    sampler = VllmSampler(trainer, None, engine_args=options)
    scorer = TorchSampler(trainer, None, max_sequences=4)
    try:
        tokens = prompt(20)
        for number, (name, spec) in enumerate(SPECS.items()):
            make_adapter(trainer, name, spec, seed=number, size=0.02)
            sampler.publish(name, name)
            scorer.publish(name, name)
            one = request("r", name, tokens, max_tokens=8, temperature=0.0)
            (found,) = run(sampler, [one])["r"].sequences
            whole = np.concatenate([tokens, found.tokens])
            asked = replace(request("r", name, whole, max_tokens=1), prompt_logprobs=True)
            scored = run(scorer, [asked])["r"]
            assert np.abs(found.logprobs - scored.prompt_logprobs[len(tokens) :]).mean() < 0.1
    finally:
        sampler.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_on_a_cpu_experts_are_refused(tmp_path: Path) -> None:
    from twinkle.sampler.vllm.versions import EXPERTS, AdapterWeights, VersionFiles

    trainer = Trainer.from_pretrained("random://qwen3-moe-tiny", device="cpu", dtype="fp32")
    for number, (name, spec) in enumerate(SPECS.items()):
        make_adapter(trainer, name, spec, seed=number)
    files = VersionFiles(tmp_path, torch.float32)
    for name in ("shared-outer", "independent"):
        adapter = AdapterWeights(*trainer.peft_adapter(name, torch.float32))
        with pytest.raises(UnsupportedError, match=r"vLLM does not apply LoRA on the experts.*train_mlp=False"):
            files.write(adapter, frozenset({EXPERTS}))
    trainer.create_adapter("fresh", LoraSpec(8, seed=4))  # B is zero: it is as good as the base model
    written = files.write(AdapterWeights(*trainer.peft_adapter("fresh", torch.float32)), frozenset({EXPERTS}))
    assert written.lora is not None
    files.close()
