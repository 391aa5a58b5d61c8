"""Small batches for tests of losses and metrics.

Shapes: B sequences, T positions. Labels are ragged: prompts, holes and padding have no label.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100


@dataclass
class Batch:
    labels: Tensor
    logps: Tensor
    old: Tensor
    ref: Tensor
    entropies: Tensor
    advantages: Tensor  # (B,)

    @property
    def mask(self) -> Tensor:
        return self.labels != IGNORE

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"labels": self.labels}

    @property
    def outputs(self) -> dict[str, Tensor]:
        return {"logps": self.logps, "entropies": self.entropies}

    def rows(self, values: Tensor) -> list[list[float]]:
        """Return for each sequence the values of the tokens that have a label."""
        return [row[mask].tolist() for row, mask in zip(values, self.mask, strict=True)]


def batch(seed: int = 0, sequences: int = 4, length: int = 7, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    labels = torch.randint(0, 11, (sequences, length), generator=generator)
    for row in range(sequences):
        labels[row, : row % 3] = IGNORE
        labels[row, length - 1 - row % 2 :] = IGNORE
    labels[0, 3] = IGNORE
    logps = -normal(sequences, length).abs() - 0.1
    return Batch(
        labels=labels,
        logps=logps,
        old=logps + 0.4 * normal(sequences, length),
        ref=logps + 0.5 * normal(sequences, length),
        entropies=normal(sequences, length).abs(),
        advantages=torch.tensor([1.5, -0.5, 0.75, -2.0, 0.25, -1.0][:sequences], dtype=dtype),
    )


def poisoned(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values with NaN and infinities at all positions without a label.

    Losses must ignore those positions.
    """
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=values.dtype).repeat(values.numel())[: values.numel()]
    return torch.where(mask, values, bad.reshape(values.shape))
