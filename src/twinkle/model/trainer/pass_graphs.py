"""Passes of few rows as captured CUDA graphs: the host launches two graphs instead of two thousand kernels.

A small pass takes the GPU a few milliseconds, while the host needs many times as long to launch its kernels one by one.
So the forward and the backward pass through the decoder are captured, once for each :class:`Bucket` of rows; a pass
uses the smallest bucket that its requests fit into. What differs between passes is in tables
(:mod:`twinkle.model.trainer.pass_tables`), so tenants, ranks and lengths may change without a new capture. The head and
the losses, whose kernels are few, run between the two graphs as in other passes.

All graphs share one block of memory, which has room for the activations of the largest.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.attention import runs_own_kernels
from twinkle.model.decoder.layers import LayerBatch
from twinkle.model.trainer.batch import GradientRows, Part
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.pass_tables import Bucket, PassTables, can_be_captured

logger = logging.getLogger(__name__)

BUCKETS = tuple(map(Bucket, (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)))
_WARM_UPS = 2  # passes before a capture, which compile kernels and allocate the workspaces of libraries


class PassGraphs:
    """The captured passes of an engine; implements :class:`~twinkle.model.trainer.engine.CapturedPasses`."""

    def __init__(self, engine: Engine, buckets: Sequence[Bucket]) -> None:
        architecture = engine.architecture
        names = [target.name for target in architecture.linear]
        self._tables = PassTables(max(buckets), names, engine.device, architecture.experts)
        self._passes: list[_Pass] = []
        pool: Any = None
        stream = torch.cuda.Stream()
        for bucket in sorted(buckets, reverse=True):  # the largest first: the others use its memory
            captured = _Pass(engine, self._tables, bucket)
            captured.capture(pool, stream)
            pool = pool or captured.pool
            self._passes.insert(0, captured)

    @property
    def most_rows(self) -> int:
        return self._passes[-1].rows

    def find(self, parts: Sequence[Part]) -> "_Pass | None":
        if not all(map(can_be_captured, parts)):
            return None
        return next((each for each in self._passes if each.bucket.takes(parts)), None)


class _Pass:
    """The pass through the decoder for the batches of one bucket, before and after its capture."""

    def __init__(self, engine: Engine, tables: PassTables, bucket: Bucket) -> None:
        architecture = engine.architecture
        prefixes = [f"{architecture.layers_path}.{index}." for index in range(architecture.layer_count)]
        self.bucket = bucket
        self._engine = engine
        self._tables = tables
        self._batch = LayerBatch(tables.packing(bucket), tables.lora(bucket, prefixes), recompute=False)
        self._hidden_TH: Tensor | None = None
        self._dhidden_TH: Tensor | None = None
        self._forward_graph: torch.cuda.CUDAGraph | None = None
        self._backward_graph: torch.cuda.CUDAGraph | None = None

    @property
    def rows(self) -> int:
        return self.bucket.rows

    @property
    def pool(self) -> Any:
        """Return the memory that the graphs use."""
        assert self._forward_graph is not None
        return self._forward_graph.pool()

    def forward(self, parts: Sequence[Part], gradients: Sequence[GradientRows]) -> Tensor:
        self._tables.fill(parts, self.bucket, gradients)
        if self._forward_graph is None:
            self._run_forward()
        else:
            self._forward_graph.replay()
        assert self._hidden_TH is not None
        return self._hidden_TH.detach()[: sum(sum(part.lengths) for part in parts)]

    def backward(self, dhidden_TH: Tensor) -> None:
        assert self._dhidden_TH is not None
        self._dhidden_TH[: len(dhidden_TH)].copy_(dhidden_TH)
        self._dhidden_TH[len(dhidden_TH) :].zero_()
        if self._backward_graph is None:
            self._run_backward()
        else:
            self._backward_graph.replay()

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture both graphs on a stream. ``pool``: the memory of other graphs, to be used too; None: new memory."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run_forward()
                self._run_backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the warm-up used; torch cannot free it during a capture
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _without_garbage_collection():
            _record(forward, self._run_forward, pool)
            _record(backward, self._run_backward, forward.pool())
        torch.cuda.current_stream().wait_stream(stream)
        self._forward_graph, self._backward_graph = forward, backward

    @torch.enable_grad()
    def _run_forward(self) -> None:
        """Compute the hidden states from the tables."""
        ids, positions = self._tables.ids_and_positions(self.bucket)
        self._hidden_TH = self._engine.hidden_states(ids, positions, None, self._batch)
        if self._dhidden_TH is None:
            self._dhidden_TH = torch.zeros_like(self._hidden_TH)

    def _run_backward(self) -> None:
        assert self._hidden_TH is not None and self._dhidden_TH is not None
        self._hidden_TH.backward(self._dhidden_TH)


def _record(graph: torch.cuda.CUDAGraph, run: Callable[[], None], pool: Any) -> None:
    graph.capture_begin(*(() if pool is None else (pool,)))
    try:
        run()
    finally:
        graph.capture_end()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: if it freed objects of CUDA during a capture, the capture would fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_passes(engine: Engine, dtype: torch.dtype, most_rows: int) -> PassGraphs | None:
    """Capture the passes of up to ``most_rows`` rows. Return None, with a warning in the log, if that fails.

    Return None without a warning where passes are never captured: on devices other than Hopper GPUs, for models that
    are padded, have linear attention, are sharded or not in bf16, and where there is no memory for the smallest bucket.
    """
    buckets = [bucket for bucket in BUCKETS if bucket.rows <= most_rows]
    can_run = runs_own_kernels(engine.device) and dtype == torch.bfloat16
    follows_lengths = engine.architecture.padded or engine.architecture.has_linear_attention
    if not buckets or not can_run or follows_lengths or engine.sharded_head is not None:
        return None
    from triton.errors import TritonError  # comes with CUDA builds of torch

    try:
        return PassGraphs(engine, buckets)
    # CUDA and torch raise RuntimeError when a pass has to synchronise with the host.
    except (RuntimeError, TritonError, UnsupportedError) as error:
        logger.warning("%s trains without CUDA graphs: %s", engine.architecture.family, str(error).split("\n")[0])
        torch.cuda.synchronize()
        return None
