"""Reads pieces of weights from a model that is trained: of whole and sharded tensors, with or without an adapter.

The model's own tensors are never changed: an adapter is merged into the numbers that are read.

Shapes: O output and I input features of a linear layer, R rank of an adapter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from twinkle.model.weights.buckets import Bucket, TensorMeta

__all__ = ["LowRank", "WeightSource", "metas", "read_bucket"]

_NUMBERS_AT_ONCE = 1 << 18  # numbers of a merged weight that are computed at once: 1 MiB in fp32


@dataclass(frozen=True)
class LowRank:
    """An adapter of one weight: it adds ``scaling`` · B A."""

    a_RI: Tensor
    b_OR: Tensor
    scaling: float


@dataclass(frozen=True)
class WeightSource:
    """One weight of a model, whole or sharded, and the adapter that is merged into what is read of it."""

    tensor: Tensor
    lora: LowRank | None = None

    def meta(self, name: str) -> TensorMeta:
        return TensorMeta(name, tuple(self.tensor.shape), self.tensor.dtype)

    def read(self, start: int, count: int) -> Tensor:
        """Return numbers of the flattened weight; a view of the model's own tensor where that is possible.

        All ranks that hold a shard of the weight must call this.
        """
        piece = _piece(self.tensor.detach(), start, count)
        return piece if self.lora is None else _merged(piece, self.lora, start)


def metas(sources: Mapping[str, WeightSource]) -> tuple[TensorMeta, ...]:
    return tuple(source.meta(name) for name, source in sources.items())


@torch.no_grad()
def read_bucket(sources: Mapping[str, WeightSource], pieces: Iterable[TensorMeta]) -> Bucket:
    pieces = tuple(pieces)
    return Bucket(pieces, tuple(sources[piece.name].read(piece.start, piece.count) for piece in pieces))


def _piece(tensor: Tensor, start: int, count: int) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.reshape(-1).narrow(0, start, count)
    if tuple(tensor.placements) != (Shard(0),):
        return tensor.full_tensor().reshape(-1).narrow(0, start, count)
    # Rank r holds consecutive rows, so a part of the flattened tensor. Each rank sends what the piece has of it, and no
    # rank ever holds more than the piece.
    group = tensor.device_mesh.get_group()
    size, own = dist.get_world_size(group), dist.get_rank(group)
    rows = tensor.shape[0]
    per_row = tensor.numel() // rows if rows else 0
    rows_per_rank = -(-rows // size)
    local = tensor.to_local().reshape(-1)
    piece = torch.empty(count, dtype=tensor.dtype, device=local.device)
    for rank in range(size):
        first = rank * rows_per_rank * per_row
        low, high = max(start, first), min(start + count, first + rows_per_rank * per_row, tensor.numel())
        if low < high:
            part = piece[low - start : high - start]
            if rank == own:
                part.copy_(local[low - first : high - first])
            dist.broadcast(part, group=group, group_src=rank)
    return piece


def _merged(piece: Tensor, lora: LowRank, start: int) -> Tensor:
    """Return ``piece``, which begins at number ``start`` of its weight, with the adapter added in fp32."""
    columns = lora.a_RI.shape[1]
    a_RI = lora.a_RI.to(piece.device, torch.float32)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // columns)
    merged = torch.empty_like(piece)
    stop = start + len(piece)
    for row in range(start // columns, -(-stop // columns), rows_at_once):
        b_oR = lora.b_OR[row : row + rows_at_once].to(piece.device, torch.float32)
        low, high = max(start, row * columns), min(stop, (row + len(b_oR)) * columns)
        added = (b_oR @ a_RI).reshape(-1)[low - row * columns : high - row * columns]
        part = slice(low - start, high - start)
        merged[part] = torch.add(piece[part].float(), added, alpha=lora.scaling)
    return merged
