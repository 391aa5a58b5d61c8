"""One tenant's adapter: fp32 master weights, optimizer state, step count, gradient; while resident, a compute copy.

Resident means on the device; other adapters are paged out to host memory. The compute copy is what passes read: the
weights in the compute dtype, with B multiplied by the scaling. Weights and optimizer state of a resident adapter may be
in host memory: passes do not need them, and they come to the device for a step.

A frozen adapter is a version as a sampler holds it: only a compute copy, which never changes. While it is paged out,
``weights_P`` holds that copy; while it is resident, ``weights_P`` is empty.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from twinkle.model.adapters.cuts import AdapterCuts
from twinkle.model.decoder.lora.stacks import RowLayout, Stack
from twinkle.model.types import LoraSpec

ADAM = "Adam"  # also the name of AdamW's state, which is the same
# Device memory per parameter of a row in fp32, such as the accumulated gradient.
ROW_BYTES_PER_PARAMETER = 4
# Device memory per parameter of a resident adapter, beside its compute copy, while a pass adds to its gradient: the
# accumulated gradient, and that of the pass.
PASS_BYTES_PER_PARAMETER = 2 * ROW_BYTES_PER_PARAMETER
# The same during an optimizer step: the gradient, the weights, and two rows of optimizer state.
STATE_BYTES_PER_PARAMETER = 4 * ROW_BYTES_PER_PARAMETER
# Host memory per parameter of an adapter that is paged out: weights, moments and gradient.
PAGED_BYTES_PER_PARAMETER = 16
# Device memory per parameter of a frozen adapter, beside its compute copy: room for the transfer from host memory.
FROZEN_BYTES_PER_PARAMETER = 4


@dataclass
class Adapter:
    """The state of one adapter. Tensors are flat rows (P,) in the order of ``stack.layout``.

    ``exp_avg_P`` and ``exp_avg_sq_P`` hold the state of the ``optimizer`` (for Adam, its moments), ``scalars`` those of
    its numbers that are the same for all weights. A frozen adapter has no such state. ``slot``: its place in its stack,
    None while it is paged out to the host. ``passes``: the number of requests whose gradient was added, which decides
    what the next one drops (dropout). ``held``: how many gradients of running calls, not added yet, are on the device.
    ``stepped``: when its last optimizer step was, by the clock of its pool.
    """

    adapter_id: str
    spec: LoraSpec
    stack: Stack
    weights_P: Tensor
    exp_avg_P: Tensor
    exp_avg_sq_P: Tensor
    step: int = 0
    optimizer: str = ADAM
    scalars: Mapping[str, float] = field(default_factory=dict)
    gradient_P: Tensor | None = None
    slot: int | None = None
    last_used: int = 0
    frozen: bool = False
    whole_on_device: bool = False  # weights and optimizer state are on the device, too
    divided: bool = False  # ranks hold parts of the gradient that have not been added up yet
    passes: int = 0
    held: int = 0
    stepped: int = 0

    @classmethod
    def fresh(cls, adapter_id: str, spec: LoraSpec, stack: Stack, weights_P: Tensor) -> "Adapter":
        return cls(adapter_id, spec, stack, weights_P, torch.zeros_like(weights_P), torch.zeros_like(weights_P))

    @classmethod
    def frozen_copy(cls, adapter: "Adapter") -> "Adapter":
        """Return a frozen copy of an adapter's present weights, in host memory."""
        row_P = torch.empty(adapter.layout.size, dtype=adapter.stack.dtype)
        if adapter.slot is not None:
            row_P.copy_(adapter.compute_copy)
        else:
            adapter.write_compute_copy(row_P)
        return cls._frozen(adapter, row_P)

    @classmethod
    def frozen_in_slot(cls, adapter: "Adapter", slot: int) -> "Adapter":
        """Return a frozen copy of a resident adapter in another slot of its stack, without leaving the device."""
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
    def whole(self) -> RowLayout:
        """Return the layout of the whole adapter, of which ``layout`` may be the cut of this process."""
        return self.layout.whole

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the rank of each target module."""
        return tuple(self.spec.module_ranks([target.name for target in self.layout.targets]))

    @cached_property
    def scaling(self) -> float | None:
        """Return the factor of B if it is the same for all target modules of the whole adapter; else None."""
        found = set(self.spec.module_scalings([target.name for target in self.whole.targets]))
        return found.pop() if len(found) == 1 else None

    @cached_property
    def scalings(self) -> tuple[float, ...]:
        """Return the factor of B of each target module."""
        return tuple(self.spec.module_scalings([target.name for target in self.layout.targets]))

    @property
    def compute_copy(self) -> Tensor:
        """Return the compute copy (P,), a view into the stack."""
        assert self.slot is not None, "only a resident adapter has a compute copy"
        return self.stack.row(self.slot)

    @property
    def pass_bytes(self) -> int:
        """Return the bytes of device memory that a pass needs, beside the compute copy."""
        return (FROZEN_BYTES_PER_PARAMETER if self.frozen else PASS_BYTES_PER_PARAMETER) * self.layout.largest_size

    @property
    def step_bytes(self) -> int:
        """Return the bytes of device memory that an optimizer step needs, beside the compute copy."""
        return (FROZEN_BYTES_PER_PARAMETER if self.frozen else STATE_BYTES_PER_PARAMETER) * self.layout.largest_size

    @property
    def state_bytes(self) -> int:
        """Return the bytes of its weights and optimizer state."""
        rows = STATE_BYTES_PER_PARAMETER - ROW_BYTES_PER_PARAMETER
        return 0 if self.frozen else rows * self.layout.largest_size

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of device memory that the adapter takes while resident, beside its compute copy.

        There is always room for one gradient. More than two are not counted, as ``pass_bytes`` does not.
        """
        if self.frozen:
            return self.pass_bytes
        rows = min(max(self._gradients, 1), 2)
        return rows * ROW_BYTES_PER_PARAMETER * self.layout.largest_size

    @property
    def next_gradient_bytes(self) -> int:
        """Return how many bytes more it will take with one gradient more."""
        if self.frozen or self._gradients != 1:
            return 0
        return ROW_BYTES_PER_PARAMETER * self.layout.largest_size

    @property
    def _gradients(self) -> int:
        """Return how many gradients are on the device. One that is divided counts, also where this rank has none."""
        return (self.divided or self.gradient_P is not None) + self.held

    @property
    def device_bytes(self) -> int:
        """Return the bytes of device memory that the adapter takes now, beside its compute copy."""
        if self.slot is None:
            return 0
        return self.resident_bytes + (self.state_bytes if self.whole_on_device else 0)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory that the adapter takes now. May be called from any thread."""
        rows = (self.weights_P, self.exp_avg_P, self.exp_avg_sq_P, self.gradient_P)
        copy = self.layout.size * self.stack.dtype.itemsize if self.slot is not None else 0
        on_host = sum(row.nbytes for row in rows if row is not None and row.device.type == "cpu")
        return on_host + (copy if self.stack.device.type == "cpu" else 0)

    @cached_property
    def finite(self) -> bool:
        """Return whether a frozen adapter's weights hold neither NaN nor infinity."""
        assert self.frozen, "only the weights of a frozen adapter never change"
        row_P = self.weights_P if self.slot is None else self.compute_copy
        return bool(row_P.isfinite().all())

    def add_gradient(self, gradient_P: Tensor) -> None:
        # The adapter may have been paged out during the pass.
        gradient_P = gradient_P.to(torch.device("cpu") if self.slot is None else self.stack.device)
        self.gradient_P = gradient_P if self.gradient_P is None else self.gradient_P + gradient_P

    def divide_gradient(self, *, keeps: bool) -> None:
        """Begin to accumulate the gradient in parts: from now on each rank adds to its own part.

        A gradient accumulated before is the same on all ranks with the same cut, so only one of them (``keeps=True``)
        takes it as its part and the others drop it; otherwise it would be counted once per rank. In the same way only
        one rank of those with different cuts keeps the gradient of factors that they all have. Where ranks with
        different data hold different cuts, each keeps what it counts.
        """
        cut = self.layout.cut
        if not self.divided and not keeps and not (cut is not None and cut.spread):
            self.gradient_P = None
        if not self.divided and self.gradient_P is not None and cut is not None:
            for part in cut.uncounted:
                self.gradient_P[part.start : part.stop] = 0
        self.divided = True

    def unite_gradient(self, cuts: AdapterCuts) -> None:
        """Add up the parts of all ranks. All ranks call this, with the adapter on the device."""
        if self.gradient_P is None:
            self.gradient_P = torch.zeros(self.layout.size, device=self.stack.device)
        cuts.unite(self.gradient_P, self.layout)
        self.divided = False

    def begin_state(self, optimizer: str) -> None:
        """Let the state belong to this optimizer; if it belongs to another one, it starts from zero."""
        if self.optimizer != optimizer:
            self.optimizer, self.scalars, self.step = optimizer, {}, 0
            self.exp_avg_P.zero_()
            self.exp_avg_sq_P.zero_()

    def drop_gradient(self) -> None:
        self.gradient_P, self.divided = None, False

    def refresh_compute_copy(self) -> None:
        """Bring the compute copy up to date with the master weights."""
        self.write_compute_copy(self.compute_copy)

    def write_compute_copy(self, row_P: Tensor) -> None:
        """Write the weights to ``row_P`` in its dtype (the compute dtype), with B multiplied by the scaling."""
        split, weights_P = self.layout.a_size, self.weights_P.to(row_P.device)
        row_P[:split].copy_(weights_P[:split])
        if self.scaling is not None:
            torch.mul(weights_P[split:], self.scaling, out=row_P[split:])
            return
        row_P[split:].copy_(weights_P[split:])
        self.scale_b(row_P)

    def state_in_parts(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield where a part of the row is, and its weights and two rows of state on the device, to be changed there.

        Weights and state stay in host memory, and only ``size`` numbers of each are on the device at a time. Their
        memory is taken before the first part, so no part can fail after another one was changed. The compute copy is
        brought up to date as well.
        """
        assert not self.whole_on_device, "then nothing has to move"
        self._move_state(torch.device("cpu"), pinned=self.stack.device.type == "cuda")
        rows = (self.weights_P, self.exp_avg_P, self.exp_avg_sq_P)
        rooms = [torch.empty(size, device=self.stack.device) for _ in rows]
        for start in range(0, self.layout.size, size):
            part = slice(start, min(start + size, self.layout.size))
            moved = [
                room[: part.stop - start].copy_(row[part], non_blocking=True)
                for room, row in zip(rooms, rows, strict=True)
            ]
            yield part, moved[0], moved[1], moved[2]
            for row, room in zip(rows, moved, strict=True):
                row[part].copy_(room, non_blocking=True)
            self._write_part(part, moved[0])
        if self.scaling is None:
            self.scale_b(self.compute_copy)
        if self.stack.device.type == "cuda":  # host memory must have the last part before somebody reads it
            torch.cuda.current_stream(self.stack.device).synchronize()

    def _write_part(self, part: slice, weights_p: Tensor) -> None:
        """Write a part of the weights to the compute copy. Where modules have different scalings, B is not scaled."""
        row_p = self.compute_copy[part]
        split = min(max(self.layout.a_size - part.start, 0), len(row_p))
        row_p[:split].copy_(weights_p[:split])
        if self.scaling is None:
            row_p[split:].copy_(weights_p[split:])
        else:
            torch.mul(weights_p[split:], self.scaling, out=row_p[split:])

    def scale_b(self, row_P: Tensor) -> None:
        """Multiply the B of each module in a row by the module's scaling, in place."""
        for target, scaling in zip(self.layout.targets, self.scalings, strict=True):
            self.layout.views(row_P, target.name)[1].mul_(scaling)

    def take_state(self, whole: "Adapter", cut: Callable[[Tensor], Tensor]) -> None:
        """Take weights, optimizer state and counts from a whole adapter; ``cut`` returns the own part of a row.

        An accumulated gradient is dropped.
        """
        self.weights_P.copy_(cut(whole.weights_P))
        self.exp_avg_P.copy_(cut(whole.exp_avg_P))
        self.exp_avg_sq_P.copy_(cut(whole.exp_avg_sq_P))
        self.step, self.passes = whole.step, whole.passes
        self.optimizer, self.scalars = whole.optimizer, whole.scalars
        self.drop_gradient()

    def host_copy(self, optimizer: bool) -> "Adapter":
        """Return a copy in host memory, for writing to disk: weights, step and, with ``optimizer``, its state.

        The copy has an empty stack of its own: it may be sent to another process, which must not get the weights of
        other tenants.
        """
        stack = Stack(self.layout, self.stack.dtype, torch.device("cpu"))
        rows = (_on_host(self.exp_avg_P), _on_host(self.exp_avg_sq_P)) if optimizer else (torch.empty(0),) * 2
        return Adapter(
            self.adapter_id,
            self.spec,
            stack,
            _on_host(self.weights_P),
            *rows,
            step=self.step,
            passes=self.passes,
            optimizer=self.optimizer,
            scalars=self.scalars,
        )

    def enter(self, slot: int) -> None:
        """Move what passes need to the device, into this slot of the adapter's stack."""
        self.slot = slot
        if self.frozen:
            self.compute_copy.copy_(self.weights_P, non_blocking=True)
            self.weights_P = torch.empty(0)
            return
        self.refresh_compute_copy()
        if self.gradient_P is not None:
            self.gradient_P = _moved(self.gradient_P, self.stack.device)

    def enter_whole(self) -> None:
        """Move weights and optimizer state of a resident adapter to the device."""
        assert self.slot is not None, "the compute copy goes first"
        self._move_state(self.stack.device)
        self.whole_on_device = True

    def leave_state(self) -> None:
        """Move weights and optimizer state to host memory; the adapter stays resident."""
        self._move_state(torch.device("cpu"))
        self.whole_on_device = False

    def leave(self) -> None:
        """Move the adapter's tensors to host memory and free its slot."""
        assert self.slot is not None, "the adapter is not on the device"
        if self.frozen:
            self.weights_P = _on_host(self.compute_copy)
        else:
            self.leave_state()
            if self.gradient_P is not None:
                self.gradient_P = _moved(self.gradient_P, torch.device("cpu"))
        self.stack.give_back(self.slot)
        self.slot = None

    def _move_state(self, device: torch.device, *, pinned: bool = False) -> None:
        self.weights_P = _moved(self.weights_P, device, pinned=pinned)
        self.exp_avg_P = _moved(self.exp_avg_P, device, pinned=pinned)
        self.exp_avg_sq_P = _moved(self.exp_avg_sq_P, device, pinned=pinned)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, also if the tensor is there already."""
    return _moved(tensor, torch.device("cpu")) if tensor.is_cuda else tensor.clone()


def _moved(tensor: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return a tensor on a device. ``pinned``: on the host in pinned memory, also if it is on the host already."""
    if tensor.device == device and (not pinned or tensor.is_pinned()):
        return tensor
    if device.type == "cpu":  # pinned memory, so that paging runs at the speed of the bus
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)  # in the order of the device's work; from pinned memory without waiting
