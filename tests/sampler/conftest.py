"""The tests of the sampler use the small models of the trainer's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "model"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """On models this small threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
