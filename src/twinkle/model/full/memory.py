"""The memory plan of a trainer of all parameters, and the measurement of what a token costs there."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from twinkle.errors import CapacityError
from twinkle.loss import get_loss
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.head import ChunkedHead
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.memory import MemoryPlan, divide, measure_per_token
from twinkle.model.trainer.probe import TokenCost

_PROBE_TOKENS = {"cuda": (1024, 3072), "cpu": (16, 48)}
_FP32 = 4  # bytes


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training all parameters needs beside the weights that the model computes with.

    ``gradient``: two of them, since a request that fails must not change the gradient of requests before it. ``base``:
    the base model's weights, where host memory is the memory of the device; elsewhere 0.
    """

    master: int
    moments: int
    gradient: int
    base: int

    @classmethod
    def for_parameters(cls, count: int, *, separate_master: bool, base: int) -> "StateBytes":
        return cls(_FP32 * count if separate_master else 0, 2 * _FP32 * count, 2 * _FP32 * count, base)

    @property
    def total(self) -> int:
        return self.master + self.moments + self.gradient + self.base


@dataclass(frozen=True)
class FullMemoryPlan(MemoryPlan):
    """Bytes for weights, the state of a run and activations. ``adapters`` is what other uses of the device may take."""

    state: StateBytes

    def __str__(self) -> str:
        gib, state = 2**30, self.state
        base = f"base model {state.base / gib:.2f} GiB, " if state.base else ""
        return (
            f"memory: weights {self.weights / gib:.2f} GiB, master weights {state.master / gib:.2f} GiB, moments "
            f"{state.moments / gib:.2f} GiB, gradient {state.gradient / gib:.2f} GiB, {base}activations "
            f"{self.activations / gib:.2f} GiB = {self.tokens} tokens per batch ({self.bytes_per_token / 1024:.0f} KiB "
            f"per token; recomputed: {self.tokens_recomputed} tokens), {self.adapters / gib:.2f} GiB unused"
        )


def require_state(state: StateBytes, weights: int, free: int) -> None:
    """Raise CapacityError if the state of a run does not fit beside the weights, before anything is allocated."""
    if state.total > free:
        gib = 2**30
        raise CapacityError(
            f"training all parameters needs {(weights + state.total) / gib:.2f} GiB without activations: weights "
            f"{weights / gib:.2f}, master weights {state.master / gib:.2f}, moments {state.moments / gib:.2f}, "
            f"gradient {state.gradient / gib:.2f}, base model {state.base / gib:.2f}. "
            f"{max(0, weights + free) / gib:.2f} GiB may be used: take a smaller model, or several devices "
            "(device_mesh with fsdp_size)"
        )


def divide_memory(
    *, weights: int, free: int, state: StateBytes, cost: TokenCost, max_tokens: int | None, device: torch.device
) -> FullMemoryPlan:
    """Divide ``free``, the bytes beside the weights, between a run's state and activations."""
    plan = divide(
        weights=weights,
        free=free - state.total,
        per_token=cost.kept,
        per_token_recomputed=cost.recomputed,
        max_tokens=max_tokens,
        device=device,
        others=False,
    )
    return FullMemoryPlan(**asdict(plan), state=state)


def measure_cost(engine: Engine, drop_gradient: Callable[[], None]) -> TokenCost:
    """Measure the bytes per token of passes that train all parameters. ``drop_gradient`` frees what a pass leaves."""
    small, large = _PROBE_TOKENS[engine.device.type]
    head = engine.head
    # With chunks of equal size all runs hold the same memory for the head, and it cancels out of their difference.
    engine.head = ChunkedHead(head.spec, min(small, head.chunk_rows), head.gradient)

    def run(tokens: int, recompute: bool) -> None:
        engine.forward_backward([random_part(engine.architecture, tokens)], recompute=recompute)
        drop_gradient()

    try:
        kept = measure_per_token(lambda tokens: run(tokens, False), engine.device, small, large)
        recomputed = measure_per_token(lambda tokens: run(tokens, True), engine.device, small, large)
    finally:
        engine.head = head
    return TokenCost(kept, min(recomputed, kept))


def random_part(architecture: Architecture, length: int) -> Part:
    """Return a request of one sequence of random tokens."""
    tokens = np.random.default_rng(0).integers(0, architecture.vocab_size, length)
    datum = CheckedDatum(tokens, tokens[:, None], {}, tokens.shape)
    item = CheckedItem("probe", get_loss("cross_entropy"), {}, (datum,))
    return Part(0, item, None, item.data)
