"""The weights of a model that an engine runs have the names of its checkpoint, and can be replaced in place."""

import copy

import pytest
import torch

from tests.support.models.reference import toy_llama
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.model.decoder.architecture import read_architecture
from twinkle.model.decoder.base_weights import named_weights, put_weights
from twinkle.model.decoder.loading import adopt_model
from twinkle.model.trainer.engine import Engine


def installed() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a model of Transformers, and a copy of it that an engine has taken over."""
    plain = toy_llama()
    model = adopt_model(copy.deepcopy(plain))
    Engine(model, read_architecture(model), torch.device("cpu"), 64)
    return plain, model


def test_names_are_those_of_the_checkpoint() -> None:
    plain, model = installed()
    wanted, own = dict(plain.named_parameters()), named_weights(model)
    assert list(own) == list(wanted)
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def test_weights_are_replaced_in_place() -> None:
    plain, model = installed()
    addresses = {name: parameter.data_ptr() for name, parameter in named_weights(model).items()}
    new = {name: torch.randn_like(parameter) for name, parameter in plain.named_parameters()}
    assert put_weights(model, new.items()) == set(new)
    for name, parameter in named_weights(model).items():
        assert torch.equal(parameter, new[name])
        assert parameter.data_ptr() == addresses[name]


def test_a_wrong_name_or_shape_is_an_error() -> None:
    _, model = installed()
    with pytest.raises(UnknownNameError, match="nothing"):
        put_weights(model, [("nothing", torch.zeros(1))])
    with pytest.raises(InvalidInputError, match=r"model.norm.weight.*\(3,\)"):
        put_weights(model, [("model.norm.weight", torch.zeros(3))])
