"""Prompt passes as captured CUDA graphs: one launch instead of a thousand, for any mix of sequences and versions.

There is a graph for each bucket of rows, with and without LoRA. All read the layout of the pass from one array of
tables (see ``tables``), so another mix of versions, ranks and lengths captures nothing anew. The head runs eagerly
after the graph, on the last rows of the spans.

Shapes: T rows of a bucket, n rows from which tokens are drawn, H hidden features, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.layers import LayerBatch, bind_layers
from twinkle.model.trainer.engine import Engine
from twinkle.model.types import IntArray
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache
from twinkle.sampler.torch_sampler.cached_attention import Span
from twinkle.sampler.torch_sampler.decode_graphs import WeightSets
from twinkle.sampler.torch_sampler.prompts.tables import SIZES, TILE, Bucket, Layout

logger = logging.getLogger(__name__)


class Replay(Protocol):
    """A captured pass, such as a ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class PromptPlan:
    """Spans that fit into one captured pass, and the versions that its layout numbers."""

    bucket: Bucket
    layout: Layout
    versions: Sequence[Adapter]


class PromptGraphs:
    """Captured prompt passes, for bf16 models on CUDA whose forward pass never synchronises with the host."""

    def __init__(self, engine: Engine, cache: KeyValueCache, max_rows: int, sets: WeightSets) -> None:
        """Capture graphs for up to ``max_rows`` rows, and for each set of weights, whose addresses a graph keeps."""
        from twinkle.sampler.torch_sampler.prompts.lora import PromptLora  # Triton comes with CUDA builds of torch

        device = engine.device
        self._engine = engine
        self._cache = cache
        self._padding_block = cache.set_aside()
        self._buckets = [Bucket(rows) for rows in sorted({size for size in SIZES if size < max_rows} | {max_rows})]
        self._tables = torch.zeros(self._buckets[-1].size, dtype=torch.int32, device=device)
        self._hidden_TH: Tensor | None = None  # the output of all graphs; allocated by the first pass, the largest
        self._lora = PromptLora(engine.architecture, device)
        self._graphs: dict[tuple[int, int, bool], Replay] = {}  # by set of weights, rows, and whether with LoRA
        self._pool: Any = None  # the memory that all graphs share
        self.weights = 0  # the set of weights to compute with
        for number in sets.weight_sets():
            sets.use_weights(number)
            self._capture_all(number)
        sets.use_weights(0)

    @property
    def max_rows(self) -> int:
        return self._buckets[-1].rows

    def takes(self, version: Adapter | None) -> bool:
        """Return whether the captured graphs can run this version."""
        return version is None or self._lora.takes(version)

    def plan(
        self, spans: Sequence[Span], versions: Sequence[Adapter | None], drawing: Sequence[int]
    ) -> PromptPlan | None:
        """Choose the smallest bucket for these spans, or return None if they do not fit into one pass.

        versions: of the spans, equal ones side by side. drawing: the spans from whose last row tokens are drawn.
        """
        distinct = {id(version): version for version in versions if version is not None}
        numbers = {key: number for number, key in enumerate(distinct)}
        layout = Layout(spans, [numbers.get(id(version), -1) for version in versions], drawing)
        bucket = next((bucket for bucket in self._buckets if layout.fits(bucket)), None)
        return None if bucket is None else PromptPlan(bucket, layout, list(distinct.values()))

    def run(self, plan: PromptPlan, tokens: Sequence[IntArray]) -> Tensor:
        """Compute the tokens of the spans, without waiting for the device.

        Return the hidden states (T, H), which the next run overwrites.
        """
        bucket = plan.bucket
        if plan.versions:
            self._lora.bind(plan.versions)
        self._fill(torch.from_numpy(plan.layout.tables(bucket, tokens, self._padding_block)))
        self._graphs[self.weights, bucket.rows, bool(plan.versions)].replay()
        return self._hidden(bucket)

    def logits(self, plan: PromptPlan) -> Tensor:
        """Return the logits of the last run's drawing spans, of which there must be some: (n, V) fp32."""
        return self._logits(plan.bucket, len(plan.layout.drawing), bool(plan.versions))

    def _fill(self, tables: Tensor) -> None:
        """Copy tables to the device, without waiting for the copy."""
        if self._tables.is_cuda:
            tables = tables.pin_memory()
        self._tables[: len(tables)].copy_(tables, non_blocking=True)

    def _hidden(self, bucket: Bucket) -> Tensor:
        assert self._hidden_TH is not None, "the first capture allocates it"
        return self._hidden_TH[: bucket.rows]

    def _logits(self, bucket: Bucket, count: int, lora: bool) -> Tensor:
        """Return the logits of the first ``count`` rows in the table ``last``, (n, V) fp32."""
        last_n = self._tables[bucket.places["last"]][:count]
        tiles_n4 = self._tables[bucket.places["head"]].view(-1, TILE)[:count]

        def add(hidden_nH: Tensor, logits_nV: Tensor) -> None:
            self._lora.add_to_logits(hidden_nH, logits_nV, tiles_n4)

        return self._engine.head.few_logits(self._hidden(bucket).index_select(0, last_n), add if lora else None)

    @torch.no_grad()
    def _capture_all(self, weights: int) -> None:
        """Capture the graphs of a set of weights, which the model has now. Adapters exist on the base only, set 0."""
        for bucket in reversed(self._buckets):  # the largest first: the others reuse its memory
            self._fill(torch.from_numpy(bucket.empty(self._padding_block)))
            for lora in (False,) if weights else (True, False):
                self._graphs[weights, bucket.rows, lora] = self._capture(bucket, lora)
                self._logits(bucket, 1, lora)  # compiles the kernels of the head

    def _capture(self, bucket: Bucket, lora: bool) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile kernels and allocate workspaces before the capture
            self._pass(bucket, lora)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._pass(bucket, lora)
        self._pool = self._pool or graph.pool()
        return graph

    def _pass(self, bucket: Bucket, lora: bool) -> None:
        """Compute the hidden states of the rows in the tables, all on the device. This is what a graph captures."""
        table = {name: self._tables[place] for name, place in bucket.places.items()}
        slots_T, attention_n4 = table["slots"].long(), table["attention"].view(-1, TILE)
        rows = _Rows(slots_T // BLOCK, slots_T % BLOCK, attention_n4, table["blocks"])
        attention = tuple(
            _PromptLayer(rows, keys, values) for keys, values in zip(self._cache.keys, self._cache.values, strict=True)
        )
        if lora:
            layers = self._lora.layers(table["lora"].view(-1, TILE), bucket.lora_rows, table["versions"])
            batch = LayerBatch(None, layers, False, cached=attention)
        else:
            batch = LayerBatch(None, bind_layers((), self._engine.architecture), False, cached=attention)
        hidden_TH = self._engine.hidden_states(table["ids"].long()[None], table["positions"].long()[None], None, batch)
        if self._hidden_TH is None:
            self._hidden_TH = torch.empty_like(hidden_TH)
        self._hidden_TH[: bucket.rows].copy_(hidden_TH)


@dataclass(frozen=True)
class _Rows:
    """Where the new keys and values are written, and which keys the rows attend to."""

    block_T: Tensor
    offset_T: Tensor
    tiles_n4: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class _PromptLayer:
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
        from twinkle.sampler.torch_sampler.prompts.attention_kernels import attend_spans

        rows = self.rows
        for kept, new in ((self.keys, key), (self.values, value)):
            kept.index_put_((rows.block_T, rows.offset_T), new[0].transpose(0, 1))
        q_THD = query[0].transpose(0, 1)
        scale = q_THD.shape[2] ** -0.5 if scale is None else scale
        out_THD = attend_spans(
            q_THD, self.keys, self.values, rows.tiles_n4, rows.blocks, scale, window, softcap, sinks_H
        )
        return out_THD.unsqueeze(0)


def capture_prompts(engine: Engine, cache: KeyValueCache, max_rows: int, sets: WeightSets) -> PromptGraphs | None:
    """Capture prompt graphs for a model whose decoding was captured. Return None, with a warning, if that fails."""
    from triton.errors import TritonError  # comes with CUDA builds of torch

    try:
        return PromptGraphs(engine, cache, max_rows, sets)
    except (RuntimeError, TritonError) as error:  # as in capture_decoding
        logger.warning("%s runs prompts without CUDA graphs: %s", engine.architecture.family, str(error).split("\n")[0])
        torch.cuda.synchronize()
        sets.use_weights(0)
        return None
