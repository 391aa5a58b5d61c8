"""Paging of adapters between device and host memory. The least recently used are paged out; tenants do not notice.

A pass needs compute copies and gradients of its adapters on the device, an optimizer step also the weights and the
optimizer state of one. So where memory is short, weights and optimizer states leave the device before adapters do.

A resident adapter takes the bytes of its gradients: the accumulated one, and those that running calls hold for it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

import torch

from twinkle.errors import AdapterExistsError, AdapterNotFoundError, CapacityError
from twinkle.model.adapters.adapter import (
    FROZEN_BYTES_PER_PARAMETER,
    ROW_BYTES_PER_PARAMETER,
    STATE_BYTES_PER_PARAMETER,
    Adapter,
)
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK, RowLayout, Stack


class AdapterPool:
    """All adapters of a trainer, and a sampler's frozen versions; as many as ``budget_bytes`` allows are resident.

    Versions have no ids here: the sampler names them, and such a name may equal the id of an adapter. A pool belongs to
    the thread of its trainer; methods that may be called from other threads say so.
    """

    def __init__(self, budget_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self._dtype = dtype
        self._device = device
        self._adapters: dict[str, Adapter] = {}
        self._versions: list[Adapter] = []
        self._stacks: dict[str, Stack] = {}  # by the digest of their layout
        self._clock = count(1)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def ids(self) -> list[str]:
        return list(self._adapters)

    def get(self, adapter_id: str) -> Adapter:
        if adapter_id not in self._adapters:
            raise AdapterNotFoundError(adapter_id)
        return self._adapters[adapter_id]

    def stack_for(self, layout: RowLayout) -> Stack:
        if layout.digest not in self._stacks:
            self._stacks[layout.digest] = Stack(layout, self._dtype, self._device, self._slots(layout))
        return self._stacks[layout.digest]

    def _slots(self, layout: RowLayout) -> int:
        """Return how many slots a block of this layout has: fewer where one adapter would take the room of eight."""
        row_bytes, slots = layout.largest_size * self._dtype.itemsize, SLOTS_PER_BLOCK
        state_bytes = STATE_BYTES_PER_PARAMETER * layout.largest_size
        while slots > 1 and slots * row_bytes + max(slots * row_bytes, state_bytes) > self.budget_bytes:
            slots //= 2
        return slots

    def capacity(self, layout: RowLayout) -> tuple[int, int]:
        """Return how many adapters of a layout fit the device: with their optimizer states, and without.

        May be called from any thread.
        """
        block, size = self._slots(layout), layout.largest_size
        block_bytes = block * size * self._dtype.itemsize

        def most(each: int) -> int:
            blocks = self.budget_bytes // (block_bytes + block * each)
            left = self.budget_bytes - blocks * (block_bytes + block * each) - block_bytes
            return blocks * block + max(0, left // each)

        return most(STATE_BYTES_PER_PARAMETER * size), most(ROW_BYTES_PER_PARAMETER * size)

    def check_size(self, adapter_id: str, layout: RowLayout) -> None:
        """Raise CapacityError if an adapter of this layout can never be stepped. May be called from any thread."""
        size, slots = layout.largest_size, self._slots(layout)
        needed = (slots * self._dtype.itemsize + STATE_BYTES_PER_PARAMETER) * size
        _require_room(adapter_id, layout, needed, self.budget_bytes)

    def add(self, adapter: Adapter) -> None:
        """Add a new adapter. It starts in host memory and moves to the device when it is first used."""
        if adapter.adapter_id in self._adapters:
            raise AdapterExistsError(adapter.adapter_id)
        self.put(adapter)

    def put(self, adapter: Adapter) -> None:
        """Add an adapter like :meth:`add`, but replace any adapter with the same id."""
        self._require_fit(adapter, self.budget_bytes)
        if adapter.adapter_id in self._adapters:
            self.remove(adapter.adapter_id)
        self._adapters[adapter.adapter_id] = adapter

    def remove(self, adapter_id: str) -> None:
        adapter = self.get(adapter_id)
        self._release(adapter)
        del self._adapters[adapter_id]

    def add_version(self, version: Adapter) -> None:
        """Add a frozen adapter, which is paged like the others."""
        self._require_fit(version, self.budget_bytes)
        self._versions.append(version)

    def freeze(self, adapter_id: str) -> Adapter:
        """Add and return a frozen version of the adapter's present weights.

        The version is made on the device if the adapter is resident and both fit there, else in host memory.
        """
        adapter = self.get(adapter_id)
        needed = adapter.stack.block_bytes + _frozen_bytes(adapter)
        _require_room(adapter_id, adapter.layout, needed, self.budget_bytes)
        if adapter.slot is not None and self._make_slot(adapter.stack, _frozen_bytes(adapter), {id(adapter)}):
            version = Adapter.frozen_in_slot(adapter, adapter.stack.take())
            version.last_used = next(self._clock)
        else:
            version = Adapter.frozen_copy(adapter)
        self._versions.append(version)
        return version

    def remove_version(self, version: Adapter) -> None:
        self._release(version)
        self._versions = [other for other in self._versions if other is not version]

    def shrink(self, budget_bytes: int) -> None:
        """Reduce the budget. If resident adapters exceed the new one, all of them are paged out."""
        for adapter in self._all():
            self._require_fit(adapter, budget_bytes)
        self.budget_bytes = budget_bytes
        if self._used_bytes() > budget_bytes:
            for adapter in self._all():
                self._page_out(adapter)

    def resident_ids(self) -> list[str]:
        """Return the ids of resident adapters. May be called from any thread.

        The dict is copied in one step first, so adapters may be added and removed meanwhile.
        """
        return [adapter.adapter_id for adapter in list(self._adapters.values()) if adapter.slot is not None]

    def host_bytes(self) -> int:
        """Return the bytes of host memory that adapters take now, without versions. May be called from any thread."""
        return sum(adapter.host_bytes for adapter in list(self._adapters.values()))

    def fit(self, adapters: Iterable[Adapter], times: int = 1, *, whole: bool = False) -> bool:
        """Return whether one pass can use these adapters, and others that take ``times - 1`` times as much.

        ``whole``: whether they can be resident together with their optimizer states.
        """
        return times * _bytes_of(adapters, whole=whole) <= self.budget_bytes

    def make_resident(self, adapters: Iterable[Adapter], *, whole: bool = False, trains: bool = False) -> None:
        """Bring all these adapters to the device, and make room by paging out others, least recently used first.

        States leave before adapters, those of the least recent step first. ``whole``: with their weights and optimizer
        states, for a step; else with what a pass needs. ``trains``: the pass adds to their gradients.
        """
        wanted = list(adapters)
        assert self.fit(wanted, whole=whole), "the planner must not ask for more adapters than fit"
        now = next(self._clock)
        for adapter in wanted:
            adapter.last_used = now
        if not self._try_make_resident(wanted, whole=whole):
            # The adapters are scattered over half-empty blocks, which take too much: page all out and pack them anew.
            for adapter in self._all():
                self._page_out(adapter)
            done = self._try_make_resident(wanted, whole=whole)
            assert done, "adapters that fit found no room in an empty device"
        if trains:
            # Several requests of one adapter in a pass may take more than the budget; activations take less then.
            more = sum(adapter.next_gradient_bytes for adapter in wanted)
            self._make_room(lambda: more, {id(adapter) for adapter in wanted}, set())

    def make_ready_to_step(self, adapter: Adapter, *, may_be_in_parts: bool = False) -> bool:
        """Bring an adapter to the device for an optimizer step. Return whether the step is to be taken in parts.

        Then weights and state stay in host memory. That is where other adapters, or states that were used since this
        adapter's last step, would have to leave for them: many tenants that step in turn would only move each other's.
        """
        in_parts = may_be_in_parts and self._device.type == "cuda" and not self.has_room_for_state(adapter)
        self.make_resident([adapter], whole=not in_parts)
        adapter.stepped = next(self._clock)
        return in_parts

    def has_room_for_state(self, adapter: Adapter) -> bool:
        """Return whether an adapter's state fits, if others leave only if they were not used since its last step."""
        idle = [a for a in self._all() if a.whole_on_device and a.stepped < adapter.stepped]
        room = self.budget_bytes - self._used_bytes() + sum(other.state_bytes for other in idle)
        if adapter.slot is None:
            room -= adapter.resident_bytes + (0 if adapter.stack.has_free_slot else adapter.stack.block_bytes)
        return adapter.whole_on_device or adapter.state_bytes <= room

    def _try_make_resident(self, wanted: list[Adapter], *, whole: bool) -> bool:
        keep = {id(adapter) for adapter in wanted}
        for adapter in wanted:
            if adapter.slot is None:
                if not self._make_slot(adapter.stack, adapter.resident_bytes, keep):
                    return False
                adapter.enter(adapter.stack.take())
        for adapter in wanted:
            if whole and not adapter.whole_on_device and not adapter.frozen:
                more = adapter.state_bytes
                if not self._make_room(lambda more=more: more, keep, keep_states=keep):  # type: ignore[misc]
                    return False
                adapter.enter_whole()
        return True

    def _make_slot(self, stack: Stack, more: int, keep: set[int]) -> bool:
        """Make room for one more adapter of this stack, and ``more`` bytes; return False if there is not enough.

        ``keep``: ``id()`` of the adapters that must not be paged out; their optimizer states may be.
        """
        if not self._make_room(lambda: more + (0 if stack.has_free_slot else stack.block_bytes), keep, set()):
            return False
        if not stack.has_free_slot:
            stack.add_block()
        return True

    def _make_room(self, needed: Callable[[], int], keep: set[int], keep_states: set[int]) -> bool:
        """Make room for ``needed()`` bytes; return False if paging out all but those to keep is not enough."""
        while self._used_bytes() + needed() > self.budget_bytes:
            resident = [a for a in self._all() if a.slot is not None]
            with_state = [a for a in resident if a.whole_on_device and id(a) not in keep_states]
            idle = [a for a in resident if id(a) not in keep]
            if with_state:
                min(with_state, key=lambda a: (id(a) in keep, a.stepped, a.last_used)).leave_state()
            elif idle:
                self._page_out(min(idle, key=lambda a: a.last_used))
            else:
                return False
        return True

    def _page_out(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            adapter.leave()
            adapter.stack.drop_empty_blocks()

    def _release(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            adapter.stack.give_back(adapter.slot)
            adapter.slot, adapter.whole_on_device = None, False
            adapter.stack.drop_empty_blocks()

    def _used_bytes(self) -> int:
        blocks = sum(stack.allocated_bytes for stack in self._stacks.values())
        return blocks + sum(adapter.device_bytes for adapter in self._all())

    def _all(self) -> list[Adapter]:
        return [*self._adapters.values(), *self._versions]

    def _require_fit(self, adapter: Adapter, budget_bytes: int) -> None:
        _require_room(adapter.adapter_id, adapter.layout, _bytes_of([adapter], whole=True), budget_bytes)


def _require_room(adapter_id: str, layout: RowLayout, needed: int, budget_bytes: int) -> None:
    if needed > budget_bytes:
        raise CapacityError(
            f"adapter {adapter_id!r} needs {needed / 2**20:.0f} MiB on the device ({layout.size / 1e6:.1f} million "
            f"parameters of rank {layout.rank}), {budget_bytes / 2**20:.0f} MiB are set aside for adapters; a lower "
            "rank or fewer modules need less"
        )


def _frozen_bytes(adapter: Adapter) -> int:
    return FROZEN_BYTES_PER_PARAMETER * adapter.layout.largest_size


def _bytes_of(adapters: Iterable[Adapter], *, whole: bool) -> int:
    wanted = list(adapters)
    counts = Counter(adapter.stack for adapter in wanted)
    blocks = sum(-(-count // stack.slots) * stack.block_bytes for stack, count in counts.items())
    return blocks + sum(adapter.step_bytes if whole else adapter.pass_bytes for adapter in wanted)
