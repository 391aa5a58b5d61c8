"""The kernels that change states of linear attention by one token, compared with the formulas.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from tests.support.models.sampling import assert_same_samples, prompt, request, run, toy_tokenizer, toy_trainer
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec
from twinkle.sampler import TorchSampler
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs
from twinkle.sampler.torch_sampler.model_pass import ModelPass
from twinkle.sampler.torch_sampler.states.tokens import TokenRows, _kernels_agree, compare_kernels

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("sizes", [(16, 16), (128, 128), (24, 40), (64, 256)], ids=str)
def test_states_and_outputs_are_those_of_the_formulas(sizes: tuple[int, int]) -> None:
    """Slots may hold NaN where a sequence begins; slots of other sequences stay as they are."""
    for found, expected in compare_kernels(DEVICE, torch.float32, *sizes):
        assert (found - expected).norm() < 2e-6 * expected.norm()


def test_the_kernels_are_used_where_they_agree() -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    assert _kernels_agree(DEVICE, dtype, 128, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the captured work in Triton's interpreter")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_captured_work_gives_the_same_samples(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences and a row of padding: slots change from sample to sample."""

    @torch.no_grad()
    def uncaptured(self: DecodeGraphs, size: int, lora: bool, *_pool: object) -> SimpleNamespace:
        self._pass(size, lora)
        return SimpleNamespace(replay=lambda: self._pass(size, lora), pool=lambda: None)

    monkeypatch.setattr(DecodeGraphs, "_capture", uncaptured)
    monkeypatch.setattr(TokenRows, "_runs_kernels", lambda self, dtype: True)
    # Passes on a CPU compute adapters on experts by other code, which graphs do not use.
    spec = LoraSpec(rank=8, seed=1, train_mlp=family == "qwen3_5")
    trainer = toy_trainer({"a": spec}, tiny_model(family))
    captured, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=4) for _ in range(2))
    for sampler in (captured, plain):
        sampler.publish("a", "a")
    asked = [request(f"r{n}", ("a", None)[n % 2], prompt(3 + 9 * n, n), 2, max_tokens=5, seed=n) for n in range(3)]
    expected = run(plain, asked)
    captured._graphs = DecodeGraphs(trainer.engine, captured._cache, 4, 64, captured._versions, fuse=True)
    captured._pass = ModelPass(trainer.engine, captured._cache, captured._graphs)
    for name, result in run(captured, asked).items():
        assert_same_samples(result, expected[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures graphs")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_captured_decoding_gives_what_plain_passes_give(family: str, count: int) -> None:
    trainer = tiny_trainer(tiny_model(family).to("cuda", torch.bfloat16))
    trainer.create_adapter("a", LoraSpec(rank=8, seed=1))
    captured, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=40) for _ in range(2))
    for sampler in (captured, plain):
        sampler.publish("a", "a")
    assert captured._graphs is not None
    plain._graphs = None
    asked = [
        request(f"r{n}", ("a", None)[n % 2], prompt(1 + 29 * n % 100, n), 1 + n % 3, max_tokens=21, temperature=0.0)
        for n in range(count)
    ]
    ours, theirs = run(captured, asked), run(plain, asked)
    equal = total = 0
    for name, result in ours.items():
        for left, right in zip(result.sequences, theirs[name].sequences, strict=True):
            same = left.tokens == right.tokens
            until = len(same) if same.all() else int(same.argmin())
            assert abs(left.logprobs[:until] - right.logprobs[:until]).max(initial=0.0) < 0.05
            equal, total = equal + until, total + len(same)
    assert equal > 0.3 * total  # tokens differ after the first two whose likelihoods are too close for bf16
