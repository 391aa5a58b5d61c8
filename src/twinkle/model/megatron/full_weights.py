"""All weights of a model that is trained on a mesh of processes: each process has its cut of its stage's weights.

Gradients of a weight come from several processes, and are added up once per optimizer step:

    cut weights (projections, embedding, head)    each rank of dp has the part of its own sequences
    whole weights (norms, row biases, router)     each rank of tp and dp has a part, or tp's first rank has all of it
    experts                                       each rank that holds the expert has the part of its own tokens
    a tied embedding on two stages                the first stage has the embedding's part, the last one the head's

Ranks that hold the same cut take the same steps. Or each takes the steps of its share of the cut, holds master weights
and optimizer state of this share only, and sends its new weights to the others (``OwnWeight.sharers``). This is what
megatron-core's distributed optimizer does, which runs on CUDA only and writes files that depend on the mesh.

Whatever leaves the trainer (snapshots, checkpoints) is whole: the tensors that one process with the whole model would
have, bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.model.full.gradients import CollectedGradient
from twinkle.model.full.layout import ParameterLayout
from twinkle.model.full.weights import TrainedWeights, joint_norm, tensors_norm
from twinkle.model.megatron.gathering import cut_weights
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.stage import Stage
from twinkle.model.megatron.weights import Piece
from twinkle.model.parallel import ALONE, Parallelism, Ranks, add_up_all

__all__ = ["CutGradient", "CutWeights", "OwnWeight", "own_weights"]

# Whole weights of which a tensor parallel rank always computes a part of the gradient: the norms of queries and keys
# see its own heads, and the router its own part of the tokens. With sequence parallel this holds for all whole weights.
_PARTIAL = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight", ".mlp.gate.weight")


@dataclass(frozen=True)
class OwnWeight:
    """A weight of the model of which this process holds a part, or all.

    ``sums``: the groups over which its gradient is added up, one after another. ``redundant``: other ranks of these
    groups have computed the same gradient, and it must count once; this rank is not the one that counts. ``sharers``:
    the ranks of the last group, if each trains a share of the numbers; else this process alone, with all of them.
    """

    piece: Piece
    parameter: nn.Parameter
    sums: tuple[Ranks, ...]
    redundant: bool
    sharers: Ranks = ALONE

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def rows(self) -> int:
        """Return how many rows of the parameter are weights; those that follow are padding of the vocabulary."""
        return self.piece.stop - self.piece.start if self.piece.dim == 0 else len(self.parameter)

    @property
    def view(self) -> Tensor:
        """Return the parameter without padding."""
        return self.parameter.detach()[: self.rows]

    @property
    def is_owner(self) -> bool:
        """Return whether this process's share counts here in a sum over all processes: each number counts once."""
        return all(ranks.number == 0 for ranks in (self.sums if self.sharers.size == 1 else self.sums[:-1]))

    def share(self, cut: Tensor) -> Tensor:
        """Return the numbers of this process's cut that it trains, as a view: a flat one if there are several sharers.

        The last share may be short, or empty.
        """
        if self.sharers.size == 1:
            return cut
        size = self._share_size
        return cut.view(-1)[self.sharers.number * size : (self.sharers.number + 1) * size]

    def join(self, share: Tensor) -> Tensor:
        """Return the cut from the shares of all sharers, which call this together."""
        if self.sharers.size == 1:
            return share
        padded = F.pad(share, (0, self._share_size - len(share)))
        joined = padded.new_empty(self.sharers.size * len(padded))
        dist.all_gather_into_tensor(joined, padded, group=self.sharers.group)
        view = self.view
        return joined[: view.numel()].view_as(view)

    @property
    def _share_size(self) -> int:
        return -(-self.view.numel() // self.sharers.size)


def own_weights(stage: Stage, layout: ParameterLayout, *, shared: bool) -> list[OwnWeight]:
    """Return the weights of this process in the order of the whole model's layout.

    ``shared``: let ranks that hold the same cut share its training.
    """
    parameters = {id(parameter): parameter for parameter in stage.model.parameters()}
    own = []
    for piece in stage.pieces(fused_experts=True):
        sums, redundant = _sums(piece, stage)
        sharers = sums[-1] if shared else ALONE
        own.append(OwnWeight(piece, parameters.pop(id(piece.view)), sums, redundant, sharers))
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
    """The weights of one process. Tensors are its cuts, without the padding of a vocabulary, or its shares of them."""

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
        shares = [each.share(each.view) for each in own]
        super().__init__(layout, [each.name for each in own], shares, masters, parallel)

    @torch.no_grad()
    def refresh(self) -> None:
        super().refresh()
        for own, share in zip(self._own, self.parameters, strict=True):
            if own.sharers.size > 1:
                own.view.copy_(own.join(share))

    def part(self, index: int, tensor: Tensor) -> Tensor:
        own = self._own[index]
        return own.share(own.piece.select(tensor).contiguous())

    def wholes(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        if self.held_whole:
            yield from tensors
            return
        places = tensors[0].dtype, tensors[0].device
        yield from self._wholes(lambda number: self._own[number].join(tensors[number]), *places)

    def compute_wholes(self, dtype: torch.dtype) -> Iterator[Tensor]:
        return self._wholes(lambda number: self._own[number].view, dtype, self._own[0].view.device)

    def _wholes(self, read_cut: Callable[[int], Tensor], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Yield whole tensors of which processes have cuts, in the order of the layout, one at a time.

        read_cut: returns this process's cut of the weight with this number.
        """
        weights = cut_weights([own.piece for own in self._own], self._mesh.world)
        numbers = {own.name: number for number, own in enumerate(self._own)}
        for name in self.layout.names:
            # All that hold a cut read it, also those that do not send it: sharers put it together.
            cut = read_cut(numbers[name]) if name in numbers else None
            sent = None if weights[name].own is None else cut
            yield replace(weights[name], own=sent, dtype=dtype, device=device).whole()

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def held_whole(self) -> bool:
        shared = any(own.sharers.size > 1 for own in self._own)
        return self._mesh.model.size == 1 and self._mesh.ep.size == 1 and not shared

    @property
    def adds_up(self) -> bool:
        return self._mesh.world.size > 1

    def counted_once(self, gradient: list[Tensor]) -> list[Tensor]:
        kept = []
        for own, share in zip(self._own, gradient, strict=True):
            cut = torch.zeros_like(own.view, dtype=share.dtype)
            if own.is_owner:
                own.share(cut).copy_(share)
            kept.append(cut)
        return kept

    def add_up(self, gradient: list[Tensor]) -> None:
        """Add up the parts of a gradient, of which this process keeps its shares."""
        for ranks, numbers in self._sums:
            add_up_all(ranks, [gradient[number] for number in numbers])
        for number, own in enumerate(self._own):
            if own.sharers.size > 1:
                gradient[number] = own.share(gradient[number]).clone()  # the rest is freed

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
