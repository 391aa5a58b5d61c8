"""The names of full cache blocks, by which a later request with the same beginning finds them.

The name of a full block is a digest of its tokens, of the images that begin among them, and of the name of the block
before it, so it stands for everything up to the block's end. Names are kept apart by version, because a version decides
which keys and values a token has. Length classes (ways to encode positions) and scopes have separate chains of names.
Scopes are separate for privacy: the response time of a prompt must not reveal whether another tenant has sent the same
prompt.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from twinkle.model.types import Image

BASE = 0  # the version key of the base model


def first_name(length_class: int, scope: str) -> bytes:
    """Return the start of a chain of names, which takes the place of the name before the first block."""
    return length_class.to_bytes(8, "little") + scope.encode()


def next_name(before: bytes, tokens: Sequence[int], images: Sequence[Image] = ()) -> bytes:
    """Return the name of the block that holds ``tokens`` and follows the block named ``before``.

    images: those that begin in the block. Where they begin is not in their tokens: two images side by side look like
    one.
    """
    key = b""
    if images:
        seen = repr([(image.first, image.rows, image.columns, image.digest) for image in images])
        key = blake2b(seen.encode(), digest_size=16).digest()
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16, key=key).digest()


class PrefixCache:
    """Maps names to blocks, for each version. Who owns a block is not known here."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[bytes, int]] = {}
        self._names: dict[int, tuple[int, bytes]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    def versions(self) -> list[int]:
        return list(self._blocks)

    def find(self, version: int, name: bytes) -> int | None:
        return self._blocks.get(version, {}).get(name)

    def remember(self, version: int, name: bytes, block: int) -> None:
        """Store a block under its name. If two sequences computed the same tokens in parallel, the first is kept."""
        if block not in self._names and self._blocks.setdefault(version, {}).setdefault(name, block) == block:
            self._names[block] = version, name

    def drop(self, block: int) -> None:
        """Forget one block, which is about to be overwritten."""
        if block in self._names:
            version, name = self._names.pop(block)
            del self._blocks[version][name]

    def forget(self, version: int) -> list[int]:
        """Forget all blocks of a version, and return them."""
        blocks = list(self._blocks.pop(version, {}).values())
        for block in blocks:
            del self._names[block]
        return blocks
