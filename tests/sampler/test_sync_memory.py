"""How far ``sync_weights`` raises the memory of a process: a model of 100 MiB, a sampler with a copy of it, buckets."""

from pathlib import Path

import peft
import pytest

from tests.support.models.peak_memory import BUCKET_MB, measured, save_100_mib
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import LocalSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_100_mib(Path(tmp_path_factory.mktemp("large")))


@pytest.fixture(scope="module")
def sampler(folder: str) -> LocalSampler:
    return LocalSampler(folder, kv_budget_bytes=1 << 20, dtype="fp32")


def full(folder: str) -> TransformersModel:
    return TransformersModel(model_id=folder, mixed_precision="no", device="cpu")


def with_adapter(folder: str) -> TransformersModel:
    model = full(folder)
    model.add_adapter_to_model("a", peft.LoraConfig(**LORA))
    return model


def multi_lora(folder: str) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=folder, mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("a", peft.LoraConfig(**LORA), seed=1)
    return model


@pytest.mark.parametrize("make", [full, with_adapter, multi_lora])
def test_memory_rises_by_at_most_two_buckets(make, folder: str, sampler: LocalSampler) -> None:
    model = make(folder)
    rises: list[float] = []
    for size in (BUCKET_MB, BUCKET_MB, 8 * BUCKET_MB):
        with measured(rises):
            CheckpointEngineManager(model, sampler, bucket_size_mb=size).sync_weights()
    assert rises[1] <= 2 * BUCKET_MB
    if make is not full:  # weights of a plain model are copied where they are, without a bucket in between
        assert rises[2] > 4 * BUCKET_MB, "the measurement sees large buckets"
