"""Places for complete sets of weights of one running model, of which the model computes with one at a time.

Set 0 is the base model's own, which never changes. The memory of the others is allocated once, and filled with one
version after another: captured CUDA graphs keep addresses, so a set of weights must not move. To change sets, the
model's parameters are pointed to other memory; nothing is copied.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.decoder.joined import empty_like
from twinkle.model.trainer.engine import Engine


class WeightSlots:
    """The sets of weights of an engine's model. ``count``: how many there are beside the base model's own."""

    def __init__(self, engine: Engine, count: int) -> None:
        parameters = named_weights(engine.model)
        base = {name: parameter.data for name, parameter in parameters.items()}
        self._sets = [base, *(empty_like(base) for _ in range(count))]
        # The head computes with tensors of its own, which share memory with parameters (in tied models, with the
        # embedding's).
        spec = engine.head.spec
        heads = [tensor for tensor in (spec.weight_VH, spec.bias_V) if tensor is not None]
        self._users = {
            name: [parameter, *(head for head in heads if head.data_ptr() == parameter.data_ptr())]
            for name, parameter in parameters.items()
        }
        self._active = 0

    @property
    def count(self) -> int:
        return len(self._sets) - 1

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights of a set by the names of the model's checkpoints."""
        return {name: weight.shape for name, weight in self._sets[0].items()}

    def use(self, number: int) -> None:
        """Make the model compute with a set of weights."""
        if number == self._active:
            return
        for name, weight in self._sets[number].items():
            for user in self._users[name]:
                user.data = weight
        self._active = number

    def fill(self, number: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into a set; they are rounded to its dtype. After an error the set holds nothing of use."""
        assert number, "the base model's own weights never change"
        for name, weight in weights:
            self._sets[number][name].copy_(weight)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInputError unless these are all weights of this model, and no others."""
        shapes = self.shapes
        for name in [*(shapes.keys() - weights.keys()), *(weights.keys() - shapes.keys())]:
            raise InvalidInputError("weights", _wrong(name, weights), f"the {len(shapes)} weights of the model")
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                raise InvalidInputError(name, f"a weight of shape {tuple(weights[name].shape)}", f"{tuple(shape)}")


def _wrong(name: str, weights: Mapping[str, Tensor]) -> str:
    return f"{name}, which the model does not have" if name in weights else f"no {name}"
