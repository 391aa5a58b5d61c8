"""One tenant's adapter: fp32 master weights, Adam state, step count, gradient, and its compute copy while resident.

A frozen adapter is what a sampler keeps of one: a compute copy that never changes. While it is paged to the host,
``weights_P`` holds that copy; while it is resident, nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twinkle.model.decoder.lora.stacks import RowLayout, Stack
from twinkle.model.parallel import Ranks
from twinkle.model.types import LoraSpec

# Bytes a parameter of a resident adapter, beside its compute copy: weights, two Adam moments and the gradient in fp32,
# and what a batch holds for it in passing (its own row of gradients).
STATE_BYTES_PER_PARAMETER = 20
# Bytes a parameter in host memory: the same but for what a batch holds.
PAGED_BYTES_PER_PARAMETER = 16
# The same of a frozen adapter, of which a compute copy is all there is: its passage from host memory.
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
    divided: bool = False  # ranks hold parts of the gradient, which are yet to be added up

    @classmethod
    def fresh(cls, adapter_id: str, spec: LoraSpec, stack: Stack, weights_P: Tensor) -> "Adapter":
        return cls(adapter_id, spec, stack, weights_P, torch.zeros_like(weights_P), torch.zeros_like(weights_P))

    @classmethod
    def frozen_copy(cls, adapter: "Adapter") -> "Adapter":
        """The weights as they are now, in host memory."""
        row_P = torch.empty(adapter.layout.size, dtype=adapter.stack.dtype)
        if adapter.slot is not None:
            row_P.copy_(adapter.compute_copy)
        else:
            adapter.write_compute_copy(row_P)
        return cls._frozen(adapter, row_P)

    @classmethod
    def frozen_in_slot(cls, adapter: "Adapter", slot: int) -> "Adapter":
        """The same without leaving the device: the adapter is resident, and the slot is another of its stack."""
        adapter.stack.row(slot).copy_(adapter.compute_copy)
        frozen = cls._frozen(adapter, torch.empty(0))
        frozen.slot = slot
        return frozen

    @classmethod
    def _frozen(cls, adapter: "Adapter", weights_P: Tensor) -> "Adapter":
        nothing = torch.empty(0)
        return cls(adapter.adapter_id, adapter.spec, adapter.stack, weights_P, nothing, nothing, frozen=True)

    @property
    def layout(self) -> RowLayout:
        return self.stack.layout

    @property
    def compute_copy(self) -> Tensor:
        """(P,), in its stack."""
        assert self.slot is not None, "only a resident adapter has a compute copy"
        return self.stack.row(self.slot)

    @property
    def state_bytes(self) -> int:
        """Device memory it takes while resident, beside its compute copy."""
        return (FROZEN_BYTES_PER_PARAMETER if self.frozen else STATE_BYTES_PER_PARAMETER) * self.layout.size

    @property
    def host_bytes(self) -> int:
        """Host memory it takes now. In any thread."""
        rows = (self.weights_P, self.exp_avg_P, self.exp_avg_sq_P, self.gradient_P)
        copy = self.layout.size * self.stack.dtype.itemsize if self.slot is not None else 0
        on_host = sum(row.nbytes for row in rows if row is not None and row.device.type == "cpu")
        return on_host + (copy if self.stack.device.type == "cpu" else 0)

    @cached_property
    def finite(self) -> bool:
        """Whether a frozen adapter's weights are all numbers."""
        assert self.frozen, "weights that are trained may change"
        row_P = self.weights_P if self.slot is None else self.compute_copy
        return bool(row_P.isfinite().all())

    def add_gradient(self, gradient_P: Tensor) -> None:
        gradient_P = gradient_P.to(self.weights_P.device)  # its adapter may have been paged out meanwhile
        self.gradient_P = gradient_P if self.gradient_P is None else self.gradient_P + gradient_P

    def divide_gradient(self, *, keeps: bool) -> None:
        """From now on each rank adds to a part of its own. What all have is one's part; ``keeps``: this one's."""
        if not self.divided and not keeps:
            self.gradient_P = None
        self.divided = True

    def unite_gradient(self, ranks: Ranks) -> None:
        """Add up the parts of all ranks; all of them call it, and hold the adapter on the device."""
        if self.gradient_P is None:
            self.gradient_P = torch.zeros_like(self.weights_P)
        ranks.add_up(self.gradient_P)
        self.divided = False

    def drop_gradient(self) -> None:
        self.gradient_P, self.divided = None, False

    def refresh_compute_copy(self) -> None:
        """Bring the compute copy up to date with the master weights."""
        self.write_compute_copy(self.compute_copy)

    def write_compute_copy(self, row_P: Tensor) -> None:
        """In the compute type, B with the scaling."""
        split, weights_P = self.layout.a_size, self.weights_P.to(row_P.device)
        row_P[:split].copy_(weights_P[:split])
        torch.mul(weights_P[split:], self.spec.scaling, out=row_P[split:])

    def host_copy(self, optimizer: bool) -> "Adapter":
        """Weights, step and, if asked for, Adam's moments as they are now, in host memory, for whoever writes them."""
        moments = (_on_host(self.exp_avg_P), _on_host(self.exp_avg_sq_P)) if optimizer else (torch.empty(0),) * 2
        return Adapter(self.adapter_id, self.spec, self.stack, _on_host(self.weights_P), *moments, step=self.step)

    def enter(self, slot: int) -> None:
        """Take a place on the device."""
        self.slot = slot
        if self.frozen:
            self.compute_copy.copy_(self.weights_P, non_blocking=True)
            self.weights_P = torch.empty(0)
        else:
            self._move_state(self.stack.device)
            self.refresh_compute_copy()

    def leave(self) -> None:
        """Give up the place on the device; everything goes to host memory."""
        assert self.slot is not None, "it has no place"
        host = torch.device("cpu")
        if self.frozen:
            self.weights_P = _on_host(self.compute_copy)
        else:
            self._move_state(host)
        self.stack.give_back(self.slot)
        self.slot = None

    def _move_state(self, device: torch.device) -> None:
        self.weights_P = _moved(self.weights_P, device)
        self.exp_avg_P = _moved(self.exp_avg_P, device)
        self.exp_avg_sq_P = _moved(self.exp_avg_sq_P, device)
        if self.gradient_P is not None:
            self.gradient_P = _moved(self.gradient_P, device)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, also where the tensor is there already."""
    return _moved(tensor, torch.device("cpu")) if tensor.is_cuda else tensor.clone()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if device.type == "cpu":  # pinned memory: paging runs at the speed of the bus
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device)
