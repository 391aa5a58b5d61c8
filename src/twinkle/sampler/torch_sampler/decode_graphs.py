"""Decoding of one token for each of many sequences as one captured CUDA graph: one launch instead of a thousand.

A graph is captured for a fixed number of rows, with fixed buffers for everything that differs between passes: tokens,
positions, tables of cache blocks, and the adapter of each row. A pass with fewer rows uses the next larger graph; its
unused rows are padding and write to a reserved cache block that no sequence reads.

Shapes: n rows of a graph, B blocks of a sequence, V vocabulary.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.attention import CachedAttention
from twinkle.model.decoder.layers import LayerBatch, bind_layers
from twinkle.model.decoder.linear_attention.layer import StatefulRows
from twinkle.model.decoder.transfer import to_device
from twinkle.model.trainer.engine import Engine
from twinkle.sampler.torch_sampler.binding import RowsOf
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache, blocks_for
from twinkle.sampler.torch_sampler.drawing import MEMORY_OF_A_DRAW, Draw, DrawnRows, DrawPlan
from twinkle.sampler.torch_sampler.states.pool import StatePool
from twinkle.sampler.torch_sampler.states.tokens import TokenRows

logger = logging.getLogger(__name__)

# Rows of graphs. A pass takes the next larger graph, so the steps between them bound what padding costs.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)


@dataclass(frozen=True)
class DecodeRow:
    """The newest token of a sequence, its index (``position``), and the sequence's blocks.

    shift: what rotary embeddings add to the index; it is not 0 behind images. state: the slot of the sequence's state,
    in a model with linear attention.
    """

    token: int
    position: int
    blocks: Sequence[int]
    shift: int = 0
    state: int | None = None


class _LoraForm(Enum):
    """How a graph computes LoRA. Graphs are captured in this order."""

    SPARE_ROWS = auto()  # the products with A are part of the base model's (see ``lora.spare_rows``)
    KERNELS = auto()
    NONE = auto()


class WeightSets(Protocol):
    """The sets of weights of a model, by number; 0 is the base model's own."""

    def weight_sets(self) -> Sequence[int]: ...

    def use_weights(self, number: int) -> None:
        """Make the model compute with a set of weights."""


class DecodeGraphs:
    """Captured decode passes, one token for each sequence.

    For bf16 models on CUDA whose forward pass never synchronises with the host.
    """

    def __init__(
        self, engine: Engine, cache: KeyValueCache, max_rows: int, max_length: int, sets: WeightSets, *, fuse: bool
    ) -> None:
        """Capture graphs for up to ``max_rows`` rows of sequences of up to ``max_length`` tokens.

        fuse: use fused layers where the model has their shape (see ``fused_layers``).
        A graph keeps the addresses of the weights with which it was captured, so each set of weights has its own.
        """
        # Triton comes with CUDA builds of torch.
        from twinkle.sampler.torch_sampler.fused_layers import FusedDecoder, fuse_decoder
        from twinkle.sampler.torch_sampler.lora.slot_lora import SlotLora

        device = engine.device
        self._engine = engine
        self._cache = cache
        self._nobodys = cache.set_aside()  # the reserved block that padding rows write to
        self.sizes = sorted({size for size in _ROWS if size < max_rows} | {max_rows})
        # Tokens, and their indices. In a model that sees images, the third row has the positions for rotary embeddings;
        # in others indices are positions, and the last row is both.
        self._rows = 2 if engine.architecture.vision is None else 3
        self._inputs_RN = torch.zeros(self._rows, max_rows, dtype=torch.int64, device=device)
        self._table_NB = torch.zeros(max_rows, blocks_for(max_length), dtype=torch.int32, device=device)
        self._table_NB.fill_(self._nobodys)
        self._states = _States(cache.states, max_rows, device) if cache.states is not None else None
        self._lora = SlotLora(engine.architecture, max_rows, device)
        self._fused: FusedDecoder | None = None
        if fuse:
            self._fused = fuse_decoder(engine, cache, self._nobodys, self._lora)
        if self._fused is not None and engine.take_spare_rows(self._lora):
            self._lora.use_spare_rows(self._fused.spare_rows())
        # All graphs write their logits here. Separate ones for each graph would take gigabytes.
        vocabulary = len(engine.head.spec.weight_VH)
        self._logits_NV = torch.empty(max_rows, vocabulary, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, int, _LoraForm], torch.cuda.CUDAGraph] = {}  # by set of weights, rows, and LoRA
        self._pool: Any = None  # the memory that all graphs share
        self.weights = 0  # the set of weights with which to decode
        for number in sets.weight_sets():
            sets.use_weights(number)
            self._capture_all(number)
        sets.use_weights(0)

    @property
    def max_rows(self) -> int:
        return self.sizes[-1]

    @property
    def fused(self) -> bool:
        """Return whether the graphs compute fused layers instead of the model's own code."""
        return self._fused is not None

    def takes(self, version: Adapter | None) -> bool:
        """Return whether the captured graphs can run this version."""
        return version is None or self._lora.takes(version)

    def decode(
        self,
        rows: Sequence[DecodeRow],
        runs: Sequence[RowsOf],
        draws: Sequence[Draw],
        uniform_nS: Tensor,
        choices: int,
        carried: tuple[Tensor, Tensor] | None = None,
    ) -> list[DrawnRows]:
        """Draw S tokens for every row, each from the one before it, without synchronising with the host in between.

        Return the rows of the first token, then those of the second, and so on; each may be in several parts.

        runs: the versions of the rows, in order. A row that runs out of cache blocks draws meaningless tokens from then
        on, without any effect on other rows. carried: rows whose token is known on the device only, and these tokens.
        """
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        lora = _LoraForm.NONE
        if any(version is not None for version, _ in runs):
            lora = _LoraForm.SPARE_ROWS if self._lora.bind(runs, size) else _LoraForm.KERNELS
        self._fill(rows, size, uniform_nS.shape[1])
        graph = self._graphs[self.weights, size, lora]
        ids_n, positions_Pn = self._inputs_RN[0, : len(rows)], self._inputs_RN[1:, : len(rows)]
        if carried is not None:
            ids_n.index_copy_(0, *carried)
        plans = [(part, DrawPlan.for_draws(draws[part], ids_n.device)) for part in self._together(draws)]
        parts = []
        for step in range(uniform_nS.shape[1]):
            graph.replay()
            for part, plan in plans:
                parts.append(plan.draw(self._logits_NV[: len(rows)][part], uniform_nS[part, step : step + 1], choices))
                ids_n[part].copy_(parts[-1].values_3M[0])
            positions_Pn += 1
        return parts

    def _together(self, draws: Sequence[Draw]) -> list[slice]:
        """Return the rows that draw together: all, or as many as there is memory for where a draw needs much."""
        most = max(1, self._engine.head.chunk_rows // MEMORY_OF_A_DRAW)
        if len(draws) <= most or all(draw.plain for draw in draws):
            return [slice(0, len(draws))]
        return [slice(start, min(start + most, len(draws))) for start in range(0, len(draws), most)]

    def _fill(self, rows: Sequence[DecodeRow], size: int, steps: int) -> None:
        device = self._table_NB.device
        width = blocks_for(max(row.position for row in rows) + steps)  # stale entries further on are never read
        inputs = np.zeros((self._rows, size), np.int64)
        inputs[:2, : len(rows)] = [row.token for row in rows], [row.position for row in rows]
        if self._rows > 2:
            inputs[2, : len(rows)] = [row.position + row.shift for row in rows]
        table = block_table([row.blocks for row in rows], size, width, self._nobodys)
        self._inputs_RN[:, :size].copy_(to_device(torch.from_numpy(inputs), device))
        self._table_NB[:size, :width].copy_(to_device(torch.from_numpy(table), device))
        if self._states is not None:
            self._states.fill([row.state for row in rows], size)

    def _capture_all(self, weights: int) -> None:
        """Capture the graphs of a set of weights, which the model has now. Adapters exist on the base only, set 0."""
        for size in reversed(self.sizes):  # the largest first: the others reuse its memory
            for lora in (_LoraForm.NONE,) if weights else self._kinds():
                graph = self._capture(size, lora, self._pool)
                self._graphs[weights, size, lora] = graph
                self._pool = self._pool or graph.pool()

    def _kinds(self) -> list[_LoraForm]:
        return [each for each in _LoraForm if each is not _LoraForm.SPARE_ROWS or self._lora.has_spare_rows]

    def _capture(self, size: int, lora: _LoraForm, pool: Any) -> torch.cuda.CUDAGraph:
        self._lora.bind([(None, size)], size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():  # compile kernels and allocate workspaces before the capture
            for _ in range(2):
                self._pass(size, lora)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
            self._pass(size, lora)
        return graph

    def _pass(self, size: int, lora: _LoraForm) -> None:
        """Compute logits from the token buffers, all on the device. This is the work that a graph captures."""
        hidden_nH = self._hidden(self._inputs_RN[:, :size], self._table_NB[:size], lora)
        add_lora = None if lora is _LoraForm.NONE else self._lora.add_to_logits
        self._engine.head.few_logits(hidden_nH, add_lora, self._logits_NV[:size])

    def _hidden(self, inputs_Rn: Tensor, table_nB: Tensor, lora: _LoraForm) -> Tensor:
        ids_n, indices_n, positions_n = inputs_Rn[0], inputs_Rn[1], inputs_Rn[-1]
        if self._fused is not None:
            from twinkle.sampler.torch_sampler.fused_layers import Inputs

            inputs = Inputs(ids_n, indices_n, positions_n, table_nB)
            slots = None if lora is _LoraForm.NONE else self._lora
            return self._fused.hidden_states(inputs, slots, in_spare_rows=lora is _LoraForm.SPARE_ROWS)
        block_n = table_nB.gather(1, (indices_n // BLOCK)[:, None]).squeeze(1).long()
        rows = _Rows(block_n, indices_n % BLOCK, table_nB, (indices_n + 1).int())
        tensors = zip(self._cache.keys, self._cache.values, strict=True)
        attention: Iterator[CachedAttention | StatefulRows] = (_DecodeLayer(rows, *each) for each in tensors)
        stateful = iter(() if self._states is None else self._states.layers(len(ids_n)))
        cached = tuple(next(stateful if layer.delta_nets else attention) for layer in self._engine.layers)
        with_lora = lora is not _LoraForm.NONE
        layers = self._lora.layers(len(ids_n)) if with_lora else bind_layers((), self._engine.architecture)
        batch = LayerBatch(None, layers, False, cached=cached)
        return self._engine.hidden_states(ids_n[None], positions_n[None], None, batch)


class _States:
    """Which slot has the state of each row, in a model with linear attention.

    Rows of padding have the spare slot. To them each token is the first, so that numbers stay finite.
    """

    def __init__(self, pool: StatePool, max_rows: int, device: torch.device) -> None:
        self._pool = pool
        self._slots_N = torch.full((max_rows,), pool.spare, dtype=torch.int64, device=device)
        self._begins_N = torch.ones(max_rows, dtype=torch.bool, device=device)

    def fill(self, slots: Sequence[int | None], size: int) -> None:
        """Assign the slots of the first rows; further rows, up to ``size``, are padding."""
        taken = [slot for slot in slots if slot is not None]
        assert len(taken) == len(slots), "sequences that decode have states"
        padding = size - len(taken)
        device = self._slots_N.device
        self._slots_N[:size].copy_(to_device(torch.tensor(taken + [self._pool.spare] * padding), device))
        self._begins_N[:size].copy_(to_device(torch.tensor([False] * len(taken) + [True] * padding), device))

    def layers(self, rows: int) -> list[TokenRows]:
        """Return the rows of each layer with linear attention."""
        slots_n, begins_n = self._slots_N[:rows], self._begins_N[:rows]
        tensors = zip(self._pool.matrices, self._pool.columns, strict=True)
        return [TokenRows(slots_n, begins_n, *each) for each in tensors]


def block_table(blocks: Sequence[Sequence[int]], size: int, width: int, filler: int) -> np.ndarray:
    """Return a (size, width) table whose first rows begin with these blocks; everything else is ``filler``."""
    table = np.full((size, width), filler, np.int32)
    lengths = np.array([len(each) for each in blocks])
    row = np.repeat(np.arange(len(blocks)), lengths)
    column = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    table[row, column] = np.fromiter(chain.from_iterable(blocks), np.int32, len(row))
    return table


@dataclass(frozen=True)
class _Rows:
    """Where the new keys and values are written, and which keys each row attends to."""

    block_n: Tensor
    offset_n: Tensor
    table_nB: Tensor
    lengths_n: Tensor


@dataclass(frozen=True)
class _DecodeLayer:
    """The captured attention of one layer; implements :class:`~twinkle.model.decoder.attention.CachedAttention`."""

    rows: _Rows
    keys: Tensor  # (blocks, BLOCK, J, D)
    values: Tensor

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        from twinkle.sampler.torch_sampler.attention_kernels import attend_one_token

        rows = self.rows
        for kept, new in ((self.keys, key), (self.values, value)):
            kept.index_put_((rows.block_n, rows.offset_n), new[0].transpose(0, 1))
        q_nHD = query[0].transpose(0, 1)
        scale = q_nHD.shape[2] ** -0.5 if scale is None else scale
        out_nHD = attend_one_token(
            q_nHD, self.keys, self.values, rows.table_nB, rows.lengths_n, scale, window, softcap, sinks_H
        )
        return out_nHD.unsqueeze(0)


def capture_decoding(
    engine: Engine, cache: KeyValueCache, max_rows: int, max_length: int, sets: WeightSets
) -> DecodeGraphs | None:
    """Capture decode graphs for the model. Return None, with a warning in the log, if the capture fails.

    Return None without a warning where graphs are never used: on other devices than CUDA, and for models not in bf16.
    """
    if engine.device.type != "cuda" or cache.keys[0].dtype != torch.bfloat16:
        return None
    from triton.errors import TritonError  # comes with CUDA builds of torch

    rows = min(max_rows, engine.head.chunk_rows)
    for fuse in (True, False):
        try:
            return DecodeGraphs(engine, cache, rows, max_length, sets, fuse=fuse)
        # CUDA and torch raise RuntimeError when a pass has to synchronise with the host; Triton raises its own error
        # when the heads are too wide for the device.
        except (RuntimeError, TritonError) as error:
            how = "without fused layers" if fuse else "without CUDA graphs"
            logger.warning("%s decodes %s: %s", engine.architecture.family, how, str(error).split("\n")[0])
            torch.cuda.synchronize()
            sets.use_weights(0)
    return None
