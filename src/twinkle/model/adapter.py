"""One tenant's adapter: fp32 master weights, Adam state, step count, gradient, and its compute copy while resident.

A frozen adapter is what a sampler keeps of one: weights that never change, without optimizer state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.model.stacks import RowLayout, Stack
from twinkle.model.types import LoraSpec

# Bytes a parameter of a resident adapter, beside its compute copy: weights, two Adam moments and the gradient in fp32,
# and what a batch holds for it in passing (its own row of gradients).
STATE_BYTES_PER_PARAMETER = 20
# The same of a frozen adapter, whose weights stay in host memory: their passage to the device.
FROZEN_BYTES_PER_PARAMETER = 4


@dataclass
class Adapter:
    """All tensors are flat rows (P,) of ``stack.layout``. ``slot`` is None while the adapter is paged to the host."""

    adapter_id: str
    spec: LoraSpec
    stack: Stack
    weights_P: Tensor
    exp_avg_P: Tensor
    exp_avg_sq_P: Tensor
    step: int = 0
    gradient_P: Tensor | None = None
    slot: int | None = None
    last_used: int = 0
    frozen: bool = False

    @classmethod
    def fresh(cls, adapter_id: str, spec: LoraSpec, stack: Stack, weights_P: Tensor) -> "Adapter":
        return cls(adapter_id, spec, stack, weights_P, torch.zeros_like(weights_P), torch.zeros_like(weights_P))

    @classmethod
    def frozen_copy(cls, adapter: "Adapter") -> "Adapter":
        """The weights as they are now, in host memory."""
        weights_P = _moved(adapter.weights_P, torch.device("cpu"))
        if weights_P is adapter.weights_P:
            weights_P = weights_P.clone()
        nothing = torch.empty(0)
        return cls(adapter.adapter_id, adapter.spec, adapter.stack, weights_P, nothing, nothing, frozen=True)

    @property
    def layout(self) -> RowLayout:
        return self.stack.layout

    @property
    def state_bytes(self) -> int:
        """Device memory it takes while resident, beside its compute copy."""
        return (FROZEN_BYTES_PER_PARAMETER if self.frozen else STATE_BYTES_PER_PARAMETER) * self.layout.size

    def add_gradient(self, gradient_P: Tensor) -> None:
        gradient_P = gradient_P.to(self.weights_P.device)  # its adapter may have been paged out meanwhile
        self.gradient_P = gradient_P if self.gradient_P is None else self.gradient_P + gradient_P

    def refresh_compute_copy(self) -> None:
        """Bring the compute copy up to date with the master weights; B carries the scaling there."""
        assert self.slot is not None, "only a resident adapter has a compute copy"
        row_P, split = self.stack.row(self.slot), self.layout.a_size
        weights_P = self.weights_P.to(row_P.device)  # those of a frozen adapter are in host memory
        row_P[:split].copy_(weights_P[:split])
        torch.mul(weights_P[split:], self.spec.scaling, out=row_P[split:])

    def move_state(self, device: torch.device) -> None:
        """Move everything but the compute copy; a frozen adapter has nothing that could have changed."""
        if self.frozen:
            return
        self.weights_P = _moved(self.weights_P, device)
        self.exp_avg_P = _moved(self.exp_avg_P, device)
        self.exp_avg_sq_P = _moved(self.exp_avg_sq_P, device)
        if self.gradient_P is not None:
            self.gradient_P = _moved(self.gradient_P, device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if device.type == "cpu":  # pinned memory: paging runs at the speed of the bus
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device)
