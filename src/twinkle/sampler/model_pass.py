"""One forward pass for sampling: spans of many sequences in, drawn tokens and scored prompts out.

Knows nothing of requests and turns. Two ways to see earlier tokens: in the cache, where tokens meet in attention alone;
and for architectures that carry other state along the sequence, by computing the whole sequence again each time, padded
as in training: slow, but right.

Shapes: T rows, H hidden features, V vocabulary, k likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.adapter import Adapter
from twinkle.model.attention import Packing
from twinkle.model.engine import Engine
from twinkle.model.layers import LayerBatch, bind_layers
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.binding import LoraBinder, RowsOf
from twinkle.sampler.cache import KeyValueCache, LayerShape
from twinkle.sampler.cached_attention import CachedRows, ShapeProbe, Span
from twinkle.sampler.drawing import Draw, Drawn, draw_tokens

_DRAWS_PER_CHUNK = 8  # a draw takes about so many times the memory of its logits


@dataclass(frozen=True)
class Piece:
    """Tokens ``start``… of one sequence; ``draws`` are made from the last row.

    The first ``len(targets)`` rows are scored: the log-probability of their target, and the ``top`` likeliest tokens.
    """

    version: Adapter | None
    tokens: IntArray
    start: int
    blocks: Sequence[int]
    draws: tuple[Draw, ...] = ()
    targets: IntArray | None = None
    top: int = 0


@dataclass(frozen=True)
class Computed:
    """What came of a piece: scores (S,), top_ids and top_logprobs (S, k) for its S scored rows."""

    drawn: tuple[Drawn, ...] = ()
    scores: FloatArray | None = None
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None


class ModelPass:
    """Runs pieces on an engine whose versions are resident. ``cache=None``: pieces must be whole sequences."""

    def __init__(self, engine: Engine, cache: KeyValueCache | None) -> None:
        self._engine = engine
        self._cache = cache
        self._binder = LoraBinder(engine.architecture)

    def forget_versions(self) -> None:
        self._binder.forget()

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> list[Computed]:
        """Results in the order of the pieces. All must be of one length class."""
        order = sorted(range(len(pieces)), key=lambda index: _place(pieces[index]))
        ordered = [pieces[index] for index in order]
        hidden, firsts = self._padded(ordered) if self._cache is None else self._cached(ordered, self._cache)
        computed = [Computed(drawn) for drawn in self._draw(ordered, hidden, firsts)]
        for index, scored in self._score(ordered, hidden, firsts).items():
            computed[index] = replace(scored, drawn=computed[index].drawn)
        results = [Computed()] * len(pieces)
        for index, result in zip(order, computed, strict=True):
            results[index] = result
        return results

    def _cached(self, pieces: Sequence[Piece], cache: KeyValueCache) -> tuple[Tensor, list[int]]:
        """Hidden states, and the first row of each piece."""
        cache.clean()
        device, lengths = self._engine.device, [len(piece.tokens) for piece in pieces]
        spans = [Span(piece.start, piece.start + len(piece.tokens), piece.blocks) for piece in pieces]
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        layers = self._binder.layers(_runs(pieces, lengths))
        batch = LayerBatch(None, layers, False, cached=CachedRows.of(spans, device).layers(cache))
        ids = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces])).to(device)
        hidden_TH = self._engine.hidden_states(ids[None], torch.from_numpy(positions).to(device)[None], None, batch)
        return hidden_TH, list(accumulate(lengths, initial=0))[:-1]

    def _padded(self, pieces: Sequence[Piece]) -> tuple[Tensor, list[int]]:
        device, longest = self._engine.device, max(len(piece.tokens) for piece in pieces)
        ids = np.zeros((len(pieces), longest), np.int64)
        mask = np.zeros((len(pieces), longest), np.int64)
        for row, piece in enumerate(pieces):
            assert piece.start == 0, "without a cache a sequence is computed whole"
            ids[row, : len(piece.tokens)] = piece.tokens
            mask[row, : len(piece.tokens)] = 1
        batch = LayerBatch(None, self._binder.layers(_runs(pieces, [longest] * len(pieces))), False)
        positions = torch.arange(longest, device=device).expand(ids.shape)
        hidden_TH = self._engine.hidden_states(
            torch.from_numpy(ids).to(device), positions, torch.from_numpy(mask).to(device), batch
        )
        return hidden_TH, [row * longest for row in range(len(pieces))]

    def _draw(self, pieces: Sequence[Piece], hidden_TH: Tensor, firsts: Sequence[int]) -> list[tuple[Drawn, ...]]:
        drawn: list[list[Drawn]] = [[] for _ in pieces]
        drawing = [index for index, piece in enumerate(pieces) if piece.draws]
        if not drawing:
            return [()] * len(pieces)
        last_rows = torch.tensor([firsts[index] + len(pieces[index].tokens) - 1 for index in drawing])
        lora = self._binder.head(_runs([pieces[index] for index in drawing], [1] * len(drawing)))
        head, choices = self._engine.head, self._engine.architecture.vocab_size
        at_once = max(1, head.chunk_rows // _DRAWS_PER_CHUNK)
        for rows, logits_CV in head.logits(hidden_TH[last_rows.to(hidden_TH.device)], lora):
            members = drawing[rows]
            wanted = [(row, index, draw) for row, index in enumerate(members) for draw in pieces[index].draws]
            for start in range(0, len(wanted), at_once):
                part = wanted[start : start + at_once]
                taken = torch.tensor([row for row, _, _ in part], device=logits_CV.device)
                tokens = draw_tokens(logits_CV[taken], [draw for _, _, draw in part], choices)
                for (_, index, _), token in zip(part, tokens, strict=True):
                    drawn[index].append(token)
        return [tuple(tokens) for tokens in drawn]

    def _score(self, pieces: Sequence[Piece], hidden_TH: Tensor, firsts: Sequence[int]) -> dict[int, Computed]:
        """By the index of the piece, for those with targets."""
        targets = {
            i: piece.targets for i, piece in enumerate(pieces) if piece.targets is not None and piece.targets.size
        }
        if not targets:
            return {}
        device, lengths = hidden_TH.device, [len(each) for each in targets.values()]
        rows = np.concatenate([np.arange(firsts[i], firsts[i] + len(each)) for i, each in targets.items()])
        lora = self._binder.head(_runs([pieces[index] for index in targets], lengths))
        scored_SH = hidden_TH[torch.from_numpy(rows).to(device)]
        target_S1 = torch.from_numpy(np.concatenate(list(targets.values()))[:, None]).to(device)
        scores_S = self._engine.head.logprobs(scored_SH, target_S1, lora)[:, 0].cpu().numpy()
        top = max(pieces[index].top for index in targets)
        ids, logprobs = [], []
        for _, logits_CV in self._engine.head.logits(scored_SH, lora) if top else ():
            highest = logits_CV.log_softmax(1).topk(top, sorted=True)
            ids.append(highest.indices.cpu().numpy())
            logprobs.append(highest.values.cpu().numpy())
        results, start = {}, 0
        for index, length in zip(targets, lengths, strict=True):
            part, width = slice(start, start + length), pieces[index].top
            results[index] = Computed(
                scores=scores_S[part],
                top_ids=np.concatenate(ids)[part, :width] if width else None,
                top_logprobs=np.concatenate(logprobs)[part, :width] if width else None,
            )
            start += length
        return results


def probe_shapes(engine: Engine) -> list[LayerShape]:
    """What each layer keeps of a token: run one through the model and look."""
    packing = Packing.of((1,), engine.device)
    probes = tuple(ShapeProbe(packing) for _ in range(engine.architecture.layer_count))
    token = torch.zeros(1, 1, dtype=torch.long, device=engine.device)
    with torch.no_grad():
        batch = LayerBatch(None, bind_layers((), engine.architecture), False, cached=probes)
        engine.hidden_states(token, token, None, batch)
    shapes = [probe.shape for probe in probes if probe.shape is not None]
    if len(shapes) != len(probes):
        raise UnsupportedError(f"{engine.architecture.family}: {len(probes) - len(shapes)} layers have no attention")
    return shapes


def _place(piece: Piece) -> tuple[int, str, int]:
    """Stacks together, slots in order, the base model last."""
    if piece.version is None:
        return 2**31, "", 0
    layout = piece.version.layout
    assert piece.version.slot is not None, "versions of a pass must be resident"
    return layout.rank, layout.digest, piece.version.slot


def _runs(pieces: Sequence[Piece], rows: Sequence[int]) -> list[RowsOf]:
    """Neighbours of one version joined."""
    counted = zip(pieces, rows, strict=True)
    joined = groupby(counted, key=lambda pair: id(pair[0].version))
    runs = [list(run) for _, run in joined]
    return [(run[0][0].version, sum(count for _, count in run)) for run in runs]
