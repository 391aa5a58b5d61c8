"""The reference for runs that train all parameters: a Transformers model, autograd and torch.optim.

It computes one sequence at a time. From Twinkle only the request types are used.
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.models.reference import LOSSES, ReferenceResult, loss_inputs, random_datum, target_logprobs
from twinkle.model import AdamParams, FullSpec, FullTrainer, TrainItem, TrainResult, adopt_model

RUN = "run"


class PlainRun:
    """All parameters of a copy of ``model``, trained by torch.optim. Tied weights occur once, as in the trainer."""

    def __init__(self, model: PreTrainedModel, optimizer: str = "AdamW", **settings: Any) -> None:
        """``settings``: those of the optimizer; AdamW's may come with each step instead."""
        self.model = copy.deepcopy(model).requires_grad_(True)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = getattr(torch.optim, optimizer)(self.parameters.values(), **settings)

    def forward_backward(self, item: TrainItem) -> ReferenceResult:
        """Add the gradient of the request, sequence by sequence."""
        logprobs, loss = [], 0.0
        for datum in item.data:
            own = target_logprobs(self.model, datum)
            part = LOSSES[item.loss](own.double(), loss_inputs(item, datum)).sum()
            part.backward()
            logprobs.append(own.detach().numpy())
            loss += part.item()
        return ReferenceResult(logprobs, loss)

    def optim_step(self, params: AdamParams) -> float:
        """Take a step of AdamW with these settings, clear the gradient, and return its norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), params.grad_clip_norm or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self.step()
        return norm.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.parameters.items()}

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        zeros = {name: np.zeros(parameter.shape, np.float32) for name, parameter in self.parameters.items()}
        return zeros | {
            name: each.grad.numpy().copy() for name, each in self.parameters.items() if each.grad is not None
        }


def full_trainer(model: PreTrainedModel, **options: Any) -> FullTrainer:
    """Return a trainer on a copy of the model, without a run."""
    return FullTrainer(adopt_model(copy.deepcopy(model)), model_id="test", **options)


def with_run(model: PreTrainedModel, **options: Any) -> FullTrainer:
    """Return a trainer on a copy of the model, with a run."""
    trainer = full_trainer(model, **options)
    trainer.create_adapter(RUN, FullSpec())
    return trainer


def request(model: PreTrainedModel, seed: int, *lengths: int, loss: str = "cross_entropy", **options: Any) -> TrainItem:
    data = [random_datum(model, loss, length, 100 * seed + index) for index, length in enumerate(lengths or (9, 14))]
    return TrainItem(RUN, data, loss, **options)


def the_result(results: list[Any]) -> TrainResult:
    """Return the result of a call with one request."""
    (result,) = results
    assert isinstance(result, TrainResult), result
    return result


def train(trainer: FullTrainer, item: TrainItem, params: AdamParams) -> TrainResult:
    """Compute a request and take a step."""
    result = the_result(trainer.forward_backward([item]))
    trainer.optim_step(RUN, params)
    return result
