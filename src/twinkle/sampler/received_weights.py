"""Conversion of weights that were trained in another process into tensors of this process."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from twinkle.model.types import FloatArray

__all__ = ["CopiedTensors", "as_tensors"]


def as_tensors(weights: Mapping[str, FloatArray]) -> dict[str, Tensor]:
    """Copy arrays into tensors. Arrays from another process may be read-only memory that several processes share."""
    return dict(CopiedTensors(weights))


class CopiedTensors(Mapping[str, Tensor]):
    """Arrays as tensors, each copied when it is read: all weights of a model may be too large to copy at once."""

    def __init__(self, arrays: Mapping[str, FloatArray]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor(self._arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
