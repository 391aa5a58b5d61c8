"""Settings for tests of the sampler. The small models are in tests/support/models (sampling.py, tiny_models.py)."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.models.token_costs import costs_measured_once


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread: models this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _token_costs_are_measured_once() -> Iterator[None]:
    """Measures the memory of a model's tokens for the first trainer on it only."""
    with costs_measured_once():
        yield
