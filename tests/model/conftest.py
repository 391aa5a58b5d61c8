"""Fixtures for tests of the trainer. The small models are in tests/support/models (reference.py, tiny_models.py)."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import toy_llama
from tests.support.models.token_costs import costs_measured_once
from twinkle.model import Trainer, adopt_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread.

    Models this small gain nothing from threads, and on a busy machine two are ten times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _token_costs_are_measured_once() -> Iterator[None]:
    """Measures the memory of a model's tokens for the first trainer on it only."""
    with costs_measured_once():
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Runs torch on two threads during this test."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_trainer() -> Callable[..., Trainer]:
    """``make_trainer(model=None, **options)`` returns a trainer on a copy of the model (default: the toy Llama)."""

    def make(model: PreTrainedModel | None = None, **options: object) -> Trainer:
        own = toy_llama() if model is None else copy.deepcopy(model)
        return Trainer(adopt_model(own), model_id="test", **options)

    return make
