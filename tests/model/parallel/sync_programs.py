"""Programs with a model in shards and a sampler in each process, and ``sync_weights`` between them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import peft
import torch

from tests.model.parallel.lora_programs import mesh, rank_and_size
from tests.support.models import peak_memory
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import TwinkleError, UnsupportedError, UserError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import LocalSampler

MODEL = "random://llama-tiny"
SHARDS = {"dp_size": 1, "fsdp_size": 2}
A = "tenant"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
BUCKET_MB = 0.01  # smaller than the larger weights, which go in pieces then
KV_BYTES = 1 << 20
STEPS = 10
PROMPTS = [{"input_ids": [5, 17, 40, 8], "labels": [-100] * 4}, {"input_ids": [90, 3], "labels": [-100] * 2}]

Model = TransformersModel | MultiLoraTransformersModel


def _full(model_id: str = MODEL) -> Model:
    model = TransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(SHARDS))
    model.set_optimizer("AdamW", lr=3e-3)
    return model


def _peft(model_id: str = MODEL) -> Model:
    torch.manual_seed(0)
    model = TransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(SHARDS))
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA, init_lora_weights=False))
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def _multi_lora() -> Model:
    model = MultiLoraTransformersModel(
        model_id=MODEL, mixed_precision="fp32", device="cpu", device_mesh=mesh(SHARDS), max_loras=2
    )
    model.add_adapter_to_model(A, peft.LoraConfig(**LORA), seed=1)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=A)
    return model


MODELS: dict[str, Callable[..., Model]] = {"full": _full, "PEFT": _peft, "multi-LoRA": _multi_lora}


def differences(kind: str, merge: bool, beside: bool) -> list[float]:
    """Return, for each synchronisation, the largest difference between the sampler's log-probabilities and the model's.

    beside: whether the sampler is made for the model, or with weights of its own.
    """
    model = MODELS[kind]()
    sampler = _sampler(model, beside)
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    found = []
    for number in range(STEPS):
        version = manager.sync_weights(merge_and_sync=merge)
        found.append(_difference(model, sampler, version))
        _step(model, number)
    return found


def sampler_on_shards() -> str:
    """Return why a sampler cannot be made for a multi-LoRA model in shards."""
    try:
        _sampler(_multi_lora(), beside=True)
    except UnsupportedError as error:
        return str(error)
    return ""


def fails_in_one_process(method: str, rank: int, calls: int) -> tuple[str, bool, float]:
    """Let one method of one process fail at its n-th call.

    Return the error, whether the sampler refused then, and the difference after one more synchronisation. A sampler
    that does not refuse must draw as before.
    """
    model = _full()
    sampler = _sampler(model, beside=False)
    CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB).sync_weights()
    before = _drawn(sampler)
    _step(model, 0)
    if rank_and_size()[0] == rank:
        _break(sampler, method, calls)
    try:
        CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB).sync_weights()
    except (ConnectionError, TwinkleError) as error:
        told = f"{type(error).__name__}: {error}"
    vars(sampler).pop(method, None)
    try:
        refused = _drawn(sampler) != before
        assert not refused, "a mixture of weights"
    except UserError as error:
        refused = "the last sync_weights failed" in str(error)
    version = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB).sync_weights()
    return told, refused, _difference(model, sampler, version)


def _break(sampler: LocalSampler, method: str, calls: int) -> None:
    whole, left = getattr(sampler, method), calls

    def broken(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ConnectionError("cut")
        return whole(*args)

    setattr(sampler, method, broken)


def rise(folder: str, merge: bool) -> float:
    """Return how far the memory of this process rises above model and sampler during a synchronisation, in MiB."""
    rises: list[float] = []
    model = _peft(folder) if merge else _full(folder)
    sampler = _sampler(model, beside=False, model_id=folder)
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=peak_memory.BUCKET_MB)
    manager.sync_weights(merge_and_sync=merge)
    with peak_memory.measured(rises):
        manager.sync_weights(merge_and_sync=merge)
    return rises[0]


def _sampler(model: Model, beside: bool, model_id: str = MODEL) -> LocalSampler:
    if beside:
        return LocalSampler(model, kv_budget_bytes=KV_BYTES)
    return LocalSampler(model_id, kv_budget_bytes=KV_BYTES, dtype="fp32")


def _names(model: Model) -> dict[str, str]:
    return {"adapter_name": A} if isinstance(model, MultiLoraTransformersModel) else {}


def _step(model: Model, seed: int) -> None:
    rank, _ = rank_and_size()
    tokens = np.random.default_rng(10 * seed + rank).integers(0, 250, 9 + rank).tolist()
    model.forward_backward(inputs=[{"input_ids": tokens, "labels": [*tokens[1:], -100]}], **_names(model))
    model.clip_grad_and_step(**_names(model))


def _sample(sampler: LocalSampler) -> Sequence[Any]:
    return sampler.sample(PROMPTS, SamplingParams(max_tokens=5, seed=1, logprobs=1))


def _drawn(sampler: LocalSampler) -> list[Any]:
    return [response.sequences[0].logprobs for response in _sample(sampler)]


def _difference(model: Model, sampler: LocalSampler, version: str) -> float:
    responses = _sample(sampler)
    assert {response.weights_version for response in responses} == {version}
    sequences = [response.sequences[0] for response in responses]
    rows = [sequence.new_input_feature for sequence in sequences]
    computed = model.forward_only(inputs=rows, **_names(model))["logps"]
    largest = 0.0
    for row, feature, sequence in zip(computed, rows, sequences, strict=True):
        mask = np.asarray(feature["labels"]) != -100
        drawn = np.array([pairs[0][1] for pairs in sequence.logprobs])
        assert mask.sum() == len(drawn) == 5
        largest = max(largest, float(np.abs(row.detach().numpy()[: len(mask)][mask] - drawn).max()))
    return largest
