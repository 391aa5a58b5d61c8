"""Which part of each tensor of a checkpoint a process holds, and reading those parts.

A process reads only its own part of a tensor, into memory that its model has already: it never holds more than its cut
of the model and one tensor. :mod:`.gathering` puts the parts together again.
"""

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twinkle.errors import CheckpointError, InvalidInputError, UnsupportedError
from twinkle.model.decoder.linear_attention.layer import JOINT, DeltaNet
from twinkle.model.decoder.lora.lora import LoraLinear
from twinkle.model.megatron.experts import ExpertMlp
from twinkle.model.megatron.layers import DecoderLayer, RowLinear
from twinkle.model.parallel import Ranks
from twinkle.model.types import text_name

__all__ = [
    "CheckpointFiles",
    "Piece",
    "WeightSource",
    "layer_pieces",
    "load_pieces",
    "put_weights",
    "vocabulary_piece",
]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_METADATA = "__metadata__"  # an entry of a file's header that is no tensor


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint's tensor, and the parameter or view that holds it.

    ``start``, ``stop``: along ``dim``; ``dim`` None: the whole tensor. The view may have more rows than the part
    (padding of the vocabulary); those are 0.
    """

    name: str
    view: Tensor
    dim: int | None = None
    start: int = 0
    stop: int = 0

    def select(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor, as a view. Of a tensor that is too short it is short, too."""
        return whole if self.dim is None else whole[(*[slice(None)] * self.dim, slice(self.start, self.stop))]

    @torch.no_grad()
    def fill(self, part: Tensor) -> None:
        """Copy the part into the view, and clear the padding; raise if it has another shape."""
        shape = list(self.view.shape)
        if self.dim is not None:
            shape[self.dim] = self.stop - self.start
        if list(part.shape) != shape:
            raise InvalidInputError(self.name, f"a weight of which this rank's part is {tuple(part.shape)}", f"{shape}")
        rows = part.shape[0]
        self.view[:rows].copy_(part)
        self.view[rows:].zero_()


class WeightSource(Protocol):
    """Where weights come from, by their names in Hugging Face's checkpoints."""

    def names(self) -> frozenset[str]: ...

    def read(self, piece: Piece) -> Tensor:
        """Return the piece's part of its tensor."""
        ...

    def give_back(self, piece: Piece) -> None:
        """Free the memory of a tensor that was read and is not needed any more."""
        ...


class CheckpointFiles:
    """The safetensors files of a model folder, mapped into memory.

    A tensor is a view of its file, so reading copies nothing. But the pages of a file that were read count as memory of
    the process; those of one tensor are given back before the next one is read.

    The decoder of a model with a vision tower has the names that it has in a model for text alone.
    """

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._mapped: dict[Path, _MappedFile] = {}
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
            stored: dict[str, Path] = {name: folder / file for name, file in files.items()}
        elif single.is_file():
            stored = dict.fromkeys(self._file(single).names(), single)
        else:
            raise UnsupportedError(f"{folder}: no model.safetensors; the Megatron backend reads safetensors files only")
        self._files = {text_name(name): (path, name) for name, path in stored.items()}  # name → file, name in it

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    @property
    def fused_experts(self) -> bool:
        """Return whether the experts of a layer are one tensor."""
        return any(name.endswith(".experts.gate_up_proj") for name in self._files)

    def read(self, piece: Piece) -> Tensor:
        path, stored = self._files[piece.name]
        return piece.select(self._file(path).tensor(stored))

    def give_back(self, piece: Piece) -> None:
        path, stored = self._files[piece.name]
        self._file(path).give_back(stored)

    def _file(self, path: Path) -> "_MappedFile":
        if path not in self._mapped:
            self._mapped[path] = _MappedFile(path)
        return self._mapped[path]


class _MappedFile:
    """A safetensors file: 8 bytes with the length of a JSON header, the header, then the tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                # Torch warns of memory that it must not write; a private copy of a page is only made by writing.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._start = 8 + int.from_bytes(self._map[:8], "little")
            self._header: dict[str, Any] = json.loads(self._map[8 : self._start])
            ends = [each["data_offsets"][1] for name, each in self._header.items() if name != _METADATA]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors file ({error})") from error
        if self._start + max(ends, default=0) > len(self._map):
            raise CheckpointError(f"{path}: the file ends before its last tensor; it was not copied as a whole")

    def names(self) -> list[str]:
        return [name for name in self._header if name != _METADATA]

    def tensor(self, name: str) -> Tensor:
        if name not in self._header:
            raise CheckpointError(f"{self._path}: the file has no tensor {name!r}, which the index places there")
        kind, shape = self._header[name]["dtype"], self._header[name]["shape"]
        if kind not in _DTYPES:
            raise UnsupportedError(f"{self._path}: {name!r} is {kind}; the Megatron backend reads {', '.join(_DTYPES)}")
        dtype, (start, _) = _DTYPES[kind], self._range(name)
        count = math.prod(shape)
        if start % dtype.itemsize:  # old files may not be aligned
            copied = bytearray(self._map[start : start + count * dtype.itemsize])
            return torch.frombuffer(copied, dtype=dtype).view(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def give_back(self, name: str) -> None:
        """Let Linux drop the pages of a tensor. It reads them again if they are used again."""
        start, stop = self._range(name)
        first = start - start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def _range(self, name: str) -> tuple[int, int]:
        start, stop = self._header[name]["data_offsets"]
        return self._start + start, self._start + stop


def load_pieces(pieces: Iterable[Piece], source: WeightSource) -> None:
    """Fill the pieces from the source, one at a time."""
    known = source.names()
    for piece in pieces:
        if piece.name not in known:
            raise UnsupportedError(f"the model's files have no weight {piece.name!r}; it is not a whole checkpoint")
        piece.fill(source.read(piece))
        source.give_back(piece)


def put_weights(pieces: Iterable[Piece], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Fill the pieces from whole tensors, which come one at a time and in any order; raise if one does not come."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, whole in weights:
        for piece in by_name.pop(name, []):
            piece.fill(piece.select(whole))
    if by_name:
        raise InvalidInputError("weights", "a model without " + ", ".join(sorted(by_name)), "all weights of the model")


def vocabulary_piece(name: str, weight: Tensor, vocabulary: int, tp: Ranks) -> Piece:
    """Return the piece of the embedding or the head: this rank's rows. The last ranks may have padding."""
    start = tp.number * len(weight)
    return Piece(name, weight, 0, min(start, vocabulary), min(start + len(weight), vocabulary))


def layer_pieces(layer: DecoderLayer, prefix: str, tp: Ranks, *, fused_experts: bool) -> Iterator[Piece]:
    """Yield the pieces of a decoder layer. ``prefix``: of its names in the checkpoint.

    ``fused_experts``: the checkpoint has the experts of a layer as one tensor, not one by one.
    """
    yield Piece(f"{prefix}.input_layernorm.weight", layer.input_norm.weight_H)
    yield Piece(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm.weight_H)
    columns: list[LoraLinear] = []
    rows: list[RowLinear] = []
    attention = layer.attention
    if isinstance(attention, DeltaNet):
        yield from _delta_net_pieces(attention, f"{prefix}.linear_attn")
    else:
        for norm, name in ((attention.q_norm, "q_norm"), (attention.k_norm, "k_norm")):
            if norm is not None:
                yield Piece(f"{prefix}.self_attn.{name}.weight", norm.weight_H)
        columns, rows = [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]
    if isinstance(layer.mlp, ExpertMlp):
        yield from _expert_pieces(layer.mlp, f"{prefix}.mlp", fused=fused_experts)
    else:
        columns += [layer.mlp.gate_proj, layer.mlp.up_proj]
        rows += [layer.mlp.down_proj]
    for column in columns:
        yield _cut(f"{prefix}.{column.name}.weight", column.weight_OI, 0, tp)
        if column.bias_O is not None:
            yield _cut(f"{prefix}.{column.name}.bias", column.bias_O, 0, tp)
    for row in rows:
        yield _cut(f"{prefix}.{row.linear.name}.weight", row.linear.weight_OI, 1, tp)
        if row.bias_O is not None:
            yield Piece(f"{prefix}.{row.linear.name}.bias", row.bias_O)


def _cut(name: str, weight: Tensor, dim: int, tp: Ranks) -> Piece:
    size = weight.shape[dim]
    return Piece(name, weight, dim, tp.number * size, (tp.number + 1) * size)


def _delta_net_pieces(net: DeltaNet, prefix: str) -> Iterator[Piece]:
    """Yield the pieces of linear attention, which every rank has whole."""
    for name in (JOINT, "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        yield Piece(f"{prefix}.{name}.weight", getattr(net, name).weight_OI)
    yield Piece(f"{prefix}.conv1d.weight", net.conv1d.weight)
    yield Piece(f"{prefix}.norm.weight", net.norm.weight_H)
    yield Piece(f"{prefix}.A_log", net.A_log)
    yield Piece(f"{prefix}.dt_bias", net.dt_bias)


def _expert_pieces(mlp: ExpertMlp, prefix: str, *, fused: bool) -> Iterator[Piece]:
    yield Piece(f"{prefix}.gate.weight", mlp.router_EH)
    first, count, size = mlp.first, *mlp.gate_up_E2IH.shape[:2]
    if fused:
        yield Piece(f"{prefix}.experts.gate_up_proj", mlp.gate_up_E2IH, 0, first, first + count)
        yield Piece(f"{prefix}.experts.down_proj", mlp.down_EHI, 0, first, first + count)
        return
    for place in range(count):
        name = f"{prefix}.experts.{first + place}"
        yield Piece(f"{name}.gate_proj.weight", mlp.gate_up_E2IH[place, : size // 2])
        yield Piece(f"{name}.up_proj.weight", mlp.gate_up_E2IH[place, size // 2 :])
        yield Piece(f"{name}.down_proj.weight", mlp.down_EHI[place])
