"""One vLLM engine for all tests that do not kill it. Where vLLM is not installed everything here is skipped."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# Servers for tests, and what the trainer's tests compare with.
from tests.sampler.vllm.vllm_model import ENGINE_ARGS, SPECS, make_adapter, write_model
from twinkle import hub
from twinkle.model import Trainer
from twinkle.sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler


@pytest.fixture(autouse=True, scope="session")
def _installed() -> None:
    torch.set_num_threads(1)  # on models this small threads only wait for each other


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-vllm` does that")
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def trainer(model_dir: Path) -> Trainer:
    """With an adapter for each of SPECS, which tests leave as they are."""
    trainer = Trainer.from_pretrained(str(model_dir), device="cpu", dtype="fp32", memory_budget_bytes=2**30)
    for number, (name, spec) in enumerate(SPECS.items()):
        make_adapter(trainer, name, spec, seed=number)
    return trainer


@pytest.fixture(scope="session")
def sampler(trainer: Trainer, model_dir: Path) -> "Iterator[VllmSampler]":
    """Each adapter is published under its own name."""
    from twinkle.sampler.vllm import VllmSampler

    sampler = VllmSampler(trainer, hub.load_tokenizer(str(model_dir)), engine_args=ENGINE_ARGS)
    for name in SPECS:
        sampler.publish(name, name)
    yield sampler
    sampler.close()
    assert not sampler._files.root.exists()


@pytest.fixture(scope="session")
def torch_sampler(trainer: Trainer, model_dir: Path) -> TorchSampler:
    """The same versions on the trainer's own model."""
    sampler = TorchSampler(trainer, hub.load_tokenizer(str(model_dir)), kv_budget_bytes=2**24)
    for name in SPECS:
        sampler.publish(name, name)
    return sampler
