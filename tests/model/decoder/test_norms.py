"""Fused norms replace a model's norms only if both agree, with and without gradients."""

import pytest
import torch

from tests.support.models.reference import toy_llama
from twinkle.model.decoder.fused import norms


def count(model: torch.nn.Module) -> int:
    return sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())


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
