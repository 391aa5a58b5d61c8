"""The memory of a full-parameter run: its price, what it really takes, and the refusal that names the bytes."""

import copy
import re

import pytest
import torch
from transformers import PreTrainedModel

from tests.model.full.plain_run import RUN, full_trainer, request, with_run
from tests.support.models.reference import toy_llama
from twinkle.errors import CapacityError, InvalidInputError, UnsupportedError
from twinkle.model import FullSpec, FullTrainer, LoraSpec, adopt_model

BASE = toy_llama()
COUNT = sum(parameter.numel() for parameter in BASE.parameters())


def half_model() -> PreTrainedModel:
    """Return the model with weights that bf16 holds."""
    return copy.deepcopy(BASE).bfloat16().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_price_of_a_run(dtype: torch.dtype) -> None:
    """fp32: weights are the master weights. bf16: a copy of 2 bytes beside them. The base is kept as bf16 here."""
    trainer = full_trainer(half_model(), dtype=dtype)
    memory, state = trainer.memory, trainer.memory.state
    assert memory.weights == dtype.itemsize * COUNT
    assert state.master == (0 if dtype == torch.float32 else 4 * COUNT)
    assert (state.moments, state.gradient, state.base) == (8 * COUNT, 8 * COUNT, 2 * COUNT)
    assert state.total == state.master + state.moments + state.gradient + state.base
    assert trainer.host_bytes_of(FullSpec()) == 16 * COUNT
    with pytest.raises(UnsupportedError, match="LoraSpec"):
        trainer.host_bytes_of(LoraSpec(4))
    for word in ("master weights", "moments", "gradient", "base model", "activations"):
        assert word in str(memory)


def test_a_run_takes_what_was_priced() -> None:
    """Moments from the start, a gradient in a window. Both are within the price, which has room for two gradients."""
    trainer = with_run(BASE)
    assert trainer.host_bytes() == 8 * COUNT
    trainer.forward_backward([request(BASE, 1)])
    assert trainer.host_bytes() == 12 * COUNT
    assert trainer.host_bytes() <= trainer.host_bytes_of(FullSpec())
    trainer.zero_grad(RUN)
    assert trainer.host_bytes() == 8 * COUNT


def test_a_model_that_does_not_fit_is_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before anything is allocated or changed."""
    needed = 4 * COUNT + 16 * COUNT + 4 * COUNT  # weights, moments and gradient, base
    model = adopt_model(copy.deepcopy(BASE))

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("twinkle.model.full.assembly.split_masters", never)
    gib = 2**30
    found = rf"needs {needed / gib:.2f} GiB without activations.*{needed / 2 / gib:.2f} GiB may be used.*fsdp_size"
    with pytest.raises(CapacityError, match=found):
        FullTrainer(model, model_id="test", memory_budget_bytes=needed // 2)
    with pytest.raises(AssertionError):
        FullTrainer(model, model_id="test", memory_budget_bytes=needed + 1)


def test_a_budget_bounds_everything() -> None:
    budget = 24 * COUNT + 4 * 2**20
    memory = full_trainer(BASE, memory_budget_bytes=budget).memory
    assert memory.weights + memory.state.total + memory.activations + memory.adapters <= budget
    assert 0 < memory.tokens < 4096


def test_memory_that_is_left_can_be_set_aside() -> None:
    trainer = full_trainer(BASE, memory_budget_bytes=2**28)
    left = trainer.memory.adapters
    assert left > 2**20
    trainer.set_aside(2**20)
    assert trainer.memory.adapters == left - 2**20
    with pytest.raises(CapacityError, match=re.escape(f"{left / 2**20:.0f} MiB are asked for")):
        trainer.set_aside(left)
    assert trainer.memory.adapters == left - 2**20


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_tokens_per_batch: got 0"):
        full_trainer(BASE, max_tokens_per_batch=0)
    with pytest.raises(InvalidInputError, match=r"device: got 'meta', allowed: cpu or cuda"):
        FullTrainer.from_pretrained("random://llama-tiny", device="meta")


def test_numbers_are_those_of_the_passes() -> None:
    trainer = with_run(BASE)
    before = trainer.numbers()
    trainer.forward_backward([request(BASE, 1, 9, 14)])
    after = trainer.numbers()
    assert (after.resident_adapters, after.paged_adapters) == (1, 0)
    assert after.token_rows - before.token_rows == 23
    assert trainer.vocabulary_size() == BASE.config.vocab_size
