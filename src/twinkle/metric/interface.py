"""What a metric is: it accumulates over steps, and tells what it saw when asked.

The model gives each metric the inputs and outputs of a step (see :mod:`twinkle.loss.interface`; outputs also hold
"loss" and "num_tokens") and by keyword: ``lr`` (a list, one of each parameter group), ``step`` (backward calls so far,
minus one), ``gradient_accumulation_steps``, ``grad_norm``, ``loss_reduction`` ("sum" or "mean"), and everything that
the caller of forward_backward gave for the loss. ``call_arguments`` names those that a metric reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch.distributed

Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # a padded batch, or features one by one
Outputs = Mapping[str, Any]

Part = TypeVar("Part")

# What the model itself gives; nobody can give it to forward_backward.
MODEL_ARGUMENTS = ("grad_norm", "gradient_accumulation_steps", "loss_reduction", "lr", "step")


class Metric(ABC):
    """Base of the metrics. With a device mesh and a process group, results are those of all its processes together."""

    call_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, device_mesh: object | None = None, process_group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        self.device_mesh = device_mesh
        self.process_group = process_group
        self.reset()

    @abstractmethod
    def accumulate(self, inputs: Inputs, outputs: Outputs, **_: Any) -> None:
        """Takes one step into account."""

    @abstractmethod
    def calculate(self) -> dict[str, Any]:
        """What was seen since the last reset; then resets."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything."""

    def gather_results(self, local: Sequence[Part]) -> list[Part]:
        """``local`` of every process, in the order of ranks. Every process must call it."""
        if self.device_mesh is None or self.process_group is None:
            return list(local)
        size = torch.distributed.get_world_size(self.process_group)
        parts: list[list[Part] | None] = [None] * size
        torch.distributed.all_gather_object(parts, list(local), group=self.process_group)
        return [item for part in parts if part is not None for item in part]
