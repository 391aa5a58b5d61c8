"""One micro-batch through the model: hidden states, chunked head, losses, backward pass.

The engine knows nothing of budgets, paging or failures. It computes the requests it is given; their adapters must be
resident.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.fused.norms import fuse_norms
from twinkle.model.decoder.fused.rotary import fuse_rotary
from twinkle.model.decoder.head import ChunkedHead, Coefficients
from twinkle.model.decoder.layers import GiveWay, LayerBatch, TenantLayer, install
from twinkle.model.decoder.transfer import HostCopy
from twinkle.model.objectives.objective import BatchObjective
from twinkle.model.trainer.batch import (
    Block,
    DeviceBatch,
    GradientRow,
    GradientRows,
    Gradients,
    Part,
    build_batch,
    build_head_batch,
    harvest,
)
from twinkle.model.types import FloatArray, RouteArray
from twinkle.model.vision.feature_store import FeatureStore

T = TypeVar("T")


@dataclass(frozen=True)
class Computed:
    """The results of one micro-batch, which the device may still be computing.

    Each property waits until the device has computed what the property returns, and no longer.
    """

    _values: tuple[HostCopy, ...]  # one per block
    _lengths: tuple[tuple[int, ...], ...]  # per block, the lengths of its sequences
    _gradients: Gradients | None
    _places: tuple[int, ...] | None = None  # of the sequences whose values are returned; None: all
    _routes: HostCopy | None = None  # (T, layers, K) of the tokens of all sequences, if a request asked for them

    @classmethod
    def from_values(
        cls,
        blocks: Sequence[Block],
        values: Sequence[Tensor],
        gradients: Gradients | None = None,
        routes: Tensor | None = None,
    ) -> "Computed":
        copied = None if routes is None else HostCopy.start(routes)
        lengths = tuple(block.lengths for block in blocks)
        return cls(tuple(map(HostCopy.start, values)), lengths, gradients, _routes=copied)

    def routes(self, lengths: Sequence[int]) -> list[RouteArray]:
        """Return the routes of each sequence, in row order; empty if no request of the batch asked for them.

        ``lengths``: those of the sequences.
        """
        return [] if self._routes is None else np.split(self._routes.array(), np.cumsum(lengths)[:-1])

    @property
    def values(self) -> list[FloatArray]:
        """Return the head's values for each sequence, (T, M), in row order; they are known before the backward pass.

        The columns are the log-probabilities of K targets, then, if any request of the batch asked for statistics,
        entropy and most likely token.
        """
        blocks = zip(self._values, self._lengths, strict=True)
        rows = [rows for values, lengths in blocks for rows in np.split(values.array(), np.cumsum(lengths)[:-1])]
        return rows if self._places is None else [rows[place] for place in self._places]

    def only(self, places: Sequence[int]) -> "Computed":
        """Return the same with the values of the sequences at these places, in this order. Gradients are all there."""
        return replace(self, _places=tuple(places))

    @property
    def gradients(self) -> list[GradientRow]:
        """Return the gradient of each request; empty after a forward pass alone."""
        return [] if self._gradients is None else self._gradients.rows()


class CapturedPass(Protocol):
    """A pass through the decoder that was captured, for batches within its bucket (:mod:`.pass_graphs`)."""

    @property
    def rows(self) -> int:
        """Return the number of its rows, with padding."""
        ...

    def forward(self, parts: Sequence[Part], gradients: Sequence[GradientRows]) -> Tensor:
        """Return the hidden states of the parts' rows. The next call of any captured pass overwrites them."""
        ...

    def backward(self, dhidden_TH: Tensor) -> None:
        """Add to the gradients that were given to the last :meth:`forward`."""
        ...


class CapturedPasses(Protocol):
    """The captured passes of an engine, of several sizes."""

    @property
    def most_rows(self) -> int:
        """Return the rows of the largest captured pass."""
        ...

    def find(self, parts: Sequence[Part]) -> CapturedPass | None:
        """Return the smallest captured pass that can compute these parts; None if there is none."""
        ...


class Engine:
    """Runs micro-batches through a frozen decoder, whose linear layers it replaces by LoRA layers."""

    def __init__(
        self, model: PreTrainedModel, architecture: Architecture, device: torch.device, chunk_rows: int
    ) -> None:
        self.architecture = architecture
        self.device = device
        fuse_norms(model)
        fuse_rotary(model)
        self.layers: list[TenantLayer] = install(model, architecture)
        routers = self.layers[0].routers
        if routers is not None:
            self.architecture = replace(architecture, routing=routers.spec)
        self.head = ChunkedHead(architecture.head_spec, chunk_rows)
        self.sharded_head: nn.Module | None = None  # in a sharded model, the module with the head's weights
        self.model = model
        self.graphs: CapturedPasses | None = None  # captured passes, for batches of few rows
        self.features: FeatureStore | None = None  # of images, in a vision model
        self._decoder = model.get_decoder() if hasattr(model.base_model, "language_model") else model.base_model
        self._stance = "default"
        self.token_rows = self.padding_rows = 0  # counted over all passes so far
        self._user_of_spare_rows: weakref.ref[object] | None = None

    def take_spare_rows(self, user: object) -> bool:
        """Give the spare rows behind the weights (see ``joined``) to a user, unless they belong to another one.

        They are free again when nobody refers to the user any more.
        """
        current = None if self._user_of_spare_rows is None else self._user_of_spare_rows()
        if current is None:
            self._user_of_spare_rows = weakref.ref(user)
        return current is None or current is user

    def freeze_compilation(self) -> None:
        """Stop compiling: from now on, batches for which there is no compiled code run eagerly."""
        self._stance = "eager_on_recompile"

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        """Compute the head's values, no gradients. ``give_way`` is called between layers, and may run other passes."""
        captured = None if give_way is not None else self._captured(parts)
        if captured is not None:
            return self._replay(parts, captured, train=False)
        with torch.no_grad():
            batch = self._batch(parts, train=False, recompute=False, give_way=give_way)
            hidden_TH = self._hidden(batch)
            values = self._all_values(batch.blocks, hidden_TH, give_way)
        return Computed.from_values(batch.blocks, values, routes=batch.recorded_routes(len(self.layers)))

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        """Compute log-probabilities and gradients. Adapters do not change; the caller adds the gradients to them.

        ``give_way`` is as for :meth:`forward`.
        """
        alone = not recompute and give_way is None
        captured = self._captured(parts) if alone else None
        if captured is not None:
            return self._replay(parts, captured, train=True)
        batch = self._batch(parts, train=True, recompute=recompute, give_way=give_way)
        with torch.compiler.set_stance(self._stance):  # includes the backward pass, which may recompute layers
            hidden_TH = self._hidden(batch)
            with torch.no_grad():
                detached_TH = hidden_TH.detach()
                values, dhidden_TH = self._head_pass(batch.blocks, detached_TH, give_way)
                routes = batch.recorded_routes(len(self.layers))
                computed = Computed.from_values(batch.blocks, values, routes=routes)
            if hidden_TH.requires_grad:  # False if all adapters of the batch are on the head alone
                hidden_TH.backward(dhidden_TH)
        with torch.no_grad():
            gradients = harvest(batch.gradients, parts)
        return replace(computed, _gradients=gradients)

    def _captured(self, parts: Sequence[Part]) -> CapturedPass | None:
        """Return the captured pass for these parts; None if there is none, or there are images or routes."""
        if self.graphs is None or any(map(_needs_eager_pass, parts)):
            return None
        return self.graphs.find(parts)

    def _batch(self, parts: Sequence[Part], *, train: bool, recompute: bool, give_way: GiveWay | None) -> DeviceBatch:
        return build_batch(
            parts,
            self.architecture,
            self.device,
            train=train,
            recompute=recompute,
            give_way=give_way,
            features=self.features,
        )

    @torch.no_grad()
    def _replay(self, parts: Sequence[Part], captured: CapturedPass, *, train: bool) -> Computed:
        """Compute a batch by a captured pass."""
        batch = build_head_batch(parts, self.architecture, self.device, train)
        hidden_TH = captured.forward(parts, batch.gradients)
        self.token_rows += len(hidden_TH)
        self.padding_rows += captured.rows - len(hidden_TH)
        if not train:
            return Computed.from_values(batch.blocks, self._all_values(batch.blocks, hidden_TH, None))
        values, dhidden_TH = self._head_pass(batch.blocks, hidden_TH, None)
        computed = Computed.from_values(batch.blocks, values)
        captured.backward(dhidden_TH)
        return replace(computed, _gradients=harvest(batch.gradients, parts))

    def finish(self) -> None:
        """Do nothing: no other process waits for this engine (compare ``Lockstep.finish``)."""

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, layer_batch: LayerBatch
    ) -> Tensor:
        """Return the decoder's output for all rows, including rows of padding."""
        given: dict[str, Tensor] = {"input_ids": input_ids}
        if layer_batch.images is not None:
            with torch.no_grad():
                given = {"inputs_embeds": layer_batch.images.put(self._decoder.get_input_embeddings()(input_ids))}
        output = self._decoder(
            **given,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=False,
            batch=layer_batch,
        )
        return output.last_hidden_state.flatten(0, 1)

    def _hidden(self, batch: DeviceBatch) -> Tensor:
        hidden_TH = self.hidden_states(batch.input_ids, batch.position_ids, batch.attention_mask, batch.layer_batch)
        self.token_rows += batch.rows
        self.padding_rows += len(hidden_TH) - batch.rows
        return hidden_TH if batch.real_rows_T is None else hidden_TH[batch.real_rows_T]

    def _with_head(self, walk: Callable[[ChunkedHead], T]) -> T:
        """Call ``walk`` with the head. A sharded head is gathered for this call only, so there is one call per pass."""
        if self.sharded_head is None:
            return walk(self.head)
        result: T = self.sharded_head(self.head, walk)
        return result

    def _all_values(self, blocks: Sequence[Block], hidden_TH: Tensor, give_way: GiveWay | None) -> list[Tensor]:
        return self._with_head(lambda head: head_values(head, blocks, hidden_TH, give_way))

    def _head_pass(
        self, blocks: Sequence[Block], hidden_TH: Tensor, give_way: GiveWay | None
    ) -> tuple[list[Tensor], Tensor]:
        return self._with_head(lambda head: head_pass(head, blocks, hidden_TH, give_way))


def _needs_eager_pass(part: Part) -> bool:
    routed = part.item.records_routes or any(datum.routes is not None for datum in part.data)
    return routed or any(datum.images for datum in part.data)


def head_values(
    head: ChunkedHead, blocks: Sequence[Block], hidden_TH: Tensor, give_way: GiveWay | None = None
) -> list[Tensor]:
    """Return the values of each block."""
    return [_values(head, block, hidden_TH, give_way) for block in blocks]


def head_pass(
    head: ChunkedHead, blocks: Sequence[Block], hidden_TH: Tensor, give_way: GiveWay | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the values of each block, and dL/dhidden of all rows. The losses are those of the blocks' requests."""
    objectives = [BatchObjective.from_parts(block.parts, block.width) for block in blocks]
    device, coefficients = hidden_TH.device, list[Coefficients]()
    if all(objective.pointwise for objective in objectives):
        # dL/dlp of a token depends on that token alone: one run of the head gives log-probabilities and gradients.
        coefficients = [objective.to(device).coefficients for objective in objectives]
    else:
        # A loss over whole sequences needs all log-probabilities first, so the head runs a second time.
        first = [values_nM.cpu() for values_nM in head_values(head, blocks, hidden_TH, give_way)]
        for objective, values_nM in zip(objectives, first, strict=True):
            objective.record_values(values_nM)
        coefficients = [
            _known(objective.coefficients(0, len(values_nM), values_nM).to(device))
            for objective, values_nM in zip(objectives, first, strict=True)
        ]
    walked = [
        _embeddings_and_gradient(block, hidden_TH, asked)
        if block.last_rows is not None
        else head.logprobs_and_gradient(
            hidden_TH[block.rows], block.targets_nK, asked, block.lora, block.query, give_way
        )
        for block, asked in zip(blocks, coefficients, strict=True)
    ]
    gradients = [gradient_nH for _, gradient_nH in walked]
    return [values_nM for values_nM, _ in walked], gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def _values(head: ChunkedHead, block: Block, hidden_TH: Tensor, give_way: GiveWay | None) -> Tensor:
    """Return the values of a block's rows, (n, M); of a block of embeddings, those of its sequences."""
    if block.last_rows is not None:
        return _embeddings(block, hidden_TH)
    return head.logprobs(hidden_TH[block.rows], block.targets_nK, block.lora, block.query, give_way)


def _embeddings(block: Block, hidden_TH: Tensor) -> Tensor:
    """Return K zeros instead of log-probabilities, and the hidden state of the last token, for each sequence."""
    hidden_NH = hidden_TH[block.rows][block.last_rows].float()
    return torch.cat([hidden_NH.new_zeros(len(hidden_NH), block.width), hidden_NH], 1)


def _embeddings_and_gradient(block: Block, hidden_TH: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Return the values of :func:`_embeddings`, and dL/dhidden of all rows of the block."""
    values_NM = _embeddings(block, hidden_TH)
    gradient_nH = torch.zeros_like(hidden_TH[block.rows])
    slopes_NM = coefficients(0, len(values_NM), values_NM)
    gradient_nH[block.last_rows] = slopes_NM[:, block.width :].to(gradient_nH.dtype)
    return values_NM, gradient_nH


def _known(coefficients_nM: Tensor) -> Coefficients:
    return lambda start, stop, _values_CM: coefficients_nM[start:stop]
