"""Adapters on experts on a GPU: equal to the CPU in fp32, bit-equal in replay, captured, and never waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.models.reference import (
    TOLERANCE,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    relative_error,
    with_random_weights,
)
from tests.support.models.sampling import prompt, request, run, toy_sampler
from tests.support.models.tiny_models import EXPERT_FAMILIES, the_result, tiny_model, tiny_trainer
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.decoder.experts import forward
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.lora import LayerLora
from twinkle.model.decoder.lora.segments import Segment, SegmentLora
from twinkle.model.decoder.lora.stacks import RowLayout, Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SPECS = {
    "rank 5": LoraSpec(5, alpha=7.5, seed=1),
    "attention": LoraSpec(16, alpha=32, seed=2, train_mlp=False),
    "experts": LoraSpec(16, alpha=32, seed=3, train_attn=False),
    "rank 40": LoraSpec(40, alpha=50, seed=4),
}
LENGTHS = {"rank 5": (17, 30), "attention": (40,), "experts": (12, 12), "rank 40": (11, 64)}


def trainer_on(device: str, family: str, dtype: torch.dtype = torch.float32) -> Trainer:
    trainer = tiny_trainer(tiny_model(family).to(device, dtype))
    for number, (name, spec) in enumerate(SPECS.items()):
        trainer.create_adapter(name, spec)
        trainer.restore(name, with_random_weights(trainer, name, seed=number))
    return trainer


def items(family: str) -> list[TrainItem]:
    model = tiny_model(family)
    return [
        TrainItem(name, [random_datum(model, "cross_entropy", length, seed=length) for length in LENGTHS[name]])
        for name in SPECS
    ]


def results(trainer: Trainer, batch: list[TrainItem]) -> list[TrainResult]:
    return [the_result(outcome) for outcome in trainer.forward_backward(batch)]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_fp32_equals_the_cpu(family: str) -> None:
    on_gpu, on_cpu = trainer_on("cuda", family), trainer_on("cpu", family)
    tolerance = 5e-5 if family == "qwen3_5_moe" else TOLERANCE  # the delta rule adds up many more numbers
    for step in range(2):
        ours, theirs = (results(trainer, items(family)) for trainer in (on_gpu, on_cpu))
        for name, left, right in zip(SPECS, ours, theirs, strict=True):
            assert_logprobs_close(left.logprobs, right.logprobs, tolerance)
            assert_tensors_close(on_gpu.gradients(name), on_cpu.gradients(name), tolerance)
            for trainer in (on_gpu, on_cpu):
                trainer.optim_step(name, AdamParams(learning_rate=3e-3, eps=0.1 + 0.05 * step))
            assert_tensors_close(on_gpu.weights(name), on_cpu.weights(name), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replay_of_the_same_batch_is_bit_equal(dtype: torch.dtype) -> None:
    outcomes = []
    for _ in range(2):
        trainer = trainer_on("cuda", "qwen3_moe", dtype)
        logprobs = [row for result in results(trainer, items("qwen3_moe")) for row in result.logprobs]
        gradients = [each for name in SPECS for each in trainer.gradients(name).values()]
        outcomes.append([*logprobs, *gradients])
    for left, right in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(left, right)


# --- one layer of a real width ----------------------------------------------------------------------------------------

EXPERTS, CHOICES, HIDDEN, WIDTH, TENANTS, ROWS = 128, 8, 512, 256, 16, 96
NAMES = ("mlp.experts.w1", "mlp.experts.w2", "mlp.experts.w3")


class Layer:
    """The experts of one layer with adapters of two ranks, and rows of 16 tenants."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS)
        config._experts_implementation = "eager"
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cuda") * size).bfloat16().to(dtype)

        self.experts: Any = Qwen3MoeExperts(config).to("cuda", dtype).requires_grad_(False)
        for parameter in self.experts.parameters():
            parameter.copy_(normal(*parameter.shape, size=parameter.shape[2] ** -0.5))
        self.experts.adapter_name = "mlp.experts"
        up, down = (
            Target(NAMES[0], HIDDEN, WIDTH, copies=(1, EXPERTS)),
            Target(NAMES[1], WIDTH, HIDDEN, 0, (EXPERTS, 1)),
        )
        targets = (up, down, Target(NAMES[2], HIDDEN, WIDTH, copies=(1, EXPERTS)))
        self.segments = []
        for number, rank in enumerate((8, 32)):
            layout, sizes = RowLayout(rank, targets), (ROWS,) * (TENANTS // 2)
            first = number * sum(sizes)
            self.segments.append(
                SegmentLora(
                    Segment(first, first + sum(sizes), Groups(sizes)),
                    layout,
                    normal(len(sizes), layout.size, size=0.05),
                    torch.zeros(len(sizes), layout.size, device="cuda"),
                )
            )
        self.experts.lora = LayerLora("", self.segments, None)
        count = TENANTS * ROWS
        self.x_TH, self.dy_TH = normal(2, count, HIDDEN)
        self.x_TH.requires_grad_()
        self.chosen_TK = torch.rand(count, EXPERTS, generator=generator, device="cuda").argsort(1)[:, :CHOICES]
        self.weights_TK = torch.rand(count, CHOICES, generator=generator, device="cuda").bfloat16().to(dtype)
        self.weights_TK.requires_grad_()

    def compute(self) -> list[Tensor]:
        """Return the output and the gradients of the rows and of the router's weights; add those of the adapters."""
        y_TH = forward.experts_forward(self.experts, self.x_TH, self.chosen_TK, self.weights_TK)
        return [y_TH.detach(), *torch.autograd.grad(y_TH, (self.x_TH, self.weights_TK), self.dy_TH)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_kernels_equal_the_plain_loops(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Layer(dtype)
    found = ours.compute()
    monkeypatch.setattr(forward, "runs_kernels", lambda x_TH: False)
    exact = Layer(torch.float32)
    expected = exact.compute()
    pairs = [*zip(found, expected, strict=True)]
    for left, right in zip(ours.segments, exact.segments, strict=True):
        for name in NAMES:
            views = (each.layout.views(each.gradient_GP, name) for each in (left, right))
            pairs += zip(*views, strict=True)
    for left, right in pairs:
        assert relative_error(left.float().cpu().numpy(), right.cpu().numpy()) <= bound


def test_the_host_never_waits() -> None:
    layer = Layer(torch.bfloat16)
    layer.compute()  # compiles the kernels
    again = Layer(torch.bfloat16)
    torch.cuda.synchronize()
    with no_waiting():
        again.compute()


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_captured_decoding_with_several_versions() -> None:
    """Log-probabilities of samples are those of the trainer, but where two experts' scores tie in bf16."""
    trainer = trainer_on("cuda", "qwen3_moe", torch.bfloat16)
    sampler, tokens = toy_sampler(trainer), prompt(23)
    assert sampler._graphs is not None, "decoding was not captured"
    assert all(sampler._graphs.takes(trainer.pool.freeze(name)) for name in SPECS)
    names: list[str | None] = [None, *SPECS]
    found = run(sampler, [request(str(name), name, tokens, max_tokens=8, temperature=0.0) for name in names])
    distances = []
    for name in SPECS:
        (sequence,) = found[name].sequences
        whole = np.concatenate([tokens, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(name, [Datum(whole[:-1], whole[1:])])])[0])
        distances.append(np.abs(sequence.logprobs - scored.logprobs[0][len(tokens) - 1 :]))
    assert np.median(np.concatenate(distances)) <= 0.02
    assert len({tuple(found[str(name)].sequences[0].logprobs) for name in names}) == len(names)


def test_decoding_in_fp32_equals_the_trainer() -> None:
    """Without captured graphs: they are in bf16 alone."""
    trainer = trainer_on("cuda", "mixtral")
    sampler, tokens = toy_sampler(trainer), prompt(23)
    found = run(sampler, [request(name, name, tokens, max_tokens=6, temperature=0.0) for name in SPECS])
    for name in SPECS:
        (sequence,) = found[name].sequences
        whole = np.concatenate([tokens, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(name, [Datum(whole[:-1], whole[1:])])])[0])
        assert_numbers_close(sequence.logprobs, scored.logprobs[0][len(tokens) - 1 :])
