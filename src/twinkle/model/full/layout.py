"""Names and shapes of all parameters of a model, and the flat rows in which snapshots hold them.

A row is all parameters one after another, in the order of the model's modules, as float32.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from twinkle.model.types import FloatArray


@dataclass(frozen=True)
class ParameterLayout:
    """The parameters of a model by their names in its checkpoints. ``digest`` compares layouts.

    ``aliases``: further names of weights that are tied (name → the one under which the weight is listed).
    ``unused``: parameters that texts do not use, those of a vision tower. They keep their values.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    unused: frozenset[str] = frozenset()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Return the number of parameters."""
        return sum(self.sizes)

    @cached_property
    def digest(self) -> str:
        lines = (f"{name} {shape}" for name, shape in zip(self.names, self.shapes, strict=True))
        return "full-" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def row(self, tensors: Iterable[Tensor]) -> FloatArray:
        """Return whole tensors, one for each parameter in order, as one row."""
        row_P, start = np.empty(self.size, np.float32), 0
        for size, tensor in zip(self.sizes, tensors, strict=True):
            torch.from_numpy(row_P[start : start + size]).copy_(tensor.reshape(-1))
            start += size
        return row_P

    def split(self, row_P: FloatArray, names: Sequence[str]) -> list[Tensor]:
        """Return the parameters of a row that have these names, as views of it."""
        parts = torch.from_numpy(row_P).split(self.sizes)
        views = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        return [views[name] for name in names]

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors, strict=True))
