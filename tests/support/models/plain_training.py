"""Plain training in fp32 with transformers, PEFT and torch.optim, one padded batch at a time.

Tests compare the library's models with ``PlainLora`` and ``PlainFull``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import peft
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle import hub

MODEL = "random://llama-tiny"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
Feature = dict[str, Any]


def plain_model() -> PreTrainedModel:
    """Return a plain Transformers model with the weights that the library creates from MODEL's seed."""
    local = hub.resolve(MODEL)
    with torch.random.fork_rng():
        torch.manual_seed(local.random_seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(local.path), dtype=torch.float32)
    return model.eval()


def feature(length: int, seed: int, prompt: int = 2) -> Feature:
    """Return a sequence of random tokens. The first ``prompt`` labels and the last one are −100."""
    tokens = np.random.default_rng(seed).integers(0, 250, length)
    labels = np.append(tokens[1:], -100)
    labels[:prompt] = -100
    return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def features(*lengths: int, seed: int = 0) -> list[Feature]:
    return [feature(length, seed * 100 + index) for index, length in enumerate(lengths)]


def logps(model: Any, batch: Sequence[Feature], temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels and log-probabilities (B, L) and logits (B, L, V) of a batch, padded on the right."""
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, row in enumerate(batch):
        count = len(row["input_ids"])
        ids[index, :count] = torch.tensor(row["input_ids"])
        labels[index, :count] = torch.tensor(row["labels"])
        mask[index, :count] = 1
    logits = model(input_ids=ids, attention_mask=mask).logits.float() / temperature
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return labels, torch.where(mask.bool(), picked, 0.0), logits


class PlainLora:
    """Plain training of one PEFT adapter that starts from ``weights``, given by PEFT's names."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any] = LORA) -> None:
        self.model = peft.get_peft_model(plain_model(), peft.LoraConfig(**config, lora_dropout=0.0))
        self.parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        assert self.parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.parameters.items()}


def relative_errors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == theirs.keys()
    errors = {}
    for name, value in theirs.items():
        value = value.detach().double()
        norm, distance = float(value.norm()), float((ours[name].detach().double() - value).norm())
        errors[name] = distance / norm if norm > 0 else distance
    return errors


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    far = {name: error for name, error in relative_errors(ours, theirs).items() if not error <= tolerance}
    assert not far, f"relative errors above {tolerance}: {far}"
