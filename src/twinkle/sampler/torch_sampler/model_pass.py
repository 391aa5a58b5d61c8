"""One forward pass for sampling: spans of many sequences in, drawn tokens and scored prompts out.

This module knows nothing of requests or scheduling. Earlier tokens are seen in one of two ways. Where tokens influence
each other only through attention, their keys and values are read from the cache. Architectures that carry other state
along the sequence compute the whole sequence again each time, padded as in training, which is slow but correct; except
linear attention of Qwen3.5, whose states are kept beside the cache.

Shapes: T rows, S scored rows, C rows of a chunk, H hidden features, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.experts.replay import PassRoutes
from twinkle.model.decoder.image_rows import ImageRows
from twinkle.model.decoder.layers import LayerBatch, bind_layers
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.layer import DeltaNet, PackedRows, StatefulRows
from twinkle.model.decoder.transfer import HostCopy, to_device
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.types import IntArray, RouteArray
from twinkle.model.vision.splice import image_rows
from twinkle.sampler.noise import uniforms, words
from twinkle.sampler.torch_sampler.binding import LoraBinder, RowsOf
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache, LayerShape, default_budget, token_bytes
from twinkle.sampler.torch_sampler.cached_attention import CachedLayer, CachedRows, ShapeProbe, Span
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs, DecodeRow
from twinkle.sampler.torch_sampler.drawing import (
    MEMORY_OF_A_DRAW,
    Draw,
    Drawn,
    DrawnRows,
    PendingDraws,
    draw_tokens,
)
from twinkle.sampler.torch_sampler.prompts.graphs import PromptGraphs, PromptPlan
from twinkle.sampler.torch_sampler.prompts.prompt_images import SeenTokens
from twinkle.sampler.torch_sampler.scoring import Scores, Scoring, score_rows
from twinkle.sampler.torch_sampler.states.pool import StatePool, StateShape, slots_for
from twinkle.sampler.torch_sampler.states.rows import rows_of_layers


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence to compute, from index ``start`` on. ``draws`` are made from the last row.

    shift: position − index of the tokens. seen: what images among the tokens change, their positions included.
    records_routes: return the experts of the tokens.
    state: the slot of the sequence's state, in a model with linear attention.
    """

    version: Adapter | None
    tokens: IntArray
    start: int
    blocks: Sequence[int]
    draws: tuple[Draw, ...] = ()
    scoring: Scoring | None = None
    shift: int = 0
    seen: SeenTokens | None = None
    records_routes: bool = False
    state: int | None = None

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + len(self.tokens), self.blocks, self.shift)


@dataclass(frozen=True)
class Computed:
    """The results of one :class:`Piece`: a token for each of its draws, and the scores and routes it asks for."""

    drawn: tuple[Drawn, ...] = ()
    scores: Scores | None = None
    routes: RouteArray | None = None  # (T, layers, K)


@dataclass(frozen=True)
class Ahead:
    """The newest token of a sequence, at index ``position``, from which several more tokens are drawn in a row.

    Random numbers depend on the seed of the request, the number of the sample, and the number of the generated token;
    ``drawn`` is the number of the first token to draw. ``follows``: a row of the run before this one. If it is given,
    the newest token is that row's, which only the device knows yet, and ``token`` is not used. ``shift``: what rotary
    embeddings add to the index; it is not 0 behind images. ``state``: as in :class:`Piece`.
    """

    version: Adapter | None
    token: int
    position: int
    blocks: Sequence[int]
    draw: Draw  # its uniform number is not used
    seed: int
    sample: int
    drawn: int
    follows: int | None = None
    shift: int = 0
    state: int | None = None


@dataclass(frozen=True)
class PendingAhead:
    """Several tokens for each of some rows, which the device may still be drawing."""

    newest_n: Tensor  # the newest token of each row, in the order of the graph
    places: Sequence[int]  # where each row is in that order
    _draws: PendingDraws

    def results(self) -> list[list[Drawn]]:
        """Wait for the device, and return the tokens of each row."""
        tokens, rows = self._draws.drawn(), len(self.places)
        return [tokens[place::rows] for place in self.places]


@dataclass(frozen=True)
class _Part:
    """The pieces of a pass that were computed together; ``indices`` are their places in the pass."""

    indices: Sequence[int]
    draws: Sequence[int]  # how many tokens each piece draws
    pending: PendingDraws | None  # None: no piece draws
    scores: dict[int, Scores]  # by place in ``indices``
    routes: HostCopy | None = None  # of all rows
    rows: Sequence[slice | None] = ()  # where each piece has its rows; None: it does not ask for routes

    def results(self) -> Iterator[tuple[int, Computed]]:
        drawn = iter(() if self.pending is None else self.pending.drawn())
        routes_TLK = None if self.routes is None else self.routes.array()
        for place, (index, count) in enumerate(zip(self.indices, self.draws, strict=True)):
            rows = None if routes_TLK is None else self.rows[place]
            own = None if rows is None or routes_TLK is None else routes_TLK[rows].copy()
            yield index, Computed(tuple(islice(drawn, count)), self.scores.get(place), own)


@dataclass(frozen=True)
class PendingPass:
    """A pass that the device may still be computing."""

    _parts: Sequence[_Part]

    def results(self) -> list[Computed]:
        """Wait for the device, and return the result of each piece, in their order."""
        found = dict(result for part in self._parts for result in part.results())
        return [found[index] for index in range(len(found))]


class ModelPass:
    """Runs pieces on an engine. Their versions must be resident. Without a cache, pieces must be whole sequences."""

    def __init__(
        self,
        engine: Engine,
        cache: KeyValueCache | None,
        graphs: DecodeGraphs | None,
        prompts: PromptGraphs | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._graphs = graphs
        self._prompts = prompts
        self._binder = LoraBinder(engine.architecture)

    def forget_versions(self) -> None:
        self._binder.forget()

    @torch.no_grad()
    def start(self, pieces: Sequence[Piece]) -> PendingPass:
        """Start to compute pieces, all of one length class. Only scores are waited for here."""
        order = sorted(range(len(pieces)), key=lambda index: _place(pieces[index].version))
        return PendingPass(
            [
                self._start(indices, [pieces[index] for index in indices], plan)
                for indices, plan in self._plans(order, pieces)
            ]
        )

    def _plans(self, order: list[int], pieces: Sequence[Piece]) -> Iterator[tuple[list[int], PromptPlan | None]]:
        """Yield pieces to compute together, by their indices; None: without captured graphs."""
        if self._prompts is None:
            yield order, None
            return
        prompts = self._prompts
        taken = [index for index in order if _may_be_captured(pieces[index]) and prompts.takes(pieces[index].version)]
        if len(taken) < len(order):
            captured = set(taken)
            yield [index for index in order if index not in captured], None
        if taken:
            yield from self._captured(prompts, taken, pieces)

    def _captured(
        self, prompts: PromptGraphs, order: list[int], pieces: Sequence[Piece]
    ) -> Iterator[tuple[list[int], PromptPlan | None]]:
        """Yield pieces that fit into one captured pass; a piece that is too large alone has no plan."""
        members = [pieces[index] for index in order]
        drawing = [place for place, piece in enumerate(members) if piece.draws]
        plan = prompts.plan([piece.span for piece in members], [piece.version for piece in members], drawing)
        if plan is not None or len(order) == 1:
            yield order, plan
        else:
            yield from self._captured(prompts, order[: len(order) // 2], pieces)
            yield from self._captured(prompts, order[len(order) // 2 :], pieces)

    def _start(self, indices: Sequence[int], pieces: Sequence[Piece], plan: PromptPlan | None) -> _Part:
        drawing = [place for place, piece in enumerate(pieces) if piece.draws]
        routes = PassRoutes(records=True) if any(piece.records_routes for piece in pieces) else None
        logits: Iterable[tuple[slice, Tensor]] = ()
        if plan is not None:
            assert self._prompts is not None and self._cache is not None, "plans come from the captured graphs"
            self._cache.clean()
            hidden_TH = self._prompts.run(plan, [piece.tokens for piece in pieces])
            firsts = plan.layout.firsts.tolist()
            if drawing:
                logits = [(slice(0, len(drawing)), self._prompts.logits(plan))]
        else:
            if self._cache is None:
                hidden_TH, firsts = self._padded(pieces, routes)
            else:
                hidden_TH, firsts = self._cached(pieces, self._cache, routes)
            if drawing:
                logits = self._logits(pieces, drawing, hidden_TH, firsts)
        parts = self._draw([pieces[place] for place in drawing], logits)
        pending = PendingDraws.start(parts) if parts else None
        scores = self._score(pieces, hidden_TH, firsts)
        draws = [len(piece.draws) for piece in pieces]
        if routes is None:
            return _Part(indices, draws, pending, scores)
        recorded = HostCopy.start(routes.recorded(self._engine.architecture.layer_count))
        rows = [
            slice(first, first + len(piece.tokens)) if piece.records_routes else None
            for piece, first in zip(pieces, firsts, strict=True)
        ]
        return _Part(indices, draws, pending, scores, recorded, rows)

    @torch.no_grad()
    def start_ahead(self, rows: Sequence[Ahead], steps: int, before: PendingAhead | None = None) -> PendingAhead:
        """Start to draw ``steps`` tokens for each row with the captured graphs, without waiting for the device.

        The graphs must exist and accept these versions. before: the run that rows with ``follows`` go on from.
        """
        assert self._graphs is not None and self._cache is not None, "only where decoding was captured"
        self._cache.clean()
        device = self._engine.device
        order = sorted(range(len(rows)), key=lambda index: _place(rows[index].version))
        ordered = [rows[index] for index in order]
        seeds, samples, drawn = (words(*values)[:, None] for values in zip(*map(_key, ordered), strict=True))
        uniform_nS = uniforms(seeds, samples, drawn + words(*range(steps)))
        parts = self._graphs.decode(
            [DecodeRow(row.token, row.position, row.blocks, row.shift, row.state) for row in ordered],
            _runs([row.version for row in ordered], [1] * len(ordered)),
            [row.draw for row in ordered],
            to_device(torch.from_numpy(uniform_nS), device),
            self._engine.architecture.vocab_size,
            None if before is None else _carried(ordered, before),
        )
        places = np.empty(len(rows), np.int64)
        places[order] = np.arange(len(rows))
        newest_n = torch.cat([part.tokens for part in parts[-len(parts) // steps :]])
        return PendingAhead(newest_n, places.tolist(), PendingDraws.start(parts))

    def _cached(
        self, pieces: Sequence[Piece], cache: KeyValueCache, routes: PassRoutes | None
    ) -> tuple[Tensor, list[int]]:
        """Return the hidden states, and the index of each piece's first row in them."""
        cache.clean()
        device, lengths = self._engine.device, [len(piece.tokens) for piece in pieces]
        spans = [piece.span for piece in pieces]
        firsts = list(accumulate(lengths, initial=0))[:-1]
        positions = torch.from_numpy(_joined_positions(pieces)).to(device)
        layers = self._binder.layers(_runs([piece.version for piece in pieces], lengths))
        cached = self._layers(CachedRows.for_spans(spans, device).layers(cache), pieces, cache)
        images = self._image_rows(pieces, firsts)
        batch = LayerBatch(None, layers, False, cached=cached, images=images, routes=routes)
        ids = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces])).to(device)
        hidden_TH = self._engine.hidden_states(ids[None], positions.unsqueeze(-2), None, batch)
        return hidden_TH, firsts

    def _layers(
        self, attention: Sequence[CachedLayer], pieces: Sequence[Piece], cache: KeyValueCache
    ) -> tuple[CachedLayer | StatefulRows, ...]:
        """Return one entry for each decoder layer: attention with a cache, or linear attention with states."""
        if cache.states is None:
            return tuple(attention)
        slots = [piece.state for piece in pieces if piece.state is not None]
        lengths, starts = [len(piece.tokens) for piece in pieces], [piece.start for piece in pieces]
        stateful = iter(rows_of_layers(cache.states, lengths, starts, slots, self._engine.device))
        rest = iter(attention)
        return tuple(next(stateful) if layer.delta_nets else next(rest) for layer in self._engine.layers)

    def _padded(self, pieces: Sequence[Piece], routes: PassRoutes | None) -> tuple[Tensor, list[int]]:
        device, longest = self._engine.device, max(len(piece.tokens) for piece in pieces)
        ids = np.zeros((len(pieces), longest), np.int64)
        mask = np.zeros((len(pieces), longest), np.int64)
        for row, piece in enumerate(pieces):
            assert piece.start == 0, "without a cache a sequence is computed whole"
            ids[row, : len(piece.tokens)] = piece.tokens
            mask[row, : len(piece.tokens)] = 1
        firsts = [row * longest for row in range(len(pieces))]
        layers = self._binder.layers(_runs([piece.version for piece in pieces], [longest] * len(pieces)))
        batch = LayerBatch(None, layers, False, images=self._image_rows(pieces, firsts), routes=routes)
        positions = torch.arange(longest, device=device).expand(ids.shape)
        if batch.images is not None:
            positions = torch.from_numpy(_padded_positions(pieces, longest)).to(device)
        hidden_TH = self._engine.hidden_states(
            torch.from_numpy(ids).to(device), positions, torch.from_numpy(mask).to(device), batch
        )
        return hidden_TH, firsts

    def _image_rows(self, pieces: Sequence[Piece], firsts: Sequence[int]) -> ImageRows | None:
        """Return the features of the images of all pieces; None if there are none."""
        parts = [
            replace(part, row=first + part.row)
            for piece, first in zip(pieces, firsts, strict=True)
            if piece.seen is not None
            for part in piece.seen.parts
        ]
        if not parts:
            return None
        assert self._engine.features is not None, "requests with images are refused without it"
        return image_rows(self._engine.features, parts, repeated=True)

    def _logits(
        self, pieces: Sequence[Piece], drawing: Sequence[int], hidden_TH: Tensor, firsts: Sequence[int]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of the last rows of the drawing pieces, chunk by chunk."""
        last_rows = torch.tensor([firsts[place] + len(pieces[place].tokens) - 1 for place in drawing])
        lora = self._binder.head(_runs([pieces[place].version for place in drawing], [1] * len(drawing)))
        return self._engine.head.logits(hidden_TH[to_device(last_rows, hidden_TH.device)], lora)

    def _draw(self, pieces: Sequence[Piece], logits: Iterable[tuple[slice, Tensor]]) -> list[DrawnRows]:
        """Draw all tokens of these pieces, each from its row of the logits."""
        choices = self._engine.architecture.vocab_size
        at_once = max(1, self._engine.head.chunk_rows // MEMORY_OF_A_DRAW)
        parts: list[DrawnRows] = []
        for rows, logits_CV in logits:
            wanted = [(row, draw) for row, piece in enumerate(pieces[rows]) for draw in piece.draws]
            for start in range(0, len(wanted), at_once):
                part = wanted[start : start + at_once]
                taken = [row for row, _ in part]
                logits_MV = logits_CV
                if taken != list(range(len(logits_CV))):
                    logits_MV = logits_CV[to_device(torch.tensor(taken), logits_CV.device)]
                parts.append(draw_tokens(logits_MV, [draw for _, draw in part], choices))
        return parts

    def _score(self, pieces: Sequence[Piece], hidden_TH: Tensor, firsts: Sequence[int]) -> dict[int, Scores]:
        """Return scores by the index of the piece.

        Pieces that ask only for targets are computed apart from the others, which need the logits of all tokens.
        """
        asked = [(index, piece.scoring) for index, piece in enumerate(pieces) if piece.scoring is not None]
        scores: dict[int, Scores] = {}
        for only_targets in (True, False):
            wanted = {index: scoring for index, scoring in asked if scoring.only_targets is only_targets}
            if wanted:
                lengths = [len(scoring.targets) for scoring in wanted.values()]
                begins = [firsts[index] + scoring.first for index, scoring in wanted.items()]
                rows = np.concatenate([np.arange(a, a + count) for a, count in zip(begins, lengths, strict=True)])
                hidden_SH = hidden_TH[torch.from_numpy(rows).to(hidden_TH.device)]
                lora = self._binder.head(_runs([pieces[index].version for index in wanted], lengths))
                choices = self._engine.architecture.vocab_size
                found = score_rows(self._engine.head, hidden_SH, lora, list(wanted.values()), choices)
                scores |= zip(wanted, found, strict=True)
        return scores


def _may_be_captured(piece: Piece) -> bool:
    """Return whether a captured pass can compute a piece: it has no images, and records no routes."""
    return piece.seen is None and not piece.records_routes


def probe_shapes(engine: Engine) -> list[LayerShape]:
    """Return the shape of one token's keys and values in each layer, found by running one token through the model."""
    packing, rows = Packing.from_lengths((1,), engine.device), PackedRows(Bounds.from_lengths((1,), engine.device))
    cached = tuple(rows if layer.delta_nets else ShapeProbe(packing) for layer in engine.layers)
    probes = [each for each in cached if isinstance(each, ShapeProbe)]
    token = torch.zeros(1, 1, dtype=torch.long, device=engine.device)
    with torch.no_grad():
        batch = LayerBatch(None, bind_layers((), engine.architecture), False, cached=cached)
        engine.hidden_states(token, token, None, batch)
    shapes = [probe.shape for probe in probes if probe.shape is not None]
    if len(shapes) != len(probes):
        raise UnsupportedError(f"{engine.architecture.family}: {len(probes) - len(shapes)} layers have no attention")
    return shapes


def make_states(trainer: Trainer, max_sequences: int) -> StatePool | None:
    """Return the slots for states of linear attention, if the model has such layers.

    They take up to a third of what the trainer set aside for adapters. With fewer slots fewer sequences run at once.
    """
    nets = [net for layer in trainer.engine.layers for net in layer.delta_nets]
    if not nets:
        return None
    shapes = [state_shape(net) for net in nets]
    state_bytes = sum(shape.size(trainer.dtype) for shape in shapes)
    slots = slots_for(max_sequences, state_bytes, trainer.memory.adapters // 3 - state_bytes)
    trainer.set_aside((slots + 1) * state_bytes)
    return StatePool(shapes, trainer.dtype, trainer.device, slots)


def state_shape(net: DeltaNet) -> StateShape:
    """Return the shape of a sequence's state in one layer."""
    features, _, width = net.conv1d.weight.shape
    return StateShape(len(net.A_log), net.key_width, net.value_width, features, width - 1)


def make_cache(trainer: Trainer, budget_bytes: int | None, max_sequences: int) -> KeyValueCache:
    """Return a cache for the trainer's model. Its memory is taken from what the trainer set aside for adapters."""
    shapes, states = probe_shapes(trainer.engine), make_states(trainer, max_sequences)
    per_block = BLOCK * token_bytes(shapes, trainer.dtype)
    if budget_bytes is None:
        longest = trainer.architecture.max_length
        budget_bytes = default_budget(trainer.memory.adapters, per_block, max_sequences, longest)
    trainer.set_aside(budget_bytes)
    return KeyValueCache(shapes, trainer.dtype, trainer.device, budget_bytes, states)


def _place(version: Adapter | None) -> tuple[int, str, int]:
    """Return the sort key of a version's rows: by stack, then by slot, the base model last."""
    if version is None:
        return 2**31, "", 0
    assert version.slot is not None, "versions of a pass must be resident"
    return version.layout.rank, version.layout.digest, version.slot


def _joined_positions(pieces: Sequence[Piece]) -> IntArray:
    """Return the positions of all tokens: (T,), or with images (4, T): index, time, row and column."""
    if all(piece.seen is None for piece in pieces):
        return np.concatenate([_indices(piece) + piece.shift for piece in pieces])
    return np.concatenate([_axes(piece) for piece in pieces], 1)


def _padded_positions(pieces: Sequence[Piece], longest: int) -> IntArray:
    """Return the positions of pieces with images among them, one row each, (4, pieces, longest)."""
    axes = np.stack([np.pad(_axes(piece), ((0, 0), (0, longest - len(piece.tokens)))) for piece in pieces], 1)
    axes[0] = np.arange(longest)
    return axes


def _axes(piece: Piece) -> IntArray:
    """Return the positions of a piece's tokens on four axes: index, time, row and column."""
    indices_T = _indices(piece)
    axes_3T = np.tile(indices_T + piece.shift, (3, 1)) if piece.seen is None else piece.seen.axes_3T
    return np.concatenate([indices_T[None], axes_3T])


def _indices(piece: Piece) -> IntArray:
    return np.arange(piece.start, piece.start + len(piece.tokens))


def _carried(rows: Sequence[Ahead], before: PendingAhead) -> tuple[Tensor, Tensor] | None:
    """Return the rows that follow rows of the run before, and their newest tokens, on the device; None: no row does."""
    pairs = [(place, before.places[row.follows]) for place, row in enumerate(rows) if row.follows is not None]
    if not pairs:
        return None
    new, old = to_device(torch.tensor(pairs).t().contiguous(), before.newest_n.device)
    return new, before.newest_n[old]


def _key(row: Ahead) -> tuple[int, int, int]:
    return row.seed, row.sample, row.drawn


def _runs(versions: Iterable[Adapter | None], rows: Sequence[int]) -> list[RowsOf]:
    """Join neighbouring rows of the same version into one entry."""
    joined = groupby(zip(versions, rows, strict=True), key=lambda pair: id(pair[0]))
    runs = [list(run) for _, run in joined]
    return [(run[0][0], sum(count for _, count in run)) for run in runs]
