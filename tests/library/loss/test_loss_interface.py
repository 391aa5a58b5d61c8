"""What all losses have in common: names, flags and arguments."""

import inspect

import pytest

import twinkle.loss
from twinkle.errors import UnknownNameError
from twinkle.loss import CISPOLoss, DPOLoss, Loss, check_call_arguments, loss_by_name, torch_loss_mapping

NAMES = [
    "mse",
    "chunked_cross_entropy",
    "cross_entropy",
    "liger_fused_linear_cross_entropy",
    "gkd",
    "grpo",
    "gspo",
    "sapo",
    "cispo",
    "bnpo",
    "dr_grpo",
    "dpo",
    "simpo",
    "cpo",
    "orpo",
    "infonce",
    "ppo",
    "ppo_value",
]
LOSSES = list(torch_loss_mapping.values())


def test_names() -> None:
    assert sorted(torch_loss_mapping) == sorted(NAMES)
    for name, loss in torch_loss_mapping.items():
        assert loss_by_name(name) is loss_by_name(loss.__name__) is loss
        assert getattr(twinkle.loss, loss.__name__) is loss


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown loss 'GRPO'; known: BNPOLoss, .*, GRPOLoss, .*, dr_grpo, .*gspo"
    ):
        loss_by_name("GRPO")


@pytest.mark.parametrize("loss", LOSSES)
def test_call_arguments_are_those_of_the_call(loss: type[Loss]) -> None:
    parameters = inspect.signature(loss.__call__).parameters.values()
    named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(named) == sorted(loss.call_arguments)


@pytest.mark.parametrize("loss", LOSSES)
def test_constructors_take_named_arguments_only(loss: type[Loss]) -> None:
    kinds = {p.kind for p in inspect.signature(loss).parameters.values()}
    if loss.__init__ is not object.__init__:
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert inspect.Parameter.VAR_POSITIONAL not in kinds
    with pytest.raises(TypeError):
        loss(no_such_setting=1)


def test_flags() -> None:
    flags = {
        name: (loss.require_logps, loss.require_logits, loss.require_embeddings, loss.require_values)
        for name, loss in torch_loss_mapping.items()
    }
    needs_logits = {"mse", "chunked_cross_entropy", "liger_fused_linear_cross_entropy", "gkd"}
    needs_others = needs_logits | {"infonce", "ppo_value"}
    for name, values in flags.items():
        expected = (name not in needs_others, name in needs_logits, name == "infonce", name == "ppo_value")
        assert values == expected


def test_arguments_that_nobody_knows() -> None:
    check_call_arguments(["advantages", "ref_outputs"], [CISPOLoss(), DPOLoss()])
    with pytest.raises(
        UnknownNameError, match="'advantage'; known: advantages, num_items_in_batch, old_logps, ref_logps"
    ):
        check_call_arguments(["advantages", "advantage"], [CISPOLoss()])
    with pytest.raises(UnknownNameError, match="'advantage'; known: none"):
        check_call_arguments(["advantage"], [])
