"""What the tests of the trainer share. Their small models are in reference.py and tiny_models.py."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import toy_llama
from twinkle.model import Trainer, adopt_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """On models this small threads only wait for each other: on a busy machine two are ten times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_trainer() -> Callable[..., Trainer]:
    """A trainer on a copy of a model (the toy, if none is given), which itself stays as it is."""

    def make(model: PreTrainedModel | None = None, **options: object) -> Trainer:
        own = toy_llama() if model is None else copy.deepcopy(model)
        return Trainer(adopt_model(own), model_id="test", **options)

    return make
