"""Keys and values of earlier tokens, in blocks that sequences own or share.

A block holds ``BLOCK`` consecutive tokens of one sequence, for all layers. Sequences that continue one prompt share
its blocks; a sequence that has to write into a shared block gets a copy first. Block 0 has no owner and always holds
zeros: it pads block tables of unequal length. A block that is taken empty is zeroed before its first use, because
masked attention multiplies its old contents by zero, and zero times a NaN left by another tenant would be NaN.

Full blocks can be found again by their contents (see ``prefix_cache``). Such a remembered block counts as free once it
has no owners, but it is reused only when no other block is free, the one that has been without owners longest first.

Shapes: B blocks, J key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.errors import CapacityError
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.prefix_cache import PrefixCache
from twinkle.sampler.torch_sampler.states.pool import StatePool

BLOCK = 16  # tokens
_USUAL_LENGTH = 1024  # tokens of a sequence, prompt and sample: the default cache has room for so many, where it can
_SHORT_LENGTH = 512  # tokens of a sequence for which the cache must have room, if more than _ALWAYS_PLACES run at once
_ALWAYS_PLACES = 256  # sequences that may run at once, however small the cache is
_LEFT_FOR_ADAPTERS = 12 << 30  # 8 adapters of rank 32 on all linear layers of an 8B model, with optimizer states


@dataclass(frozen=True)
class LayerShape:
    """The size of one token's keys and values in one layer. Keys and values may differ in width."""

    heads: int
    key_width: int
    value_width: int

    @property
    def size(self) -> int:
        return self.heads * (self.key_width + self.value_width)


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(shape.size for shape in shapes) * dtype.itemsize


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def default_budget(available: int, per_block: int, max_sequences: int, max_length: int) -> int:
    """Return the bytes of a cache for which no size was asked. ``available``: what adapters and cache share.

    The cache takes a third. Where that does not hold ``max_sequences`` sequences of ``_USUAL_LENGTH`` tokens, it takes
    more, as long as ``_LEFT_FOR_ADAPTERS`` remain. It never takes more than all sequences can fill.
    """
    usual, most = (  # one more block of each sequence is for tokens that are drawn ahead
        (max_sequences * (blocks_for(length) + 1) + 1) * per_block
        for length in (min(_USUAL_LENGTH, max_length), max_length)
    )
    return min(max(available // 3, min(usual, available - _LEFT_FOR_ADAPTERS)), most)


def default_places(most: int, blocks: int) -> int:
    """Return how many sequences run at once in a cache of this size, if no number was asked for: at most ``most``.

    If more sequences ran than have room for ``_SHORT_LENGTH`` tokens each, some would be preempted again and again.
    """
    return min(most, max(_ALWAYS_PLACES, blocks // blocks_for(_SHORT_LENGTH)))


class KeyValueCache:
    """The blocks of the cache, with the number of owners of each, and the names of remembered blocks.

    ``keys[layer]`` and ``values[layer]`` are (B, BLOCK, J, D) views of one buffer.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        states: StatePool | None = None,
    ) -> None:
        """``states``: those of layers with linear attention, in a model that has some. They are not in the budget."""
        per_block = BLOCK * token_bytes(shapes, dtype)
        count = budget_bytes // per_block
        if count < 2:
            raise CapacityError(
                f"kv_budget_bytes: got {budget_bytes}, allowed: at least {2 * per_block}, two blocks of {BLOCK} tokens"
            )
        self.states = states
        self._shapes = shapes
        self._buffer = torch.empty(count, per_block // dtype.itemsize, dtype=dtype, device=device)
        self._size = self._buffer.shape
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._owners = [0] * count
        self._cut()
        self.reset()

    def _cut(self) -> None:
        """Make the views of the layers."""
        self._buffer[0] = 0
        place = 0
        for shape in self._shapes:
            for views, width in ((self.keys, shape.key_width), (self.values, shape.value_width)):
                size = BLOCK * shape.heads * width
                part = self._buffer.narrow(1, place, size)
                views.append(part.unflatten(1, (BLOCK, shape.heads, width)))
                place += size

    def reset(self) -> None:
        """Forget all contents, remembered blocks and reserved ones. No sequence may own blocks."""
        self._free = list(range(len(self._owners) - 1, 0, -1))
        self._idle: dict[int, None] = {}  # remembered, without owners, in the order in which they lost the last one
        self._prefixes = PrefixCache()
        self._owners = [0] * len(self._owners)
        self._unclean: list[int] = []
        self._set_aside = 1
        if self.states is not None:
            self.states.reset()

    def free_memory(self) -> None:
        """Free the memory of all blocks. The cache can be used again after :meth:`take_memory`."""
        self.keys.clear()
        self.values.clear()
        self._buffer = self._buffer.new_empty(0)
        if self.states is not None:
            self.states.free_memory()

    def take_memory(self) -> None:
        """Take memory again after :meth:`free_memory`, with nothing in it."""
        self._buffer = self._buffer.new_empty(self._size)
        self._cut()
        if self.states is not None:
            self.states.take_memory()
        self.reset()

    def forget_all(self) -> None:
        """Forget the remembered blocks of all versions, so that no request finds them again."""
        for version in self._prefixes.versions():
            self.forget(version)
        if self.states is not None:
            self.states.forget_all()

    @property
    def capacity(self) -> int:
        """Return how many blocks sequences may own: all but block 0 and those set aside."""
        return len(self._owners) - self._set_aside

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes + (0 if self.states is None else self.states.nbytes)

    @property
    def remembered(self) -> int:
        """Return how many blocks can be found by their contents."""
        return len(self._prefixes)

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    def set_aside(self) -> int:
        """Reserve a block that sequences will never own, and return its number."""
        self._set_aside += 1
        return self.take()

    def take(self) -> int:
        """Take a free block for one owner and return its number. It holds zeros after the next :meth:`clean`."""
        block = self._take()
        self._unclean.append(block)
        return block

    def take_copy(self, block: int) -> int:
        """Take a free block, copy the contents of another block into it, and return its number."""
        copy = self._take()
        if copy in self._unclean:  # taken and released again before the next clean
            self._unclean.remove(copy)
        self._buffer[copy].copy_(self._buffer[block])
        return copy

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Add one owner to each block, and return the blocks as a new list."""
        for block in blocks:
            self._idle.pop(block, None)
            self._owners[block] += 1
        return list(blocks)

    def shared(self, block: int) -> bool:
        return self._owners[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block. A block without owners counts as free; if remembered, it can be found."""
        for block in reversed(blocks):  # so that the end of a sequence is reused before its beginning
            self._owners[block] -= 1
            if self._owners[block] == 0 and block in self._prefixes:
                self._idle[block] = None
            elif self._owners[block] == 0:
                self._free.append(block)

    def remember(self, version: int, name: bytes, block: int) -> None:
        """Make a full block findable under its name. It must not change while it has owners."""
        self._prefixes.remember(version, name, block)

    def find(self, version: int, name: bytes) -> int | None:
        return self._prefixes.find(version, name)

    def forget(self, version: int) -> None:
        """Forget all remembered blocks of a version, so that no request finds them again."""
        if self.states is not None:
            self.states.forget(version)
        for block in self._prefixes.forget(version):
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._prefixes.drop(block)
        self._owners[block] = 1
        return block

    def clean(self) -> None:
        """Zero all blocks taken since the last call, in one operation. Must be called before blocks are written."""
        if self._unclean:
            self._buffer.index_fill_(0, to_device(torch.tensor(self._unclean), self._buffer.device), 0)
            self._unclean.clear()
