"""Programs with the library's models on every rank of a mesh, or in one process with the models of Transformers.

A program gets all rows; each rank takes those of its data rank. The comparisons are in the tests.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft

from tests.model.megatron.stage_programs import device_mesh
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import TwinkleError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import MegatronModel, MultiLoraMegatronModel, MultiLoraTransformersModel, TransformersModel
from twinkle.model.megatron.mesh import leave_mesh
from twinkle.sampler import LocalSampler

Sizes = Mapping[str, Any]  # of a mesh; empty: one process without one
Model = Any  # of the library

VOCABULARY = 97
NAMES = ("first", "second")
CONFIGS = {
    "first": peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "second": peft.LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj", "down_proj", "lm_head"]),
}
# The first step of Adam moves a weight by about g / (|g| + eps): a large eps keeps noise of gradients near zero small.
RATE, WHOLE_RATE, EPS = 5e-3, 1e-3, 1e-5
BUCKET_MB = 0.01  # smaller than the larger weights, which go in pieces then
STEPS = 3


def rows(seed: int, count: int = 5) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = generator.integers(0, VOCABULARY, generator.integers(3, 14)).tolist()
        made.append({"input_ids": tokens, "labels": [-100, *tokens[2:], -100]})
    return made


def own(model: Model, batch: Sequence[Any]) -> list[Any]:
    """Return the rows of this rank's part of a batch."""
    mesh: DeviceMesh | None = model.device_mesh
    return list(batch if mesh is None else batch[mesh.get_slice(len(batch))])


def multi_lora(folder: Path, sizes: Sizes | None, dropout: float = 0.0, targets: str = "all") -> Model:
    """Return a model with two adapters, the first with ``dropout``. ``sizes`` None: a model of Transformers.

    targets: "experts" for a second adapter on experts, beside one on attention.
    """
    options: Any = {"model_id": folder, "mixed_precision": "no", "device": "cpu", "max_tokens_per_batch": 24}
    if sizes is None:
        model: Model = MultiLoraTransformersModel(**options)
    else:
        leave_mesh()
        model = MultiLoraMegatronModel(**options, device_mesh=device_mesh(sizes))
    for seed, name in enumerate(NAMES):
        config = CONFIGS[name].to_dict() | ({"lora_dropout": dropout} if name == "first" else {})
        if targets == "experts":
            config["target_modules"] = ["q_proj", "v_proj"] if name == "first" else ["o_proj", "w1", "w2", "w3"]
        model.add_adapter_to_model(name, config, seed=seed)
        model.set_optimizer("AdamW", lr=RATE, eps=EPS, adapter_name=name)
        model.set_lr_scheduler("CosineAnnealingLR", T_max=8, adapter_name=name)
    return model


def single(folder: Path, sizes: Sizes | None) -> Model:
    """Return a model with one adapter, ``sizes`` None: a model of Transformers."""
    options: Any = {"model_id": folder, "mixed_precision": "no", "device": "cpu"}
    if sizes is None:
        model: Model = TransformersModel(**options)
    else:
        leave_mesh()
        model = MegatronModel(**options, device_mesh=device_mesh(sizes), max_tokens_per_batch=24)
    model.add_adapter_to_model("second", CONFIGS["second"], seed=3, gradient_accumulation_steps=2)
    if sizes is None:
        model.set_optimizer("AdamW", lr=RATE, eps=EPS)
    else:
        model.set_optimizer("default", lr=RATE, adam_eps=EPS, use_distributed_optimizer=True)
    return model


def train_two(folder: Path, sizes: Sizes | None, dropout: float = 0.0, targets: str = "all") -> dict[str, Any]:
    """Train two adapters in turn, the second with the verbs one by one."""
    model = multi_lora(folder, sizes, dropout, targets)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(STEPS):
        batch = own(model, rows(number))
        model.forward_backward(inputs=batch, adapter_name="first")
        found["norms"].append(model.clip_grad_and_step(max_grad_norm=0.3, adapter_name="first"))
        model.forward(inputs=batch, temperature=0.8, adapter_name="second")
        model.calculate_loss(adapter_name="second")
        model.backward(adapter_name="second")
        found["norms"].append(model.clip_grad_norm(adapter_name="second"))
        model.step(adapter_name="second")
        model.zero_grad(adapter_name="second")
        model.lr_step(adapter_name="second")
        found["losses"] += [model.calculate_metric(is_training=True, adapter_name=name)["loss"] for name in NAMES]
    return found | _state(model)


def train_one(folder: Path, sizes: Sizes | None) -> dict[str, Any]:
    """Train one adapter with windows of two passes, with a loss on entropies, and look at the base without it."""
    model = single(folder, sizes)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(2 * STEPS):
        outputs = model.forward_backward(inputs=own(model, rows(number)))
        found["norms"].append(model.clip_grad_and_step(max_grad_norm=0.3))
        assert "logps" in outputs
        if number % 2:
            found["losses"].append(model.calculate_metric(is_training=True)["loss"])
    batch = own(model, rows(90, 4))
    outputs = model.forward_only(inputs=batch, disable_lora=True, return_logits=True)
    found["base"] = [one[: len(row["labels"])].numpy() for one, row in zip(outputs["logits"], batch, strict=True)]
    return found | _state(model)


def whole(folder: Path, sizes: Sizes | None) -> Model:
    """Return a model that is trained in all parameters. ``sizes`` None: one of Transformers."""
    options: Any = {"model_id": folder, "mixed_precision": "no", "device": "cpu"}
    if sizes is None:
        model: Model = TransformersModel(**options)
        model.set_optimizer("AdamW", lr=WHOLE_RATE, eps=EPS)
        return model
    leave_mesh()
    model = MegatronModel(**options, device_mesh=device_mesh(sizes), max_tokens_per_batch=24)
    model.set_optimizer("default", lr=WHOLE_RATE, adam_eps=EPS)
    return model


def train_whole(folder: Path, sizes: Sizes | None) -> dict[str, Any]:
    """Train all parameters."""
    model = whole(folder, sizes)
    found: dict[str, Any] = {"losses": [], "norms": [], "configs": None}
    for number in range(STEPS):
        model.forward_backward(inputs=own(model, rows(number)))
        found["norms"].append(model.clip_grad_and_step(max_grad_norm=0.3))
        found["losses"].append(model.calculate_metric(is_training=True)["loss"])
    batch = own(model, rows(80, 4))
    logps = model.forward_only(inputs=batch)["logps"]
    scores = [one[: len(row["labels"])].numpy() for one, row in zip(logps, batch, strict=True)]
    return found | {"scores": {"": scores}, "weights": {"": _numpy(model.get_state_dict())}}


def save_whole(folder: Path, sizes: Sizes, output: Path) -> dict[str, Any]:
    """Train all parameters, and save in the middle of a window."""
    model = whole(folder, sizes)
    for number in range(2):
        model.forward_backward(inputs=own(model, rows(number)))
        model.clip_grad_and_step()
    model.forward_backward(inputs=own(model, rows(3)), gradient_accumulation_steps=2)
    plain = model.save("plain", output)
    return {"whole": model.save("whole", output, save_optimizer=True), "plain": plain, **_finish_window(model)}


def resume_whole(folder: Path, sizes: Sizes, directory: str, output: Path) -> dict[str, Any]:
    """Resume a checkpoint of all parameters, save it again, and finish its window."""
    model = whole(folder, sizes)
    progress = model.resume_from_checkpoint(directory)
    return {"progress": progress, "again": model.save("again", output, save_optimizer=True), **_finish_window(model)}


def _finish_window(model: Model) -> dict[str, Any]:
    model.forward_backward(inputs=own(model, rows(2)))
    norm = model.clip_grad_and_step()
    assert norm is not None, "the window is complete"
    return {"norm": norm, "weights": _numpy(model.get_state_dict())}


def _numpy(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in weights.items()}


def _state(model: Model) -> dict[str, Any]:
    names = [name for name in NAMES if name in model.optimizer_group]
    batch = own(model, rows(80, 4))
    scores = {}
    for name in names:
        logps = model.forward_only(inputs=batch, adapter_name=name)["logps"]
        scores[name] = [one[: len(row["labels"])].numpy() for one, row in zip(logps, batch, strict=True)]
    weights = {name: model.get_state_dict(adapter_name=name) for name in names}
    return {
        "scores": scores,
        "weights": {name: {key: tensor.numpy() for key, tensor in each.items()} for name, each in weights.items()},
        "configs": {name: model.get_train_configs(adapter_name=name) for name in names},
    }


def save(folder: Path, sizes: Sizes | None, output: Path, targets: str = "all") -> dict[str, Any]:
    """Train both adapters, save the first in the middle of a window, and the whole model with the second merged."""
    model = multi_lora(folder, sizes, 0.0, targets)
    for number in range(2):
        for name in NAMES:
            model.forward_backward(inputs=own(model, rows(number)), adapter_name=name)
            model.clip_grad_and_step(adapter_name=name)
    model.forward_backward(inputs=own(model, rows(7)), adapter_name="first", gradient_accumulation_steps=2)
    return {
        "adapter": model.save("adapter", output, adapter_name="first", save_optimizer=True, consumed_train_samples=12),
        "weights": model.save("weights", output, adapter_name="second"),
        "merged": model.save("merged", output, adapter_name="second", merge_lora=True),
        "scores": _state(model)["scores"],
    }


def resave(folder: Path, sizes: Sizes | None, adapter: str, output: Path) -> dict[str, int]:
    """Resume a checkpoint, save it again without a step, then finish the window; return the progress."""
    model = multi_lora(folder, sizes)
    progress: dict[str, int] = model.resume_from_checkpoint(adapter, adapter_name="first")
    model.save("again", output, adapter_name="first", save_optimizer=True, consumed_train_samples=12)
    model.forward_backward(inputs=own(model, rows(8)), adapter_name="first")
    model.clip_grad_and_step(adapter_name="first")
    return {"progress": progress, **_state(model)}


def initial_weights_again(folder: Path, sizes: Sizes) -> bool:
    """Return whether an adapter that was trained has the weights that it began with, once it is told so."""
    model = single(folder, sizes)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    for number in range(2):
        model.forward_backward(inputs=own(model, rows(number)))
        model.clip_grad_and_step()
    after = model.get_state_dict()
    assert any(not after[name].equal(before[name]) for name in before)
    model.reload_initial_weights()
    again = model.get_state_dict()
    return all(again[name].equal(before[name]) for name in before)


def from_directory(folder: Path, sizes: Sizes, adapter: str) -> dict[str, Any]:
    """Return the scores of an adapter that was added from a directory and is not trained."""
    leave_mesh()
    model = MegatronModel(folder, mixed_precision="no", device="cpu", device_mesh=device_mesh(sizes))
    model.add_adapter_to_model("second", adapter, is_trainable=False)
    errors = []
    for verb in (lambda: model.set_optimizer(), lambda: model.forward_backward(inputs=own(model, rows(1)))):
        try:
            verb()
        except TwinkleError as error:
            errors.append(str(error))
    return {"errors": errors, **_state(model)}


def whole_weights(folder: Path, sizes: Sizes) -> dict[str, Any]:
    model = multi_lora(folder, sizes)
    return {name: tensor.numpy().copy() for name, tensor in model.get_hf_state_dict()}


def synchronised(folder: Path, sizes: Sizes, merge: bool | None) -> list[float]:
    """Return how far a sampler's log-probabilities are from the model's, at most, after each synchronisation.

    merge: None for a model that is trained in all parameters.
    """
    model = whole(folder, sizes) if merge is None else single(folder, sizes)
    sampler = LocalSampler(folder, kv_budget_bytes=1 << 20, dtype="fp32")
    manager = CheckpointEngineManager(model, sampler, bucket_size_mb=BUCKET_MB)
    found = []
    for number in range(3):
        manager.sync_weights(merge_and_sync=merge)
        found.append(_difference(model, sampler))
        for part in range(2):
            model.forward_backward(inputs=own(model, rows(2 * number + part)))
            model.clip_grad_and_step()
    return found


def _difference(model: Model, sampler: LocalSampler) -> float:
    prompts = [{"input_ids": [5, 17, 40, 8], "labels": [-100] * 4}, {"input_ids": [90, 3], "labels": [-100] * 2}]
    responses = sampler.sample(prompts, SamplingParams(max_tokens=5, seed=1, logprobs=1))
    sequences = [response.sequences[0] for response in responses]
    features = [sequence.new_input_feature for sequence in sequences]
    computed = model.forward_only(inputs=features)["logps"]
    largest = 0.0
    for row, feature, sequence in zip(computed, features, sequences, strict=True):
        mask = np.asarray(feature["labels"]) != -100
        drawn = np.array([pairs[0][1] for pairs in sequence.logprobs])
        largest = max(largest, float(np.abs(row.numpy()[: len(mask)][mask] - drawn).max()))
    return largest
