"""Which part of each tensor of a checkpoint a stage holds, and reading those parts straight from safetensors files.

A process reads only its own part of a tensor, into memory that its model has already: it never holds more than its cut
of the model and one part of a tensor.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.megatron.experts import ExpertMlp
from twinkle.model.megatron.layers import DecoderLayer
from twinkle.model.parallel import Ranks

__all__ = ["CheckpointFiles", "Piece", "WeightSource", "layer_pieces", "load_pieces", "vocabulary_piece"]


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint's tensor: ``start`` to ``stop`` along ``dim``, and the parameter or view that holds it.

    ``dim`` None: the whole tensor. The view may have more rows than the part (padding of the vocabulary); those are 0.
    """

    name: str
    view: Tensor
    dim: int | None = None
    start: int = 0
    stop: int = 0

    def select(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.stop - self.start)

    @torch.no_grad()
    def fill(self, part: Tensor) -> None:
        """Copy the part into the view, and clear the padding."""
        size = part.shape[0]
        self.view[:size].copy_(part)
        self.view[size:].zero_()


class WeightSource(Protocol):
    """Where weights come from, by their names in Hugging Face's checkpoints."""

    def names(self) -> frozenset[str]: ...

    def read(self, piece: Piece) -> Tensor:
        """Return the piece's part of its tensor."""
        ...


class CheckpointFiles:
    """The safetensors files of a model folder. A file is opened when the first of its tensors is read."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            self._files: dict[str, Path] = {
                name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise UnsupportedError(f"{folder}: no model.safetensors; the Megatron backend reads safetensors files only")
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.__exit__(kind, error, trace)
        self._open = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, piece: Piece) -> Tensor:
        path = self._files[piece.name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        slices = self._open[path].get_slice(piece.name)
        if piece.dim is None:
            return slices[:]
        return slices[(*[slice(None)] * piece.dim, slice(piece.start, piece.stop))]


def load_pieces(pieces: Iterable[Piece], source: WeightSource) -> None:
    """Fill the pieces from the source, one at a time."""
    known = source.names()
    for piece in pieces:
        if piece.name not in known:
            raise UnsupportedError(f"the model's files have no weight {piece.name!r}; it is not a whole checkpoint")
        piece.fill(source.read(piece))


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
    attention = layer.attention
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
