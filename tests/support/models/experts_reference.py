"""The reference for adapters on experts: the plain model whose weights are W + B A, written out for each expert."""

import copy
import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from tests.support.models.reference import LOSSES, ReferenceResult, loss_inputs, pick, seen
from tests.support.models.split_projections import split_projections
from twinkle.model import AdamParams, LoraSpec, TrainItem

_FRONT = "base_model.model."
_WEIGHTS = {"w1": "gate_up_proj", "w2": "down_proj", "w3": "gate_up_proj"}


class ExpertsReference:
    """One tenant's adapter on a model of Transformers, trained by autograd and ``torch.optim``.

    Its weights have the names and shapes that the trainer reports: (1 or E, rank, in) and (1 or E, out, rank) on
    experts.
    """

    def __init__(self, base: PreTrainedModel, spec: LoraSpec, weights: Mapping[str, NDArray[np.float32]]) -> None:
        plain = copy.deepcopy(base)
        if any(".in_proj_q." in name for name in weights):
            plain = split_projections(plain)
        self._model = plain.requires_grad_(False)
        self._base = dict(self._model.named_parameters())
        self._scaling = spec.scaling
        self._parameters = {name: torch.nn.Parameter(torch.from_numpy(each.copy())) for name, each in weights.items()}
        self._optimizer = torch.optim.AdamW(self._parameters.values())

    def changed_weights(self) -> dict[str, Tensor]:
        """Return the parameters of the model that the adapter changes, changed."""
        changed: dict[str, Tensor] = {}
        for module in {name.removeprefix(_FRONT).rpartition(".lora_")[0] for name in self._parameters}:
            parent, _, last = module.rpartition(".")
            name = f"{parent}.{_WEIGHTS[last]}" if last in _WEIGHTS else f"{module}.weight"
            weight, delta = changed.get(name, self._base[name]), self._delta(module)
            experts = self._model.get_submodule(parent) if last in _WEIGHTS else None
            if experts is not None and last in ("w1", "w3"):
                nothing = torch.zeros_like(delta)
                halves = [delta, nothing] if last == "w1" else [nothing, delta]
                # gate is the first half of the rows and up the second, or they alternate
                in_turns = type(experts).__name__ == "GptOssExperts"
                delta = torch.stack(halves, 2).flatten(1, 2) if in_turns else torch.cat(halves, 1)
            if experts is not None and experts.is_transposed:
                delta = delta.transpose(1, 2)
            changed[name] = weight + delta
        return changed

    def _delta(self, module: str) -> Tensor:
        a, b = (self._parameters[f"{_FRONT}{module}.lora_{factor}.weight"] for factor in "AB")
        return self._scaling * (b @ a)  # where experts share a factor, its first dimension is 1

    def logits(self, tokens: Tensor, **images: Tensor) -> Tensor:
        output = functional_call(self._model, self.changed_weights(), kwargs={"input_ids": tokens, **images})
        return output.logits

    def forward_backward(self, item: TrainItem) -> ReferenceResult:
        """Add the gradient of the request, sequence by sequence."""
        result = ReferenceResult([], 0.0)
        for datum in item.data:
            logits = self.logits(torch.from_numpy(datum.tokens)[None], **seen(datum))
            logprobs = pick(logits[0].float().log_softmax(-1), datum)
            loss = LOSSES[item.loss](logprobs.double(), loss_inputs(item, datum)).sum()
            loss.backward()
            result.logprobs.append(logprobs.detach().numpy())
            result = ReferenceResult(result.logprobs, result.loss + loss.item())
        return result

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        return {name: each.grad.numpy().copy() for name, each in self._parameters.items() if each.grad is not None}

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: each.detach().numpy().copy() for name, each in self._parameters.items()}

    def optim_step(self, params: AdamParams) -> float:
        """Take a step, clear the gradient, and return its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), params.grad_clip_norm or math.inf)
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()
