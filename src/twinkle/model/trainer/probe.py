"""Trains temporary adapters on random tokens, to measure the memory per token and to compile before requests come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from twinkle.loss import get_loss
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.adapters.cuts import WHOLE, AdapterCuts
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.head import ChunkedHead
from twinkle.model.decoder.layers import run_layer
from twinkle.model.decoder.lora.stacks import RowLayout, Stack, initial_row
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.memory import measure_per_token
from twinkle.model.types import LoraSpec

PROBE_RANK = 32
# How much values and gradients of two passes in bf16 may always differ, relative to their norm: the passes round at
# every layer, in different places.
_ROUNDING = 0.1
_ROUNDING_AND_ROUTES = 0.3  # where rounding sends 2 % of the tokens to another expert in each layer
# Deep models with random weights magnify rounding more than that. Then passes may differ by this many times what one
# more rounding, that of the embeddings, changes; but never by half, because numbers that have nothing to do with each
# other differ by little more than all of their norm.
_TIMES_ONE_ROUNDING = 2
_NEVER = 0.5
_HALF_UNIT = 2**-8  # the largest relative error of rounding to bf16
PROBE_TOKENS = {"cuda": (1024, 3072), "cpu": (16, 48)}


@dataclass(frozen=True)
class TokenCost:
    """Bytes per token of a forward and backward pass, with activations kept and with activations recomputed."""

    kept: int
    recomputed: int


def measure_token_cost(engine: Engine, dtype: torch.dtype) -> TokenCost:
    small, large = PROBE_TOKENS[engine.device.type]
    if engine.device.type == "cuda":  # different lengths: compile the kernels for those now, not during a request
        run_probe(engine, dtype, [PROBE_RANK, PROBE_RANK], [small, small // 2], experts=True)
    adapters = probe_adapters(engine.architecture, engine.device, dtype, [PROBE_RANK], head=True, experts=True)

    def run(tokens: int, recompute: bool) -> None:
        engine.forward_backward(probe_parts(engine.architecture, adapters, [tokens]), recompute=recompute)

    with _head_chunks(engine, small):
        kept = measure_per_token(lambda tokens: run(tokens, False), engine.device, small, large)
        recomputed = measure_per_token(lambda tokens: run(tokens, True), engine.device, small, large)
    return TokenCost(kept, min(recomputed, kept))


@contextmanager
def _head_chunks(engine: Engine, rows: int) -> Iterator[None]:
    """Limit the head's chunks to ``rows`` rows.

    All runs then hold the same memory for the head, whatever their length, and it cancels out of their difference.
    """
    head = engine.head
    engine.head = ChunkedHead(head.spec, min(rows, head.chunk_rows))
    try:
        yield
    finally:
        engine.head = head


def run_probe(
    engine: Engine, dtype: torch.dtype, ranks: list[int], lengths: list[int], *, experts: bool = False
) -> None:
    """Run one training batch and one scoring batch, with one sequence per adapter."""
    adapters = probe_adapters(engine.architecture, engine.device, dtype, ranks, experts=experts)
    parts = probe_parts(engine.architecture, adapters, lengths)
    engine.forward_backward(parts, recompute=False)
    engine.forward(parts)


@dataclass(frozen=True)
class CapturedDifference:
    """How much a captured pass differs from another, and how much it may, relative to the norm of its numbers."""

    found: float
    allowed: float

    @property
    def is_small(self) -> bool:
        return self.found <= self.allowed


def compare_captured_passes(engine: Engine, dtype: torch.dtype) -> CapturedDifference:
    """Return the difference between captured and other passes that comes closest to its bound, or exceeds it most.

    They should give the same numbers up to the rounding of bf16.
    """
    ranks = [PROBE_RANK, PROBE_RANK // 2, PROBE_RANK]
    adapters = probe_adapters(engine.architecture, engine.device, dtype, ranks, head=True, experts=True, init=False)
    graphs = engine.graphs
    always = _ROUNDING_AND_ROUTES if engine.architecture.experts else _ROUNDING
    differences: list[CapturedDifference] = []
    for lengths in ([5, 40, 3], [130, 70, 64]):
        parts = probe_parts(engine.architecture, adapters, lengths)
        engine.graphs = None
        plain = numbers_of_a_pass(engine, parts)
        with embeddings_rounded_otherwise(engine):
            magnified = relative_differences(numbers_of_a_pass(engine, parts), plain)
        engine.graphs = graphs
        found = relative_differences(numbers_of_a_pass(engine, parts), plain)
        allowed = [min(_NEVER, max(always, _TIMES_ONE_ROUNDING * each)) for each in magnified]
        differences += map(CapturedDifference, found, allowed)
    return max(differences, key=lambda each: (not each.is_small, each.found / each.allowed))


@contextmanager
def embeddings_rounded_otherwise(engine: Engine) -> Iterator[None]:
    """Change each number of the embeddings at random, by at most one unit of bf16."""
    generator = torch.Generator(engine.device).manual_seed(0)

    def change(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        errors = torch.rand(output.shape, generator=generator, device=output.device) * 2 - 1
        return (output.float() * (1 + _HALF_UNIT * errors)).to(output.dtype)

    handle = engine.model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def numbers_of_a_pass(engine: Engine, parts: list[Part]) -> list[torch.Tensor]:
    """Return values and gradients of a training pass."""
    found = engine.forward_backward(parts, recompute=False)
    return [*map(torch.from_numpy, found.values), *(each.row_P for each in found.gradients)]


def relative_differences(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [float((ours - theirs).norm() / theirs.norm().clip(1e-30)) for ours, theirs in zip(left, right, strict=True)]


def probe_adapters(
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    ranks: list[int],
    *,
    head: bool = False,
    experts: bool = False,
    init: bool = True,
    cuts: AdapterCuts = WHOLE,
) -> list[Adapter]:
    """Return temporary adapters on all linear layers; with ``head`` and ``experts`` also on those.

    ``cuts``: those of a trainer.
    """
    adapters: list[Adapter] = []
    stacks: dict[int, Stack] = {}
    targets = architecture.linear
    if experts:
        targets += architecture.shared_outer
    if head:
        targets += (architecture.head,)
    for number, rank in enumerate(ranks):
        whole = RowLayout(rank, targets)
        layout = cuts.own(whole)
        stack = stacks.setdefault(rank, Stack(layout, dtype, device))
        row_P = cuts.cut(initial_row(whole, [rank] * len(targets), number, init), layout).to(device)
        adapter = Adapter.fresh(f"probe-{number}", LoraSpec(rank, seed=number), stack, row_P)
        if not stack.has_free_slot:
            stack.add_block()
        adapter.slot = stack.take()
        adapter.refresh_compute_copy()
        adapters.append(adapter)
    return adapters


def probe_parts(architecture: Architecture, adapters: list[Adapter], lengths: list[int]) -> list[Part]:
    """Return one random sequence for each adapter."""
    generator = np.random.default_rng(0)
    parts = []
    for index, (adapter, length) in enumerate(zip(adapters, lengths, strict=True)):
        tokens = generator.integers(0, architecture.vocab_size, length)
        datum = CheckedDatum(tokens, tokens[:, None], {}, tokens.shape)
        item = CheckedItem(adapter.adapter_id, get_loss("cross_entropy"), {}, (datum,))
        parts.append(Part(index, item, adapter, item.data))
    return parts


# The batches to compile for: the length of each adapter's sequence, and the rank of the adapters. There are two, so
# that the compiler treats no size as a constant.
COMPILED_PROBES = (([384, 256], 32), ([160, 96, 384], 16))


def compile_layers(engine: Engine, dtype: torch.dtype) -> None:
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in engine.layers:
        layer.compiled = compiled
    for lengths, rank in COMPILED_PROBES:
        run_probe(engine, dtype, [rank] * len(lengths), lengths)
    engine.freeze_compilation()
