"""The states of linear attention after the cached tokens of each sequence, in slots beside the blocks of the cache.

A state is large (tens of MB in a large model) and cannot be shared: the next token changes it. Each running sequence
has a slot of its own. Further slots hold copies, for samples of a prompt that have not begun, and states that a later
request with the same beginning goes on from. Such a stored state has the name of the block behind which it was, and is
dropped when its slot is needed, the one that was not used for longest first.

Shapes: S slots, V value heads of D keys and E values, F features and W width of the convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.errors import CapacityError

_EXTRA_SHARE = 4  # one slot in so many is for copies
_FEWEST = 3  # slots: one sequence runs, one prompt is kept for its samples, one state is stored


@dataclass(frozen=True)
class StateShape:
    """The size of a sequence's state in one layer: its matrices, and the columns that the convolution looks back at."""

    heads: int
    key_width: int
    value_width: int
    features: int
    columns: int

    def size(self, dtype: torch.dtype) -> int:
        """Return the bytes of one state; ``dtype``: that of the columns."""
        matrices = 4 * self.heads * self.key_width * self.value_width
        return matrices + self.features * self.columns * dtype.itemsize


def slots_for(sequences: int, state_bytes: int, most_bytes: int) -> int:
    """Return how many slots to make for this many sequences at once, in at most ``most_bytes``."""
    wanted = max(_FEWEST, sequences + max(2, sequences // _EXTRA_SHARE))
    return max(_FEWEST, min(wanted, most_bytes // state_bytes))


class StatePool:
    """The slots of all layers. ``matrices[i]`` (S, V, D, E) fp32 and ``columns[i]`` (S, W − 1, F) are of one layer.

    They have one slot more than ``slots``, the spare one, which no sequence ever has.
    """

    def __init__(self, shapes: Sequence[StateShape], dtype: torch.dtype, device: torch.device, slots: int) -> None:
        if slots < _FEWEST:
            raise CapacityError(f"slots: got {slots}, allowed: at least {_FEWEST} states of linear attention")
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._slots = slots
        self._extras = max(2, slots // (_EXTRA_SHARE + 1))
        self.matrices: list[Tensor] = []
        self.columns: list[Tensor] = []
        self.take_memory()

    @property
    def running(self) -> int:
        """Return how many sequences can run at once."""
        return self._slots - self._extras

    @property
    def spare(self) -> int:
        """Return the slot that rows without a sequence may change."""
        return self._slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.matrices, *self.columns))

    @property
    def stored(self) -> int:
        """Return how many states can be found by the tokens before them."""
        return len(self._stored)

    def take_memory(self) -> None:
        for each in self._shapes:
            size = self._slots + 1, each.heads, each.key_width, each.value_width
            self.matrices.append(torch.zeros(size, dtype=torch.float32, device=self._device))
            size_of_columns = self._slots + 1, each.columns, each.features
            self.columns.append(torch.zeros(size_of_columns, dtype=self._dtype, device=self._device))
        self.reset()

    def free_memory(self) -> None:
        self.matrices.clear()
        self.columns.clear()

    def reset(self) -> None:
        """Forget all states. No sequence may have a slot."""
        self._free = list(range(self._slots - 1, -1, -1))
        self._held = 0  # copies for samples that have not begun
        self._stored: dict[tuple[int, bytes], int] = {}  # by version and name, that used last at the end

    # --- slots of sequences -------------------------------------------------------------------------------------------

    def take(self) -> int:
        """Return a slot for a sequence that begins to run. What it holds has no meaning yet."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy a state. The device does it in the order of passes."""
        for tensor in (*self.matrices, *self.columns):
            tensor[target].copy_(tensor[source])

    # --- copies -------------------------------------------------------------------------------------------------------

    def hold(self, slot: int) -> int | None:
        """Return a slot with a copy of this state, which stays until :meth:`drop`; None if there is no room for one."""
        if self._held + 1 >= self._extras:  # one is left for stored states
            return None
        self._make_room()
        self._held += 1
        copy = self._free.pop()
        self.copy(slot, copy)
        return copy

    def drop(self, slot: int) -> None:
        self._held -= 1
        self._free.append(slot)

    def store(self, version: int, name: bytes, slot: int) -> None:
        """Store a copy of the state behind the block with this name, so that :meth:`find` returns it."""
        if self.find(version, name) is None:
            self._make_room()
            copy = self._free.pop()
            self.copy(slot, copy)
            self._stored[version, name] = copy

    def find(self, version: int, name: bytes) -> int | None:
        """Return the slot of a stored state, which counts as used now."""
        slot = self._stored.pop((version, name), None)
        if slot is not None:
            self._stored[version, name] = slot
        return slot

    def forget(self, version: int) -> None:
        """Drop the stored states of a version."""
        for key in [each for each in self._stored if each[0] == version]:
            self._free.append(self._stored.pop(key))

    def forget_all(self) -> None:
        for version in {version for version, _ in self._stored}:
            self.forget(version)

    def _make_room(self) -> None:
        """Make a free slot for one more copy, in place of the stored state that was not used for longest if need be."""
        while self._held + len(self._stored) >= self._extras:
            self._free.append(self._stored.pop(next(iter(self._stored))))
