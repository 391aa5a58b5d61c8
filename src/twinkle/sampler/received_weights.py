"""Conversion of adapter weights that were trained in another process into tensors of this process."""

from collections.abc import Mapping

import torch
from torch import Tensor

from twinkle.model.types import FloatArray

__all__ = ["as_tensors"]


def as_tensors(weights: Mapping[str, FloatArray]) -> dict[str, Tensor]:
    """Copy arrays into tensors. Arrays from another process may be read-only memory that several processes share."""
    return {name: torch.tensor(array) for name, array in weights.items()}
