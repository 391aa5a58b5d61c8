"""Programs with the library's models that run on every rank with a mesh, or in one process without one."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from tests.model.parallel.lora_programs import Sizes, llama, mesh, rank_and_size, share
from tests.support.models.seeing_models import picture
from twinkle.errors import TwinkleError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.template import Qwen3_5Template

Feature = dict[str, Any]

# Adam divides by gradients. Near zero it magnifies the rounding differences of sums in another order.
EPS = 1e-4
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}

# The sequence lengths of each forward pass, and the rank of each sequence: uneven, and some ranks have none.
PASSES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((9, 17, 4), (0, 1, 1)),
    ((6, 23), (1, 1)),
    ((12, 5, 8, 3), (0, 1, 2, 3)),
    ((14, 7), (0, 0)),
    ((10,), (1,)),
    ((11, 4, 6), (2, 1, 0)),
)


def feature(length: int, seed: int, prompt: int = 2) -> Feature:
    tokens = np.random.default_rng(seed).integers(0, 90, length)
    labels = np.append(tokens[1:], -100)
    labels[:prompt] = -100
    return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def own_batch(number: int) -> list[Feature]:
    lengths, owners = PASSES[number]
    return share([feature(length, 1000 * number + k) for k, length in enumerate(lengths)], owners)


def save_model(name: str, folder: str, *, tied: bool = False) -> str:
    llama(name, tied=tied).save_pretrained(folder)
    return folder


def full_model(sizes: Sizes, model_id: str, **options: Any) -> TransformersModel:
    model = TransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(sizes), **options)
    model.set_optimizer("AdamW", lr=1e-3, eps=EPS)
    return model


def train_full(sizes: Sizes, model_id: str, passes: Sequence[int] = range(6), window: int = 2) -> dict[str, Any]:
    return _trained(full_model(sizes, model_id), passes, window)


def train_checkpointed(sizes: Sizes, model_id: str) -> dict[str, Any]:
    return _trained(full_model(sizes, model_id, gradient_checkpointing=True), range(4), 2)


def train_mean(sizes: Sizes, model_id: str) -> dict[str, Any]:
    """Train with a mean loss: the gradient is averaged over the ranks that have data."""
    model = full_model(sizes, model_id)
    model.set_loss("CrossEntropyLoss", reduction="mean")
    return _trained(model, (0, 1), 1)


def _trained(
    model: TransformersModel, passes: Sequence[int], window: int, micro_batch_size: int | None = None, **names: str
) -> dict[str, Any]:
    norms, metrics = [], []
    for number in passes:
        model.forward_backward(
            inputs=own_batch(number),
            gradient_accumulation_steps=window,
            micro_batch_size=micro_batch_size,
            **names,
        )
        norm = model.clip_grad_and_step(0.5, **names)
        if norm is not None:
            norms.append(norm)
            metrics.append(_timeless(model.calculate_metric(True, **names)))
    evaluated = model.forward_only(inputs=own_batch(2), **names)
    model.calculate_loss(**names)
    return {
        "weights": _arrays(model.get_state_dict(**names)),
        "norms": norms,
        "metrics": metrics,
        "logps": evaluated["logps"].shape[0],
        "evaluation": _timeless(model.calculate_metric(False, **names)),
    }


def train_peft(sizes: Sizes, model_id: str) -> dict[str, Any]:
    torch.manual_seed(5 + (0 if not sizes else torch.distributed.get_rank()))  # all ranks use the adapter of rank 0
    model = TransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(sizes))
    model.add_adapter_to_model("tenant", {**LORA, "modules_to_save": ["lm_head"]})
    model.set_optimizer("AdamW", lr=1e-3, eps=EPS)
    # With several processes also in parts: a rank with fewer rows than others has empty parts.
    return _trained(model, range(4), 2, micro_batch_size=1 if sizes else None)


def train_multi_lora(sizes: Sizes, model_id: str) -> dict[str, Any]:
    model = _multi_lora(sizes, model_id)
    return {name: _trained(model, range(6), 2, adapter_name=name) for name in ("a", "b")}


def _multi_lora(sizes: Sizes, model_id: str) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(
        model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(sizes), max_tokens_per_batch=24
    )
    for name in ("a", "b"):
        model.add_adapter_to_model(name, LORA, seed=len(name))
        model.set_optimizer("AdamW", lr=5e-4, eps=EPS, adapter_name=name)
    model.set_loss("CrossEntropyLoss", reduction="sum", dft=True, adapter_name="b")
    return model


def dropout_gradients(sizes: Sizes, model_id: str) -> dict[str, Any]:
    """Return the gradient of an adapter with dropout. The rows are divided as loaders and worker groups divide them."""
    own_mesh = mesh(sizes)
    model = MultiLoraTransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=own_mesh)
    model.add_adapter_to_model("a", {**LORA, "lora_dropout": 0.3}, seed=3)
    rows = [feature(length, length) for length in (9, 17, 4, 12, 6)]
    model.forward_backward(inputs=rows if own_mesh is None else rows[own_mesh.get_slice(5)], adapter_name="a")
    return model.trainer.gradients("a")


def _arrays(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def _timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in ("total time elapse", "speed")}


# --- saving and resuming ----------------------------------------------------------------------------------------------


def resume_full(sizes: Sizes, folder: str) -> dict[str, Any]:
    model = full_model(sizes, str(Path(folder) / "state"), tokenizer_id="random://llama-tiny")
    summary = model.resume_from_checkpoint(str(Path(folder) / "state"))
    return {"summary": summary, **_trained(model, range(3, 6), 2)}


def save_and_go_on_full(sizes: Sizes, model_id: str, folder: str) -> dict[str, Any]:
    """Train, save and train on: saving must change nothing."""
    model = full_model(sizes, model_id)
    _train_on(model, range(3))
    model.save("state", folder, save_optimizer=True, consumed_train_samples=7)
    return _trained(model, range(3, 6), 2)


def _train_on(model: Any, passes: Sequence[int], **names: str) -> None:
    for number in passes:
        model.forward_backward(inputs=own_batch(number), gradient_accumulation_steps=2, **names)
        model.clip_grad_and_step(0.5, **names)


def multi_lora_and_back(sizes: Sizes, model_id: str, folder: str) -> dict[str, Any]:
    """Train three passes in windows of two and save; then resume in another model."""
    saved = _multi_lora(sizes, model_id)
    _train_on(saved, range(3), adapter_name="a")
    saved.save("adapter", folder, adapter_name="a", save_optimizer=True)
    return multi_lora_goes_on(sizes, model_id, folder)


def multi_lora_goes_on(sizes: Sizes, model_id: str, folder: str) -> dict[str, Any]:
    model = _multi_lora(sizes, model_id)
    model.resume_from_checkpoint(str(Path(folder) / "adapter"), adapter_name="a")
    return _trained(model, range(3, 6), 2, adapter_name="a")


def loss_by_hand(sizes: Sizes, model_id: str) -> dict[str, Any]:
    """Call forward, calculate_loss and backward one by one, with ranks that have no data."""
    model = full_model(sizes, model_id)
    lora = _multi_lora(sizes, model_id)
    for number in (0, 1, 3):
        for each, names in ((model, {}), (lora, {"adapter_name": "a"})):
            each.forward(inputs=own_batch(number), **names)
            each.calculate_loss(**names)
            each.backward(**names)
            each.clip_grad_and_step(**names)
    return {"full": _arrays(model.get_state_dict()), "lora": _arrays(lora.get_state_dict(adapter_name="a"))}


def one_rank_has_nonsense(sizes: Sizes, model_id: str) -> list[str]:
    """Send invalid input on one rank. It must be refused on all ranks, and all can continue."""
    model, told = full_model(sizes, model_id), []
    last = rank_and_size()[0] == rank_and_size()[1] - 1
    wrong: list[Any] = [{"input_ids": [1, 10**6], "labels": [2, 3]}]
    for inputs, loss in ((wrong if last else own_batch(0), None), (own_batch(0), _nan if last else _one)):
        if loss is not None:
            model.set_loss(loss)
        try:
            model.forward_backward(inputs=inputs)
        except TwinkleError as error:
            told.append(str(error))
    model.set_loss(_one)
    model.forward_backward(inputs=own_batch(0))
    told.append(f"{model.clip_grad_and_step():.3f}")
    return told


def _nan(inputs: Any, outputs: Any, **_: Any) -> dict[str, Any]:
    return {"loss": outputs["logps"].sum() * float("nan"), "num_tokens": 1}


def _one(inputs: Any, outputs: Any, **_: Any) -> dict[str, Any]:
    return {"loss": outputs["logps"].sum(), "num_tokens": 1}


Program = Callable[..., dict[str, Any]]


# --- images -----------------------------------------------------------------------------------------------------------

SEES = "random://qwen3-vl-tiny"
ALL_LINEAR = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
IMAGE_OWNERS = ((0, 1, 1), (1, 1, 0), (0, 0, 0))  # the rank of each row, in each pass; in the last one rank 1 has none


@cache
def image_rows() -> list[dict[str, Any]]:
    """Return a row with two images, one with one image, and one of text."""
    images = [Pillow.fromarray(picture(64, side, seed=side)) for side in (64, 96, 40)]
    asked = [("<image>and<image>?", images[:2]), ("Which?<image>", images[2:]), ("Hello", [])]
    return Qwen3_5Template(SEES).batch_encode(
        [
            {
                "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "seen " * number}],
                "images": seen,
            }
            for number, (text, seen) in enumerate(asked, 1)
        ]
    )


def train_on_images(sizes: Sizes, kind: str) -> dict[str, Any]:
    """Train "all" parameters, one "peft" adapter, or one of "many" adapters. Return its weights and the norms."""
    options: dict[str, Any] = {"model_id": SEES, "mixed_precision": "no", "device": "cpu", "device_mesh": mesh(sizes)}
    model: Any = MultiLoraTransformersModel(**options) if kind == "many" else TransformersModel(**options)
    named = {} if kind == "all" else {"adapter_name": "a"}
    if named:
        model.add_adapter_to_model("a", ALL_LINEAR, seed=1)
    model.set_optimizer("SGD", lr=0.05, weight_decay=0.0, **named)
    norms = []
    for owners in IMAGE_OWNERS:
        model.forward_backward(inputs=share(image_rows(), owners), **named)
        norms.append(model.clip_grad_and_step(1.0, **named))
    return {"weights": model.get_state_dict(**named), "norms": norms}
