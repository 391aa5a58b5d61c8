"""Fused norms replace a model's norms only if both agree, with and without gradients."""

import copy

import pytest
import torch

from tests.support.models.reference import relative_error, toy_llama
from tests.support.models.tiny_models import tiny_model
from twinkle.model.decoder.fused import norms


def count(model: torch.nn.Module) -> int:
    return sum("RMSNorm" in type(module).__name__ for module in model.modules())


def test_all_norms_of_a_llama_are_fused() -> None:
    model = toy_llama()
    assert norms.fuse_norms(model) == 2 * model.config.num_hidden_layers + 1
    assert count(model) == 0


@pytest.mark.parametrize("trained", [True, False])
def test_a_norm_that_computes_something_else_is_left_alone(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused norm is wrong in one mode, with or without gradients."""
    forward = norms.FusedRmsNorm.forward

    def wrong(self: norms.FusedRmsNorm, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (1.1 if torch.is_grad_enabled() == trained else 1.0)

    monkeypatch.setattr(norms.FusedRmsNorm, "forward", wrong)
    model = toy_llama()
    before = count(model)
    assert norms.fuse_norms(model) == 0
    assert count(model) == before


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5"])
def test_norms_of_other_forms_are_fused(family: str) -> None:
    """Gemma and Qwen3.5 add 1 to the weight, and linear attention multiplies with a gate."""
    plain = tiny_model(family)
    fused = copy.deepcopy(plain)
    expected = count(plain)
    assert norms.fuse_norms(fused) == expected
    assert count(fused) == 0
    ids = torch.randint(3, plain.config.vocab_size, (1, 19), generator=torch.Generator().manual_seed(0))
    found = []
    for model in (plain, fused):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded).logits
        (gradient,) = torch.autograd.grad(logits.square().mean(), embedded)
        found.append((logits.detach().numpy(), gradient.numpy()))
    for theirs, ours in zip(*found, strict=True):
        assert relative_error(ours, theirs) < 1e-5
