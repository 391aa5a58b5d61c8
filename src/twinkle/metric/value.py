"""Metrics of a critic: how well its values predict the returns.

Shapes: B sequences, T positions; b and t of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import TokenValues, align_to_mask, to_host
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.loss.policy import checked_epsilon
from twinkle.metric.interface import Inputs, Metric, Outputs

__all__ = ["PPOValueMetric"]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers. Those of two sets are combined by ``+``.

    Deviations from the mean are added up, not squares, which would cancel out if the mean is large.
    """

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0

    @classmethod
    def of_values(cls, values: Tensor) -> "Moments":
        if len(values) == 0:
            return cls()
        values = values.double()
        return cls(len(values), float(values.mean()), float((values - values.mean()).square().sum()))

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if count == 0:
            return Moments()
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        between = distance * distance * self.count * other.count / count
        return Moments(count, mean, self.deviations + other.deviations + between)

    @property
    def variance(self) -> float:
        """Return the population variance."""
        return self.deviations / self.count


@dataclass(frozen=True)
class ValueMoments:
    """The moments of all accumulated tokens."""

    values: Moments = field(default_factory=Moments)
    returns: Moments = field(default_factory=Moments)
    errors: Moments = field(default_factory=Moments)  # returns − values
    clipped: Moments = field(default_factory=Moments)  # 1 for a token whose value is clipped, 0 for others
    advantages: Moments = field(default_factory=Moments)

    def __add__(self, other: "ValueMoments") -> "ValueMoments":
        return ValueMoments(**{name: value + vars(other)[name] for name, value in vars(self).items()})


class PPOValueMetric(Metric):
    """Metrics of calls with :class:`twinkle.loss.PPOValueLoss`. All names begin with "train/".

    - value_mean, return_mean.
    - value_clip_ratio: the share of tokens with |V − old value| > ``epsilon``.
    - explained_variance: 1 − var(return − V) / max(var(return), 1e-8). 1 is a perfect critic; 0 is no better than a
      constant.
    - With ``advantages``: advantage_mean, advantage_std.

    A call without "values", ``old_values`` or ``returns`` adds nothing. Only moments are stored, not the tokens.
    """

    call_arguments: ClassVar[tuple[str, ...]] = ("advantages", "old_values", "returns")

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        epsilon: float = 0.2,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        self.epsilon = checked_epsilon("epsilon", epsilon)
        self.ignore_index = ignore_index
        super().__init__(device_mesh, process_group)

    def reset(self) -> None:
        self.moments = ValueMoments()

    def accumulate(
        self,
        inputs: Inputs,
        outputs: Outputs | Sequence[Outputs] | None,
        *,
        old_values: TokenValues | None = None,
        returns: TokenValues | None = None,
        advantages: TokenValues | None = None,
        **_: Any,
    ) -> None:
        """Add a batch, or a list of micro-batches (or single features) with one list of outputs or joined outputs.

        ``old_values``, ``returns`` and ``advantages`` have an entry for each sequence of all micro-batches.
        """
        if old_values is None or returns is None or outputs is None:
            return
        batches = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        labels = to_host([_two_dimensional(torch.as_tensor(batch["labels"])) for batch in batches])
        values = _values_by_batch(outputs, labels)
        if values is None:
            return
        # On the host from here on: on a GPU, each number of each moment would wait for the device.
        values, old_values, returns = to_host(values), _on_host(old_values), _on_host(returns)
        advantages = None if advantages is None else _on_host(advantages)
        count, start = sum(len(each) for each in labels), 0
        for name, given in (("old_values", old_values), ("returns", returns), ("advantages", advantages)):
            if given is not None and len(given) != count:
                raise InvalidInputError(name, f"{len(given)} entries", f"one for each of the {count} sequences")
        for labels_bt, values_bt in zip(labels, values, strict=True):
            rows = slice(start, start + len(labels_bt))
            chosen = None if advantages is None else advantages[rows]
            self._add(labels_bt != self.ignore_index, values_bt, old_values[rows], returns[rows], chosen)
            start += len(labels_bt)

    def _add(
        self,
        mask_bt: Tensor,
        values_bt: Tensor,
        old_values: TokenValues,
        returns: TokenValues,
        advantages: TokenValues | None,
    ) -> None:
        def valid(name: str, numbers: TokenValues) -> Tensor:
            return align_to_mask(name, numbers, mask_bt, torch.float64)[mask_bt]

        values, old, wanted = valid("values", values_bt), valid("old_values", old_values), valid("returns", returns)
        self.moments += ValueMoments(
            Moments.of_values(values),
            Moments.of_values(wanted),
            Moments.of_values(wanted - values),
            Moments.of_values((values - old).abs() > self.epsilon),
            Moments() if advantages is None else Moments.of_values(valid("advantages", advantages)),
        )

    def calculate(self) -> dict[str, float]:
        total = sum(self.gather_results([self.moments]), start=ValueMoments())
        self.reset()
        if total.values.count == 0:
            return {}
        result = {
            "value_mean": total.values.mean,
            "return_mean": total.returns.mean,
            "value_clip_ratio": total.clipped.mean,
            "explained_variance": 1 - total.errors.variance / max(total.returns.variance, 1e-8),
        }
        if total.advantages.count > 0:
            result["advantage_mean"] = total.advantages.mean
            result["advantage_std"] = total.advantages.variance**0.5
        return {f"train/{name}": value for name, value in result.items()}


def _on_host(numbers: TokenValues) -> TokenValues:
    """Return numbers in host memory: a tensor, or a list with a number or row for each sequence."""
    if isinstance(numbers, Tensor):
        return to_host([numbers])[0]
    if isinstance(numbers, Sequence) and all(isinstance(row, Tensor) for row in numbers):
        return to_host([row for row in numbers if isinstance(row, Tensor)])
    return numbers


def _two_dimensional(table: Tensor) -> Tensor:
    return table[None] if table.dim() == 1 else table


def _values_by_batch(outputs: Outputs | Sequence[Outputs], labels: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the values (b, t) of each micro-batch, or None if the outputs have none."""
    found: Any = outputs.get("values") if isinstance(outputs, Mapping) else [each.get("values") for each in outputs]
    if found is None or (isinstance(found, list) and any(each is None for each in found)):
        return None
    if isinstance(found, list | tuple):  # of each micro-batch
        parts = [_table(each) for each in found]
    else:  # of all sequences, padded to the longest
        counts, table = [len(each) for each in labels], _table(found)
        if len(table) != sum(counts):
            raise InvalidInputError("outputs", f"values of {len(table)} sequences", f"{sum(counts)}, as inputs have")
        parts = list(table.split(counts))
    if len(parts) != len(labels):
        raise InvalidInputError("outputs", f"values of {len(parts)} micro-batches", f"{len(labels)}, as inputs have")
    for part, wanted in zip(parts, labels, strict=True):
        if part.shape[1] < wanted.shape[1]:
            shape = f"values of shape {tuple(part.shape)}"
            raise InvalidInputError("outputs", shape, f"one for each label, {tuple(wanted.shape)}")
    return [part[:, : wanted.shape[1]] for part, wanted in zip(parts, labels, strict=True)]


def _table(values: Any) -> Tensor:
    """Return values as (b, t); those of a head with one output may be (b, t, 1)."""
    table = torch.as_tensor(values)
    return _two_dimensional(table.squeeze(-1) if table.dim() == 3 else table)
