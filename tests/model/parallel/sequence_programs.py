"""Programs for sequence groups: the ranks of a group have the same rows; one process without a mesh has all rows."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.parallel.full_programs import EPS, LORA, Feature, feature
from tests.model.parallel.lora_programs import Sizes, mesh
from twinkle.errors import TwinkleError
from twinkle.loss import GRPOLoss, Loss
from twinkle.model import TransformersModel
from twinkle.model.trainer.sharding import whole
from twinkle.model.transformers import causal_forward

# The sequence lengths of each pass, and the data rank of each row. A row may have several sequences. The sum of a pass
# is odd, so tokens are added for two ranks; in two passes one of two groups has no rows.
PASSES: tuple[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]], ...] = (
    (((9,), (17,), (3, 8, 4)), (0, 1, 0)),
    (((6, 23),), (1,)),
    (((1,),), (0,)),
    (((5,), (14, 3), (7,)), (0, 1, 1)),
)


def save_llama(folder: Path, heads: tuple[int, int] = (4, 1), *, wide: bool = False) -> str:
    """Save a model with the given numbers of query heads and of key/value heads."""
    hidden, intermediate, vocabulary, size = (512, 1024, 1000, 64) if wide else (8 * heads[0], 64, 97, 8)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=size,
        max_position_embeddings=128,
        initializer_range=0.04 if wide else 0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rows(sizes: Sizes, number: int) -> list[Feature]:
    """Return the rows of this rank in a pass."""
    lengths, owners = PASSES[number]
    device_mesh = mesh(sizes)
    count, own = (1, 0) if device_mesh is None else (device_mesh.data_world_size, device_mesh.data_rank)
    made = [_row(each, 100 * number + 10 * k) for k, each in enumerate(lengths)]
    return [row for row, owner in zip(made, owners, strict=True) if owner % count == own]


def _row(lengths: tuple[int, ...], seed: int) -> Feature:
    parts = [feature(length, seed + k, prompt=length // 4) for k, length in enumerate(lengths)]
    for part in parts:  # the last token has a target, too, so that a sequence of one token has one
        part["labels"][-1] = seed % 90
    joined: Feature = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    return joined if len(lengths) == 1 else {**joined, "position_ids": [p for n in lengths for p in range(n)]}


def make_model(sizes: Sizes, model_id: str, *, lora: bool = False, **options: Any) -> TransformersModel:
    torch.manual_seed(5)
    model = TransformersModel(model_id=model_id, mixed_precision="no", device="cpu", device_mesh=mesh(sizes), **options)
    if lora:
        model.add_adapter_to_model("tenant", LORA)
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:  # zero at first, so that the gradient of A would be 0
                parameter.data = torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter)
    model.set_optimizer("AdamW", lr=1e-3, eps=EPS)
    return model


def gradients(model: TransformersModel) -> dict[str, np.ndarray]:
    """Return the gradients of the open window by name, normalised and whole. All ranks must call this."""
    found = {
        name: whole(parameter.grad)
        for name, parameter in model.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


def train(
    sizes: Sizes, model_id: str, lora: bool = False, checkpointing: bool = False, padding_free: bool = False
) -> dict[str, Any]:
    """Train two windows of two passes, and evaluate. "losses" are those of this rank's rows."""
    model = make_model(sizes, model_id, lora=lora, gradient_checkpointing=checkpointing)
    model.set_processor("InputProcessor", padding_free=padding_free)
    result: dict[str, Any] = {"losses": [], "tokens": [], "norms": [], "gradients": [], "metrics": []}
    for number in range(4):
        outputs = model.forward_backward(inputs=rows(sizes, number), gradient_accumulation_steps=2)
        result["losses"].append(outputs["loss"])
        result["tokens"].append(outputs["num_tokens"])
        norm = model.clip_grad_norm(0.5)
        if norm is not None:
            result["norms"].append(norm)
            result["gradients"].append(gradients(model))
            result["metrics"].append(_rounded(model.calculate_metric(True)))
        model.step()
        model.zero_grad()
    evaluated = model.forward_only(inputs=rows(sizes, 0), return_logits=True)
    result["evaluation"] = {name: evaluated[name].numpy() for name in ("logps", "logits", "predictions")}
    model.calculate_loss()
    result["metrics"].append(_rounded(model.calculate_metric(False)))
    result["weights"] = {name: each.detach().numpy() for name, each in model.get_state_dict().items()}
    return result


def _rounded(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name not in ("total time elapse", "speed")}


def one_pass(sizes: Sizes, model_id: str, loss: Loss | None = None, added: int = 0, padding: int = 0) -> dict[str, Any]:
    """Compute loss and gradient of one pass with padded rows. ``added``: the token that fills up a row to be cut.

    ``padding``: the token in the padding of the inputs.
    """
    model = make_model(sizes, model_id)
    if loss is not None:
        model.set_loss(loss)
    keywords = {"advantages": [1.0, -2.0, 0.5]} if isinstance(loss, GRPOLoss) else {}
    padded = [
        {
            "input_ids": [padding] * k + each["input_ids"],
            "labels": [-100] * k + each["labels"],
            "attention_mask": [0] * k + [1] * len(each["labels"]),
            "position_ids": [-1] * k + list(range(len(each["labels"]))),
        }
        for k, each in enumerate(feature(length, length) for length in (9, 12, 6))
    ]
    with mock.patch.object(causal_forward, "ADDED_TOKEN", added):
        outputs = model.forward_backward(inputs=padded, **keywords)
    model.clip_grad_norm(1e9)
    return {
        "loss": outputs["loss"],
        "tokens": outputs["num_tokens"],
        "outputs": {name: value.numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)},
        "gradients": gradients(model),
    }


def embed(sizes: Sizes, model_id: str) -> dict[str, Any]:
    """Train embeddings: the loss compares the last tokens of texts with each other."""
    model = make_model(sizes, model_id)
    model.set_loss("InfonceLoss", temperature=0.1)
    texts = [
        {"input_ids": feature(length, length)["input_ids"], "labels": [label]}
        for length, label in ((9, 1), (4, 0), (12, 1), (6, 0))
    ]
    outputs = model.forward_backward(inputs=texts, task="embedding")
    model.clip_grad_norm(1e9)
    return {"loss": outputs["loss"], "embeddings": outputs["embeddings"].numpy(), "gradients": gradients(model)}


def save_in_a_window(sizes: Sizes, model_id: str, folder: str) -> None:
    model = make_model(sizes, model_id)
    _pass_on(model, sizes, range(3))
    model.save("state", folder, save_optimizer=True)


def go_on_in_a_window(sizes: Sizes, folder: str) -> dict[str, Any]:
    model = make_model(sizes, str(Path(folder) / "state"), tokenizer_id="random://llama-tiny")
    model.resume_from_checkpoint(str(Path(folder) / "state"))
    norms = _pass_on(model, sizes, range(3, 4))
    return {"norms": norms, "weights": {name: each.detach().numpy() for name, each in model.get_state_dict().items()}}


def _pass_on(model: TransformersModel, sizes: Sizes, numbers: range) -> list[float]:
    norms = []
    for number in numbers:
        model.forward_backward(inputs=rows(sizes, number), gradient_accumulation_steps=2)
        norm = model.clip_grad_and_step(0.5)
        norms += [] if norm is None else [norm]
    return norms


def refused(sizes: Sizes, model_id: str) -> list[str]:
    """Return the errors for rows that differ within a sequence group, and for a sequence that is too long for its rope.

    After these the model goes on.
    """
    model, told = make_model(sizes, model_id), []
    number = torch.distributed.get_rank()
    for inputs in ([feature(9, number)], [feature(40, 1)]):
        try:
            model.forward_backward(inputs=inputs)
        except TwinkleError as error:
            told.append(str(error))
    model.forward_backward(inputs=[feature(9, 1)])
    told.append(f"{model.clip_grad_and_step():.3f}")
    return told
