"""One vLLM engine for all tests that do not kill it. All tests here are skipped if vLLM is not installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# Helpers for the small model that vLLM and the trainer share.
from tests.sampler.vllm.vllm_model import ENGINE_ARGS, SPECS, make_adapter, write_model
from twinkle import hub
from twinkle.model import Trainer
from twinkle.sampler import TorchSampler

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler


@pytest.fixture(autouse=True, scope="session")
def _installed() -> None:
    """Runs torch on one thread."""
    torch.set_num_threads(1)  # models this small gain nothing from more threads


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the small model. Skips the test if vLLM is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-vllm` does that")
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def trainer(model_dir: Path) -> Trainer:
    """A trainer with an adapter for each of SPECS. Tests must not change the adapters."""
    trainer = Trainer.from_pretrained(str(model_dir), device="cpu", dtype="fp32", memory_budget_bytes=2**30)
    for number, (name, spec) in enumerate(SPECS.items()):
        make_adapter(trainer, name, spec, seed=number)
    return trainer


@pytest.fixture(scope="session")
def sampler(trainer: Trainer, model_dir: Path) -> "Iterator[VllmSampler]":
    """The vLLM engine, with each adapter published under its own name."""
    from twinkle.sampler.vllm import VllmSampler

    sampler = VllmSampler(trainer, hub.load_tokenizer(str(model_dir)), engine_args=ENGINE_ARGS)
    for name in SPECS:
        sampler.publish(name, name)
    yield sampler
    sampler.close()
    assert not sampler._files.root.exists()


@pytest.fixture(scope="session")
def torch_sampler(trainer: Trainer, model_dir: Path) -> TorchSampler:
    """The torch sampler with the same versions, on the trainer's model."""
    sampler = TorchSampler(trainer, hub.load_tokenizer(str(model_dir)), kv_budget_bytes=2**24)
    for name in SPECS:
        sampler.publish(name, name)
    return sampler
