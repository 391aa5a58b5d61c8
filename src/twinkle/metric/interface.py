"""The interface of metrics: a metric accumulates over steps and reports when it is asked.

The model gives each metric the inputs and outputs of a step (see :mod:`twinkle.loss.interface`; outputs also hold
"loss" and "num_tokens"), and as keywords: ``lr`` (a list, one for each parameter group), ``step`` (backward calls so
far, minus one), ``gradient_accumulation_steps``, ``grad_norm``, ``loss_reduction`` ("sum" or "mean"), and all keywords
that the caller of forward_backward gave for the loss. ``call_arguments`` names the keywords that a metric reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch.distributed

Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # a padded batch, or features one by one
Outputs = Mapping[str, Any]

Part = TypeVar("Part")

# Keywords that the model itself passes; a caller of forward_backward may not give them.
MODEL_ARGUMENTS = ("grad_norm", "gradient_accumulation_steps", "loss_reduction", "lr", "step")


class Metric(ABC):
    """The base class of metrics. With a device mesh and a process group, results cover all processes of the group."""

    call_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, device_mesh: object | None = None, process_group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        self.device_mesh = device_mesh
        self.process_group = process_group
        self.reset()

    @abstractmethod
    def accumulate(self, inputs: Inputs, outputs: Outputs, **_: Any) -> None:
        """Add the inputs and outputs of one step."""

    @abstractmethod
    def calculate(self) -> dict[str, Any]:
        """Return the results since the last reset, then reset (``CompletionRewardMetric`` does not)."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all accumulated values."""

    def gather_results(self, local: Sequence[Part]) -> list[Part]:
        """Return the ``local`` items of all processes, by rank. Every process must call it.

        Without a device mesh or without a process group, only this process's items are returned.
        """
        if self.device_mesh is None or self.process_group is None:
            return list(local)
        size = torch.distributed.get_world_size(self.process_group)
        parts: list[list[Part] | None] = [None] * size
        torch.distributed.all_gather_object(parts, list(local), group=self.process_group)
        return [item for part in parts if part is not None for item in part]
