"""Which part of each tensor of a checkpoint a process holds; reading those parts, and putting them together again.

A process reads only its own part of a tensor, into memory that its model has already: it never holds more than its cut
of the model and one tensor. Weights that leave the model (to files or to a sampler) come one whole tensor at a time.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.megatron.experts import ExpertMlp
from twinkle.model.megatron.layers import DecoderLayer
from twinkle.model.parallel import ALONE, Ranks

__all__ = [
    "CheckpointFiles",
    "Piece",
    "WeightSource",
    "layer_pieces",
    "load_pieces",
    "put_weights",
    "vocabulary_piece",
    "whole_weights",
]

_MAPPED_BYTES = 8 << 20  # of files, that may stay mapped after they were read


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint's tensor, and the parameter or view that holds it.

    ``start``, ``stop``: along ``dim``, which has ``size`` entries in the whole tensor; ``dim`` None: the whole tensor.
    The view may have more rows than the part (padding of the vocabulary); those are 0. ``divided``: the ranks that have
    the other parts. Where ``dim`` is None, each of these has another whole tensor (an expert) at this place.
    """

    name: str
    view: Tensor
    dim: int | None = None
    start: int = 0
    stop: int = 0
    size: int = 0
    divided: Ranks = ALONE

    def select(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.stop - self.start)

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

    def whole(self) -> list[tuple[str, Tensor]]:
        """Return the whole tensor, or those of all ranks at this place, with their names.

        All ranks of ``divided`` call it together.
        """
        if self.divided.size == 1:
            return [(self.name, self.view.detach())]
        if self.dim is None:
            tensors = _gathered(self.view.detach()[None], self.divided)
            return list(zip(self.divided.gather(self.name), tensors, strict=True))
        parts = _gathered(self.view.detach().movedim(self.dim, 0), self.divided)
        return [(self.name, parts[: self.size].movedim(0, self.dim).contiguous())]


def _gathered(part: Tensor, ranks: Ranks) -> Tensor:
    """Return the parts of all ranks, joined along the first dimension. All have the same shape."""
    whole = part.new_empty(ranks.size * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=ranks.group)
    return whole


class WeightSource(Protocol):
    """Where weights come from, by their names in Hugging Face's checkpoints."""

    def names(self) -> frozenset[str]: ...

    def read(self, piece: Piece) -> Tensor:
        """Return the piece's part of its tensor."""
        ...


class CheckpointFiles:
    """The safetensors files of a model folder.

    A file is mapped into memory while it is open, and the parts that were read count as memory of the process. So it is
    closed before that becomes more than a few small tensors, or one large one, and opened again for the next.
    """

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._open: dict[Path, Any] = {}
        self._read_bytes = 0  # of the open files
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
            self._files: dict[str, Path] = {name: folder / file for name, file in files.items()}
        elif single.is_file():
            self._files = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise UnsupportedError(f"{folder}: no model.safetensors; the Megatron backend reads safetensors files only")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, piece: Piece) -> Tensor:
        path = self._files[piece.name]
        whole = self._file(path).get_slice(piece.name)
        size = math.prod(whole.get_shape()) * piece.view.element_size()
        if self._read_bytes and self._read_bytes + size > _MAPPED_BYTES:
            self._close()
            whole = self._file(path).get_slice(piece.name)
        self._read_bytes += size
        if piece.dim is None:
            return whole[:]
        return whole[(*[slice(None)] * piece.dim, slice(piece.start, piece.stop))]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]

    def _close(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open, self._read_bytes = {}, 0


def load_pieces(pieces: Iterable[Piece], source: WeightSource) -> None:
    """Fill the pieces from the source, one at a time."""
    known = source.names()
    for piece in pieces:
        if piece.name not in known:
            raise UnsupportedError(f"the model's files have no weight {piece.name!r}; it is not a whole checkpoint")
        piece.fill(source.read(piece))


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


def whole_weights(pieces: Iterable[Piece], stages: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of the model by their names in checkpoints, one whole tensor at a time.

    ``pieces``: of this process. ``stages``: the pipeline. All processes of a replica call it together, and take the
    same number of tensors; each gets all of them.
    """
    own, seen = list(pieces), set()
    for owner, count in enumerate(stages.gather(len(own))):
        for number in range(count):
            found = own[number].whole() if owner == stages.number else []
            for name, tensor in _shared(found, stages, owner):
                if name not in seen:  # a tied head has the name of the embedding
                    seen.add(name)
                    yield name, tensor


def _shared(found: list[tuple[str, Tensor]], stages: Ranks, owner: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what one stage has found, on all stages."""
    if stages.size == 1:
        yield from found
        return
    facts = stages.gather([(name, tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in found])[owner]
    for number, (name, shape, dtype, device) in enumerate(facts):
        place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        tensor = found[number][1].contiguous() if found else torch.empty(shape, dtype=dtype, device=place)
        dist.broadcast(tensor, group=stages.group, group_src=owner)
        yield name, tensor


def vocabulary_piece(name: str, weight: Tensor, vocabulary: int, tp: Ranks) -> Piece:
    """Return the piece of the embedding or the head: this rank's rows. The last ranks may have padding."""
    start = tp.number * len(weight)
    return Piece(name, weight, 0, min(start, vocabulary), min(start + len(weight), vocabulary), vocabulary, tp)


def layer_pieces(layer: DecoderLayer, prefix: str, tp: Ranks, ep: Ranks, *, fused_experts: bool) -> Iterator[Piece]:
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
        yield from _expert_pieces(layer.mlp, f"{prefix}.mlp", ep, fused=fused_experts)
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
    return Piece(name, weight, dim, tp.number * size, (tp.number + 1) * size, tp.size * size, tp)


def _expert_pieces(mlp: ExpertMlp, prefix: str, ep: Ranks, *, fused: bool) -> Iterator[Piece]:
    yield Piece(f"{prefix}.gate.weight", mlp.router_EH)
    first, count, size = mlp.first, *mlp.gate_up_E2IH.shape[:2]
    if fused:
        part = (0, first, first + count, ep.size * count, ep)
        yield Piece(f"{prefix}.experts.gate_up_proj", mlp.gate_up_E2IH, *part)
        yield Piece(f"{prefix}.experts.down_proj", mlp.down_EHI, *part)
        return
    for place in range(count):
        name = f"{prefix}.experts.{first + place}"
        yield Piece(f"{name}.gate_proj.weight", mlp.gate_up_E2IH[place, : size // 2], divided=ep)
        yield Piece(f"{name}.up_proj.weight", mlp.gate_up_E2IH[place, size // 2 :], divided=ep)
        yield Piece(f"{name}.down_proj.weight", mlp.down_EHI[place], divided=ep)
