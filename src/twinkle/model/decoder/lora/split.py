"""A linear layer whose outputs are several projections side by side, each of which may have LoRA of its own.

PEFT knows only the whole layer, with one A for all of its projections. An adapter is on the whole layer or on its
projections; a batch may have adapters of both kinds.

Shapes: T rows, I input and O output features, R the largest rank of the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.model.decoder.lora.lora import LayerAdapters, LayerLora, LoraLinear, with_adapters


class SplitLoraLinear(LoraLinear):
    """Replaces an ``nn.Linear``; a call returns the outputs of its projections one by one.

    ``parts``: the names of the projections within the decoder layer. ``sizes``: their output features.
    """

    def __init__(self, base: nn.Linear, name: str, parts: Sequence[str], sizes: Sequence[int]) -> None:
        super().__init__(base, name)
        self.parts = tuple(parts)
        self.sizes = list(sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.parts)

    def projections(self, x: Tensor) -> list[Tensor]:
        """Return the outputs (T, O) of each projection for the rows ``x`` (T, I)."""
        lora = self.lora
        if lora is None or self.weight_OI.requires_grad or not any(map(lora.has, self.parts)):
            return list(self(x).split(self.sizes, -1))
        x_TI = x.contiguous()
        if lora.has(self.name):
            outputs = self(x_TI).split(self.sizes, -1)
            return [_plus_lora(y_TO, x_TI, lora, name) for y_TO, name in zip(outputs, self.parts, strict=True)]
        weights = self.weight_OI.split(self.sizes)
        biases = [None] * len(weights) if self.bias_O is None else self.bias_O.split(self.sizes)
        return [
            with_adapters(x_TI, weight_OI, bias_O, lora, name)
            for weight_OI, bias_O, name in zip(weights, biases, self.parts, strict=True)
        ]


def _plus_lora(y_TO: Tensor, x_TI: Tensor, lora: LayerAdapters, name: str) -> Tensor:
    """Return y + (x A.T) B.T."""
    if not lora.has(name):
        return y_TO
    if torch.is_grad_enabled():
        product: Tensor = _Lora.apply(x_TI, y_TO.shape[1], lora, name)
        return y_TO + product
    sum_TO = y_TO.clone(memory_format=torch.contiguous_format)
    lora.add(name, x_TI, x_TI.new_empty(len(x_TI), lora.width), sum_TO)
    return sum_TO


class _Lora(torch.autograd.Function):
    """The product with A and B alone, as one node of the autograd graph; rows without an adapter are 0."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, outputs: int, lora: LayerLora, name: str) -> Tensor:
        y_TO = x_TI.new_zeros(len(x_TI), outputs)
        h_TR = x_TI.new_empty(len(x_TI), lora.width)
        lora.add(name, x_TI, h_TR, y_TO)
        ctx.lora, ctx.name = lora, name
        ctx.save_for_backward(x_TI, h_TR)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, None, None, None]:
        x_TI, h_TR = ctx.saved_tensors
        dx_TI = torch.zeros_like(x_TI)
        ctx.lora.add_gradient(ctx.name, dy_TO.contiguous(), x_TI, h_TR, dx_TI)
        return dx_TI, None, None, None
