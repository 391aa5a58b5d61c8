"""Keys and values of earlier tokens, in blocks that sequences own or share.

A block holds ``BLOCK`` consecutive tokens of one sequence, for all layers. Sequences that continue one prompt share its
blocks; the one that writes into a shared block gets a copy first. Block 0 belongs to nobody and stays zero: tables of
unequal length are filled up with it. Blocks are zeroed when they are taken, because a weight of zero times another
tenant's NaN would be NaN.

Full blocks can be remembered by what they hold (see ``prefix_cache``). A remembered block without owners is as free as
any other; it is only taken last, those that have been without owners for longest first.

Shapes: B blocks, J key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.errors import CapacityError
from twinkle.sampler.torch_sampler.prefix_cache import PrefixCache

BLOCK = 16  # tokens


@dataclass(frozen=True)
class LayerShape:
    """What one token keeps in one layer; keys and values may differ in width."""

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


class KeyValueCache:
    """``keys[layer]`` and ``values[layer]`` are (B, BLOCK, J, D) views of one buffer."""

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        per_block = BLOCK * token_bytes(shapes, dtype)
        count = budget_bytes // per_block
        if count < 2:
            raise CapacityError(
                f"kv_budget_bytes: got {budget_bytes}, allowed: at least {2 * per_block}, two blocks of {BLOCK} tokens"
            )
        self._buffer = torch.empty(count, per_block // dtype.itemsize, dtype=dtype, device=device)
        self._buffer[0] = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        place = 0
        for shape in shapes:
            for views, width in ((self.keys, shape.key_width), (self.values, shape.value_width)):
                size = BLOCK * shape.heads * width
                part = self._buffer.narrow(1, place, size)
                views.append(part.unflatten(1, (BLOCK, shape.heads, width)))
                place += size
        self._free = list(range(count - 1, 0, -1))
        self._idle: dict[int, None] = {}  # remembered, without owners, in the order in which they lost the last one
        self._prefixes = PrefixCache()
        self._owners = [0] * count
        self._unclean: list[int] = []
        self._set_aside = 1

    @property
    def capacity(self) -> int:
        """Blocks that sequences may own."""
        return len(self._owners) - self._set_aside

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    def set_aside(self) -> int:
        """A block that sequences will never own."""
        self._set_aside += 1
        return self.take()

    def take(self) -> int:
        """A block for one owner; it is zero after the next :meth:`clean`."""
        block = self._take()
        self._unclean.append(block)
        return block

    def take_copy(self, block: int) -> int:
        """A block with the contents of another."""
        copy = self._take()
        if copy in self._unclean:  # somebody had it and never came to write
            self._unclean.remove(copy)
        self._buffer[copy].copy_(self._buffer[block])
        return copy

    def share(self, blocks: Sequence[int]) -> list[int]:
        """One more owner for each."""
        for block in blocks:
            self._idle.pop(block, None)
            self._owners[block] += 1
        return list(blocks)

    def shared(self, block: int) -> bool:
        return self._owners[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each; blocks without owners are free."""
        for block in reversed(blocks):  # the end of a sequence is forgotten before its beginning
            self._owners[block] -= 1
            if self._owners[block] == 0 and block in self._prefixes:
                self._idle[block] = None
            elif self._owners[block] == 0:
                self._free.append(block)

    def remember(self, version: int, name: bytes, block: int) -> None:
        """The block is full and will not change while it has owners."""
        self._prefixes.remember(version, name, block)

    def find(self, version: int, name: bytes) -> int | None:
        return self._prefixes.find(version, name)

    def forget(self, version: int) -> None:
        """Nobody will ask for blocks of this version again."""
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
        """Zero what has been taken since the last time, all at once. To be called before anything is written."""
        if self._unclean:
            self._buffer[torch.tensor(self._unclean, device=self._buffer.device)] = 0
            self._unclean.clear()
