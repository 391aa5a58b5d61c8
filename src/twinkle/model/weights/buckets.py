"""Tensors in buckets: many small tensors travel together, and a tensor that is larger than a bucket in pieces."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Bucket", "TensorMeta", "pack", "packed_bytes", "plan_buckets", "unpack"]

_ALIGNMENT = 16  # bytes; every piece begins at a multiple, so that it can be read as numbers of any dtype


@dataclass(frozen=True)
class TensorMeta:
    """A tensor, or a piece of it: the numbers ``start`` … ``start + count`` of the flattened tensor.

    ``offset``: where the piece begins in its bucket, in bytes. ``count`` −1: all numbers from ``start`` on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    start: int = 0
    count: int = -1

    def __post_init__(self) -> None:
        if self.count < 0:
            object.__setattr__(self, "count", prod(self.shape) - self.start)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Return whether this is the whole tensor."""
        return self.count == prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Bucket:
    """Pieces of tensors, and their numbers: a tensor of one dimension for each piece.

    In one process these may be views of the model's own weights: whoever receives a bucket copies from it.
    ``packed``: the tensor of bytes of which all of them are views, if there is one.
    """

    pieces: tuple[TensorMeta, ...]
    tensors: tuple[Tensor, ...]
    packed: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        return zip(self.pieces, self.tensors, strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # To another process go the numbers alone, in host memory. A view pickled as it is would take the whole tensor
        # along. As an array, Ray's object store hands them out without a copy.
        return _unpickled, (self.pieces, pack(self).cpu().numpy())


def plan_buckets(tensors: Iterable[TensorMeta], bucket_bytes: int) -> list[tuple[TensorMeta, ...]]:
    """Divide tensors, in their order, into buckets of at most ``bucket_bytes``, which is at least 16."""
    buckets: list[tuple[TensorMeta, ...]] = []
    bucket: list[TensorMeta] = []
    used = 0
    for tensor in tensors:
        most = bucket_bytes // tensor.dtype.itemsize  # numbers of this dtype in a bucket
        start = tensor.start
        while start < tensor.stop:
            count = min(tensor.stop - start, most)
            if bucket and used + count * tensor.dtype.itemsize > bucket_bytes:
                buckets.append(tuple(bucket))
                bucket, used = [], 0
            bucket.append(replace(tensor, offset=used, start=start, count=count))
            used += -(-count * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            start += count
    if bucket:
        buckets.append(tuple(bucket))
    return buckets


def packed_bytes(pieces: Sequence[TensorMeta]) -> int:
    """Return the size of a bucket with these pieces, in bytes."""
    return max((piece.offset + piece.nbytes for piece in pieces), default=0)


def pack(bucket: Bucket) -> Tensor:
    """Return a bucket as one tensor of bytes, to be sent to another process."""
    if bucket.packed is not None:
        return bucket.packed
    device = bucket.tensors[0].device if bucket.tensors else torch.device("cpu")
    packed = torch.empty(packed_bytes(bucket.pieces), dtype=torch.uint8, device=device)
    for piece, tensor in bucket:
        packed[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).copy_(tensor)
    return packed


def unpack(pieces: Sequence[TensorMeta], packed: Tensor) -> Bucket:
    """Return the bucket that :func:`pack` made; its tensors are views of ``packed``."""
    views = [packed[piece.offset : piece.offset + piece.nbytes].view(piece.dtype) for piece in pieces]
    return Bucket(tuple(pieces), tuple(views), packed)


def _unpickled(pieces: Sequence[TensorMeta], packed: NDArray[np.uint8]) -> Bucket:
    with warnings.catch_warnings():  # the array may be memory that several processes share; nobody writes to a bucket
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return unpack(pieces, torch.from_numpy(packed))
