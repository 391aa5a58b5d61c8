"""Prints as JSON how far ``sync_weights`` raises the memory of a process, in MiB; the argument is a model's folder.

A program of its own: in a process that has run other tests, freed memory is used again, and a rise is not seen.
"""

import json
import sys

import peft

from tests.support.models.peak_memory import BUCKET_MB, measured
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import LocalSampler

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def full(folder: str) -> TransformersModel:
    return TransformersModel(model_id=folder, mixed_precision="no", device="cpu")


def with_adapter(folder: str) -> TransformersModel:
    model = full(folder)
    model.add_adapter_to_model("policy", peft.LoraConfig(**LORA))
    return model


def multi_lora(folder: str) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=folder, mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("policy", peft.LoraConfig(**LORA), seed=1)
    return model


def main() -> None:
    """Synchronise each model three times with small buckets, of which the first warms up, and once with large ones."""
    folder = sys.argv[1]
    sampler = LocalSampler(folder, kv_budget_bytes=1 << 20, dtype="fp32")
    rises: dict[str, list[float]] = {}
    for make in (full, with_adapter, multi_lora):
        model = make(folder)
        for size in (*[BUCKET_MB] * 3, 8 * BUCKET_MB):
            with measured(rises.setdefault(make.__name__, [])):
                CheckpointEngineManager(model, sampler, bucket_size_mb=size).sync_weights()
    print(json.dumps(rises))


if __name__ == "__main__":
    main()
