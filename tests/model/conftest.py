"""Small models, built here; two threads, so that the tests run alike on any machine."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from reference import toy_llama
from transformers import PreTrainedModel

from twinkle.model import Trainer, adopt_model


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_trainer() -> Callable[..., Trainer]:
    """A trainer on a copy of a model (the toy, if none is given), which itself stays as it is."""

    def make(model: PreTrainedModel | None = None, **options: object) -> Trainer:
        own = toy_llama() if model is None else copy.deepcopy(model)
        return Trainer(adopt_model(own), model_id="test", **options)

    return make
