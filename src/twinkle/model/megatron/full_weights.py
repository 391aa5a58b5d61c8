"""All weights of a model that is trained on a mesh of processes: each process has its cut of its stage's weights.

Gradients of a weight come from several processes, and are added up once per optimizer step:

    cut weights (projections, embedding, head)    each rank of dp has the part of its own sequences
    whole weights (norms, row biases, router)     each rank of tp and dp has a part, or tp's first rank has all of it
    experts                                       each rank that holds the expert has the part of its own tokens
    a tied embedding on two stages                the first stage has the embedding's part, the last one the head's

Whatever leaves the trainer (snapshots, checkpoints) is whole: the tensors that one process with the whole model would
have, bit by bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.model.full.gradients import CollectedGradient
from twinkle.model.full.layout import ParameterLayout
from twinkle.model.full.weights import TrainedWeights, joint_norm, tensors_norm
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.stage import Stage
from twinkle.model.megatron.weights import Piece, whole_weights
from twinkle.model.parallel import Parallelism, Ranks, add_up_all

__all__ = ["CutGradient", "CutWeights", "OwnWeight", "own_weights"]

# Whole weights of which a tensor parallel rank always computes a part of the gradient: the norms of queries and keys
# see its own heads, and the router its own part of the tokens. With sequence parallel this holds for all whole weights.
_PARTIAL = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight", ".mlp.gate.weight")


@dataclass(frozen=True)
class OwnWeight:
    """A weight of the model of which this process holds a part, or all.

    ``sums``: the groups over which its gradient is added up, one after another. ``redundant``: other ranks of these
    groups have computed the same gradient, and it must count once; this rank is not the one that counts.
    """

    piece: Piece
    parameter: nn.Parameter
    sums: tuple[Ranks, ...]
    redundant: bool

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def rows(self) -> int:
        """Return how many rows of the parameter are weights; those that follow are padding of the vocabulary."""
        return self.piece.stop - self.piece.start if self.piece.dim == 0 else len(self.parameter)

    @property
    def is_owner(self) -> bool:
        """Return whether these numbers count for this process in a sum over all: each counts on one process."""
        return all(ranks.number == 0 for ranks in self.sums)

    def padded(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the padding that the parameter has. All processes have the same shape then."""
        missing = len(self.parameter) - len(tensor)
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor


def own_weights(stage: Stage, layout: ParameterLayout) -> list[OwnWeight]:
    """Return the weights of this process in the order of the whole model's layout."""
    parameters = {id(parameter): parameter for parameter in stage.model.parameters()}
    own = [
        OwnWeight(piece, parameters.pop(id(piece.view)), *_sums(piece, stage))
        for piece in stage.pieces(fused_experts=True)
    ]
    assert not parameters, "the stage has weights that no checkpoint has"
    numbers = {name: number for number, name in enumerate(layout.names)}
    return sorted(own, key=lambda each: numbers[each.name])


def _sums(piece: Piece, stage: Stage) -> tuple[tuple[Ranks, ...], bool]:
    """Return the groups that add up the gradient of a weight, and whether this rank's gradient is redundant there."""
    mesh = stage.mesh
    if ".mlp.experts." in piece.name:
        return (mesh.same_experts,), False
    if piece.dim is None:
        partial = mesh.sequence_parallel or piece.name.endswith(_PARTIAL)
        return (mesh.tp, mesh.dp), not partial and mesh.tp.number > 0
    is_vocabulary = piece.view is stage.embedding_weight_VH or piece.view is stage.head_weight_VH
    return ((mesh.ends, mesh.dp) if is_vocabulary and stage.shape.tied else (mesh.dp,)), False


class CutWeights(TrainedWeights):
    """The weights of one process. Tensors are its cuts, without the padding of a vocabulary."""

    def __init__(
        self,
        layout: ParameterLayout,
        own: Sequence[OwnWeight],
        masters: Mapping[str, Tensor],
        mesh: MegatronMesh,
        parallel: Parallelism,
    ) -> None:
        """``layout``: of the whole model. The other arguments are as for any trained weights."""
        self._own = list(own)
        self._mesh = mesh
        views = [each.parameter.detach()[: each.rows] for each in own]
        super().__init__(layout, [each.name for each in own], views, masters, parallel)

    def part(self, index: int, tensor: Tensor) -> Tensor:
        return self._own[index].piece.select(tensor)

    def wholes(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        if self.held_whole:
            yield from tensors
            return
        pieces = (replace(own.piece, view=own.padded(each)) for own, each in zip(self._own, tensors, strict=True))
        found = whole_weights(pieces, self._mesh.pp)
        for name, (found_name, whole) in zip(self.layout.names, found, strict=True):
            assert found_name == name, "stages have the weights in the order of the layout"
            yield whole

    def compute_wholes(self, dtype: torch.dtype) -> Iterator[Tensor]:
        return self.wholes(self.parameters)

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def held_whole(self) -> bool:
        return self._mesh.model.size == 1 and self._mesh.ep.size == 1

    @property
    def adds_up(self) -> bool:
        return self._mesh.world.size > 1

    def counted_once(self, gradient: list[Tensor]) -> list[Tensor]:
        for own, tensor in zip(self._own, gradient, strict=True):
            if not own.is_owner:
                tensor.zero_()
        return gradient

    def add_up(self, gradient: list[Tensor]) -> None:
        for ranks, numbers in self._sums:
            add_up_all(ranks, [gradient[number] for number in numbers])

    @cached_property
    def _sums(self) -> list[tuple[Ranks, list[int]]]:
        """Return the groups that add up gradients, in the order of their sums, with the numbers of their weights.

        All processes of a group have the same weights in it: the same layers, or the tied embedding.
        """
        groups: dict[tuple[int, int], tuple[Ranks, list[int]]] = {}
        for number, own in enumerate(self._own):
            for turn, ranks in enumerate(own.sums):
                if ranks.size > 1:
                    groups.setdefault((turn, id(ranks)), (ranks, []))[1].append(number)
        return [groups[key] for key in sorted(groups, key=lambda key: key[0])]

    def norm(self, gradient: list[Tensor], norm_type: float) -> float:
        owned = [tensor for own, tensor in zip(self._own, gradient, strict=True) if own.is_owner and tensor.numel()]
        norm = tensors_norm(owned, norm_type) if owned else None  # of no numbers some norms do not exist
        if self._mesh.world.size == 1:
            assert norm is not None
            return norm
        return joint_norm([each for each in self._mesh.world.gather(norm) if each is not None], norm_type)


class CutGradient(CollectedGradient):
    """The gradient of a request with respect to this process's weights."""

    def __init__(self, own: Sequence[OwnWeight]) -> None:
        super().__init__([each.parameter for each in own])
        self._own = list(own)

    def take(self) -> list[Tensor]:
        gradient = super().take()
        for own, tensor in zip(self._own, gradient, strict=True):
            if own.redundant:
                tensor.zero_()
        return [tensor[: own.rows] for own, tensor in zip(self._own, gradient, strict=True)]
