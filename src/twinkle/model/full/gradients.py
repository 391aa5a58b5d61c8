"""The gradient of one request with respect to all weights, added up in fp32 while its micro-batches are computed.

Autograd hands over the gradient of each weight as soon as its layer is done, in the compute dtype. The output head is
no part of autograd's graph: it adds the gradient of its weights itself. Tied weights get both parts.

Shapes: V vocabulary, H hidden features, C rows of a chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from twinkle.model.decoder.products import add_outer_products


class RequestGradient(Protocol):
    """The gradient of the request that is being computed. It is taken or dropped as a whole when the request ends."""

    def finish(self) -> None:
        """Add up what several processes computed of the same weights, after the last pass. All ranks call this."""

    def finite(self) -> bool:
        """Return whether it holds neither NaN nor infinity, and no sum of its tensors overflows."""

    def take(self) -> list[Tensor]:
        """Return the gradient of all parameters, zero where the request did not use one, and begin anew."""

    def drop(self) -> None:
        """Begin anew."""


class CollectedGradient:
    """The gradient of a request on a model that this process holds as a whole."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make all parameters trainable, and take their gradients from now on."""
        self._parameters = list(parameters)
        self._held: list[Tensor | None] = [None] * len(self._parameters)
        for index, parameter in enumerate(self._parameters):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._collect, index))

    def _collect(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        held = self._held[index]
        if held is None:
            self._held[index] = gradient.float()
        else:
            held.add_(gradient)

    def accumulator(self, index: int) -> Tensor:
        """Return the tensor to which the gradient of a parameter is added; it starts from zero."""
        held = self._held[index]
        if held is None:
            held = torch.zeros_like(self._parameters[index], dtype=torch.float32, requires_grad=False)
            self._held[index] = held
        return held

    def finish(self) -> None:
        """Do nothing: no other process holds a part of the weights."""

    def finite(self) -> bool:
        sums = [held.sum() for held in self._held if held is not None]
        return not sums or bool(torch.stack(sums).isfinite().all())

    def take(self) -> list[Tensor]:
        gradient = [self.accumulator(index) for index in range(len(self._held))]
        self.drop()
        return gradient

    def drop(self) -> None:
        self._held = [None] * len(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None  # a pass that failed may have left it


class HeadWeightGradient:
    """Adds the gradient of the output head's weights to that of the request."""

    def __init__(self, gradient: CollectedGradient, weight: int, bias: int | None) -> None:
        """``weight``, ``bias``: the numbers of the head's parameters."""
        self._gradient = gradient
        self._weight = weight
        self._bias = bias

    def add(self, dlogits_CV: Tensor, hidden_CH: Tensor) -> None:
        add_outer_products(self._gradient.accumulator(self._weight), dlogits_CV, hidden_CH)
        if self._bias is not None:
            self._gradient.accumulator(self._bias).add_(dlogits_CV.sum(0, dtype=torch.float32))
