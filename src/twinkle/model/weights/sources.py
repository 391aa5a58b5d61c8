"""Reads pieces of weights from a model that is trained: of whole and sharded tensors, with or without an adapter.

The model's own tensors are never changed: an adapter is merged into the numbers that are read.

Shapes: O output and I input features of a linear layer, R rank of an adapter, E experts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from twinkle.model.weights.buckets import Bucket, TensorMeta, packed_bytes, unpack

__all__ = ["LowRank", "ReadableWeight", "WeightSource", "merge", "metas", "read_bucket"]

_NUMBERS_AT_ONCE = 1 << 18  # numbers of a merged weight that are computed at once: 1 MiB in fp32


@dataclass(frozen=True)
class LowRank:
    """An adapter of one weight: it adds ``scaling`` · B A.

    That of the weights of all experts, (E, O, I), has an A and a B for each: (E, R, I) and (E, O, R).
    """

    a_RI: Tensor
    b_OR: Tensor
    scaling: float


class ReadableWeight(Protocol):
    """One weight of a model that is trained, wherever its numbers are."""

    @property
    def device(self) -> torch.device: ...

    @property
    def computed(self) -> bool:
        """Return whether what is read is not simply a part of a tensor of this process."""
        ...

    def meta(self, name: str) -> TensorMeta: ...

    def view(self, piece: TensorMeta) -> Tensor:
        """Return numbers of the flattened weight, which is not :attr:`computed`, without a copy."""
        ...

    def read(self, piece: TensorMeta, out: Tensor) -> None:
        """Write numbers of the flattened weight to ``out``. All ranks that hold a part of it must call this."""
        ...

    def merged(self, lora: LowRank) -> Self:
        """Return the same weight with an adapter, which is merged into what is read."""
        ...


@dataclass(frozen=True)
class WeightSource:
    """One weight of a model, whole or sharded, and the adapter that is merged into what is read of it."""

    tensor: Tensor
    lora: LowRank | None = None

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def merged(self, lora: LowRank) -> "WeightSource":
        return replace(self, lora=lora)

    def meta(self, name: str) -> TensorMeta:
        return TensorMeta(name, tuple(self.tensor.shape), self.tensor.dtype)

    @property
    def computed(self) -> bool:
        """Return whether what is read is not simply a part of the tensor: shards are gathered, an adapter is added."""
        return self.lora is not None or isinstance(self.tensor, DTensor)

    def view(self, piece: TensorMeta) -> Tensor:
        """Return numbers of the flattened weight, which is not :attr:`computed`, without a copy."""
        return self.tensor.detach().reshape(-1).narrow(0, piece.start, piece.count)

    def read(self, piece: TensorMeta, out: Tensor) -> None:
        """Write numbers of the flattened weight to ``out``. All ranks that hold a shard of it must call this."""
        tensor = self.tensor.detach()
        if isinstance(tensor, DTensor):
            _gather(tensor, piece.start, out)
        else:
            out.copy_(self.view(piece))
        if self.lora is not None:
            merge(out, self.lora, piece.start)


def metas(sources: Mapping[str, ReadableWeight]) -> tuple[TensorMeta, ...]:
    return tuple(source.meta(name) for name, source in sources.items())


@torch.no_grad()
def read_bucket(sources: Mapping[str, ReadableWeight], pieces: Iterable[TensorMeta]) -> Bucket:
    """Return pieces whose offsets :func:`~twinkle.model.weights.buckets.plan_buckets` has chosen.

    What must be computed is written where it is sent from, so that reading takes no more than one bucket of memory.
    """
    pieces = tuple(pieces)
    computed = [sources[piece.name] for piece in pieces if sources[piece.name].computed]
    if not computed:
        return Bucket(pieces, tuple(sources[piece.name].view(piece) for piece in pieces))
    packed = torch.empty(packed_bytes(pieces), dtype=torch.uint8, device=computed[0].device)
    bucket = unpack(pieces, packed)
    for piece, out in bucket:
        sources[piece.name].read(piece, out)
    return bucket


def _gather(tensor: DTensor, start: int, piece: Tensor) -> None:
    """Write the numbers from ``start`` on of the flattened tensor to ``piece``."""
    count = len(piece)
    if tuple(tensor.placements) != (Shard(0),):
        piece.copy_(tensor.full_tensor().reshape(-1).narrow(0, start, count))
        return
    # Rank r holds consecutive rows, so a part of the flattened tensor. Each rank sends what the piece has of it, and no
    # rank ever holds more than the piece.
    group = tensor.device_mesh.get_group()
    size, own = dist.get_world_size(group), dist.get_rank(group)
    rows = tensor.shape[0]
    per_row = tensor.numel() // rows if rows else 0
    rows_per_rank = -(-rows // size)
    local = tensor.to_local().reshape(-1)
    for rank in range(size):
        first = rank * rows_per_rank * per_row
        low, high = max(start, first), min(start + count, first + rows_per_rank * per_row, tensor.numel())
        if low < high:
            part = piece[low - start : high - start]
            if rank == own:
                part.copy_(local[low - first : high - first])
            dist.broadcast(part, group=group, group_src=rank)


def merge(piece: Tensor, lora: LowRank, start: int) -> None:
    """Add the adapter in fp32 to ``piece``, which begins at number ``start`` of its weight."""
    if lora.a_RI.dim() == 3:
        _merge_experts(piece, lora, start)
        return
    columns = lora.a_RI.shape[1]
    a_RI = lora.a_RI.to(piece.device, torch.float32)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // columns)
    stop = start + len(piece)
    for row in range(start // columns, -(-stop // columns), rows_at_once):
        b_oR = lora.b_OR[row : row + rows_at_once].to(piece.device, torch.float32)
        low, high = max(start, row * columns), min(stop, (row + len(b_oR)) * columns)
        added = (b_oR @ a_RI).reshape(-1)[low - row * columns : high - row * columns]
        part = slice(low - start, high - start)
        piece[part] = torch.add(piece[part].float(), added, alpha=lora.scaling)


def _merge_experts(piece: Tensor, lora: LowRank, start: int) -> None:
    size, stop = lora.b_OR.shape[1] * lora.a_RI.shape[2], start + len(piece)
    for expert in range(start // size, -(-stop // size)):
        low, high = max(start, expert * size), min(stop, (expert + 1) * size)
        one = LowRank(lora.a_RI[expert], lora.b_OR[expert], lora.scaling)
        merge(piece[low - start : high - start], one, low - expert * size)
