"""Weights of an adapter that were trained in another process, as tensors of this one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from twinkle.model.types import FloatArray

__all__ = ["as_tensors"]


def as_tensors(weights: Mapping[str, FloatArray]) -> dict[str, Tensor]:
    """Copies: what came from another process may be memory that many read and nobody writes."""
    return {name: torch.tensor(array) for name, array in weights.items()}
