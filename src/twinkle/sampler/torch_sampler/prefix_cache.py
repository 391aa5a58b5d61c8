"""What blocks of the cache hold, so that a later request with the same beginning finds them.

A full block is named by a digest of everything up to its end: the names of a sequence are a chain. They are kept apart
by version, which decides what keys and values a token has. Where positions are encoded in another way, there is another
chain; and so for requests of another scope, who shall not learn from the time it takes what others have asked.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BASE = 0  # in place of a version: the base model


def first_name(length_class: int, scope: str) -> bytes:
    """What the chain begins with."""
    return length_class.to_bytes(8, "little") + scope.encode()


def next_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of the block that holds ``tokens``, after a block of the name ``before``."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Names of blocks by version, and nothing of who owns them."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[bytes, int]] = {}
        self._names: dict[int, tuple[int, bytes]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    def find(self, version: int, name: bytes) -> int | None:
        return self._blocks.get(version, {}).get(name)

    def remember(self, version: int, name: bytes, block: int) -> None:
        """One block a name: sequences may compute the same side by side, the first to do so is kept."""
        if block not in self._names and self._blocks.setdefault(version, {}).setdefault(name, block) == block:
            self._names[block] = version, name

    def drop(self, block: int) -> None:
        """The block will hold something else."""
        if block in self._names:
            version, name = self._names.pop(block)
            del self._blocks[version][name]

    def forget(self, version: int) -> list[int]:
        """Drop all blocks of a version; returns them."""
        blocks = list(self._blocks.pop(version, {}).values())
        for block in blocks:
            del self._names[block]
        return blocks
