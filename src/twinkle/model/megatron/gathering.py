"""Whole weights of a model that is cut over processes, one tensor or a part of it at a time.

Each process holds pieces of the model's tensors. A tensor is read by all processes together: every owner of a piece
sends it to the others, so that no process holds more than one tensor, or one part of it, beside its own cut.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle.model.adapters.checkpoint import write_whole
from twinkle.model.megatron.weights import Piece
from twinkle.model.parallel import Ranks, together
from twinkle.model.weights.buckets import TensorMeta
from twinkle.model.weights.sources import LowRank, merge
from twinkle.utils.safetensors import StreamingSafetensorSaver

__all__ = ["CutWeight", "ModelFolder", "cut_weights", "whole_tensors"]


@dataclass(frozen=True)
class _Part:
    """A part of a tensor: ``start`` to ``stop`` along ``dim`` (None: all of it), and the rank that sends it."""

    owner: int
    dim: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class CutWeight:
    """One weight whose parts are on different ranks, and the adapter that is merged into what is read of it.

    ``own``: this rank's part, if it is one that is sent; else None. ``ranks``: all that hold or read the weight.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parts: tuple[_Part, ...]
    own: Tensor | None
    ranks: Ranks
    lora: LowRank | None = None

    @property
    def computed(self) -> bool:
        return self.lora is not None or self.ranks.size > 1

    def merged(self, lora: LowRank) -> "CutWeight":
        return replace(self, lora=lora)

    def meta(self, name: str) -> TensorMeta:
        return TensorMeta(name, self.shape, self.dtype)

    def view(self, piece: TensorMeta) -> Tensor:
        assert self.own is not None, "a process by itself has all weights"
        return self.own.reshape(-1).narrow(0, piece.start, piece.count)

    def read(self, piece: TensorMeta, out: Tensor) -> None:
        if self.ranks.size == 1:
            out.copy_(self.view(piece))
        elif self.parts[0].dim == 1:
            self._read_columns(piece, out)
        else:
            self._read_rows(piece, out)
        if self.lora is not None:
            merge(out, self.lora, piece.start)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return a copy of the whole weight. All ranks must call this."""
        meta = self.meta("")
        out = torch.empty(meta.count, dtype=self.dtype, device=self.device)
        self.read(meta, out)
        return out.view(self.shape)

    def _read_rows(self, piece: TensorMeta, out: Tensor) -> None:
        """Read parts that are consecutive in the flattened weight."""
        per_row = prod(self.shape[1:])
        for part in self.parts:
            first = 0 if part.dim is None else part.start * per_row
            end = prod(self.shape) if part.dim is None else part.stop * per_row
            low, high = max(piece.start, first), min(piece.stop, end)
            if low < high:
                place = out[low - piece.start : high - piece.start]
                if part.owner == self.ranks.number:
                    assert self.own is not None
                    place.copy_(self.own.reshape(-1)[low - first : high - first])
                self._send(place, part.owner)

    def _read_columns(self, piece: TensorMeta, out: Tensor) -> None:
        """Read whole rows of parts that are cut along their columns, as many as the piece touches."""
        columns = self.shape[1]
        first, end = piece.start // columns, -(-piece.stop // columns)
        start, count = piece.start - first * columns, (end - first) * columns
        rows_RC = (out if count == piece.count else out.new_empty(count)).view(-1, columns)
        for part in self.parts:
            cut = out.new_empty(end - first, part.stop - part.start)
            if part.owner == self.ranks.number:
                assert self.own is not None
                cut.copy_(self.own[first:end])
            self._send(cut, part.owner)
            rows_RC[:, part.start : part.stop] = cut
        if count > piece.count:
            out.copy_(rows_RC.view(-1)[start : start + piece.count])

    def _send(self, tensor: Tensor, owner: int) -> None:
        # As bytes: gloo does not know all dtypes.
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.ranks.group, group_src=owner)


def cut_weights(pieces: Iterable[Piece], ranks: Ranks) -> dict[str, CutWeight]:
    """Return the whole weights by name, in the same order on all ranks. All ranks must call this.

    ``pieces``: those of this rank. A part that several ranks hold is sent by the first of them.
    """
    own = {piece.name: _without_padding(piece) for piece in pieces}
    described = {name: (_span(each), tuple(each.view.shape), each.view.dtype) for name, each in own.items()}
    found: dict[str, dict[int, tuple[_Part, tuple[int, ...], torch.dtype]]] = {}
    for owner, held in enumerate(ranks.gather(described)):
        for name, ((dim, start, stop), shape, dtype) in held.items():
            if dim is None or start < stop:
                found.setdefault(name, {}).setdefault(start, (_Part(owner, dim, start, stop), shape, dtype))
    device = next(iter(own.values())).view.device
    return {
        name: _cut_weight([parts[start] for start in sorted(parts)], own.get(name), ranks, device)
        for name, parts in found.items()
    }


def _cut_weight(
    held: Sequence[tuple[_Part, tuple[int, ...], torch.dtype]],
    piece: Piece | None,
    ranks: Ranks,
    device: torch.device,
) -> CutWeight:
    parts, shape, dtype = tuple(each[0] for each in held), list(held[0][1]), held[0][2]
    if parts[0].dim is not None:
        shape[parts[0].dim] = parts[-1].stop
    sends = any(part.owner == ranks.number for part in parts)
    own = piece.view.detach() if piece is not None and sends else None
    return CutWeight(tuple(shape), dtype, device, parts, own, ranks)


def _span(piece: Piece) -> tuple[int | None, int, int]:
    return piece.dim, piece.start, piece.stop


def _without_padding(piece: Piece) -> Piece:
    return piece if piece.dim != 0 else replace(piece, view=piece.view[: piece.stop - piece.start])


def whole_tensors(weights: Mapping[str, CutWeight]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a copy of each weight. All ranks must go through all of them."""
    for name, weight in weights.items():
        yield name, weight.whole()


@dataclass(frozen=True)
class ModelFolder:
    """What a Hugging Face folder of a model holds beside its weights: the contents of its files by their names."""

    files: Mapping[str, str]

    def save(
        self, directory: Path, weights: Mapping[str, CutWeight], ranks: Ranks, more: Callable[[Path], None]
    ) -> None:
        """Write a folder that Transformers loads. The first rank writes; all ranks must call this.

        ``more``: writes further files into the directory that it is given. The folder appears with all its files or not
        at all.
        """
        tensors = whole_tensors(weights)

        def write(staging: Path) -> None:
            for name, text in self.files.items():
                (staging / name).write_text(text)
            saver = StreamingSafetensorSaver(staging, save_rank="master")
            for name, tensor in tensors:
                saver.add_tensor(name, tensor)
            saver.finalize()
            more(staging)

        def take_part() -> None:
            try:
                if ranks.number == 0:
                    write_whole(directory, write, overwrite=True)
            finally:
                for _ in tensors:  # the other ranks wait in them, also where writing failed
                    pass

        together(ranks, take_part)
