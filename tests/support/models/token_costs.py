"""Measures the memory of a model's tokens once, because tests make thousands of trainers on the same few models."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from twinkle.model.trainer import preparation
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.probe import TokenCost, measure_token_cost


def shape_of(engine: Engine, dtype: torch.dtype) -> tuple[object, ...]:
    """Return all that decides how many bytes a token needs."""
    model = engine.model
    sizes = tuple((name, tuple(each.shape)) for name, each in model.named_parameters())
    layers = type(model), model.config.to_json_string(), model.config._attn_implementation
    return *layers, sizes, engine.architecture.padded, engine.head.chunk_rows, engine.device, dtype


@contextmanager
def costs_measured_once() -> Iterator[None]:
    """Keep the measured cost of each model on the CPU: four training passes are most of the time a trainer needs."""
    known: dict[tuple[object, ...], TokenCost] = {}

    def measure_once(engine: Engine, dtype: torch.dtype) -> TokenCost:
        if engine.device.type != "cpu" or torch.distributed.is_initialized():
            return measure_token_cost(engine, dtype)
        shape = shape_of(engine, dtype)
        if shape not in known:
            known[shape] = measure_token_cost(engine, dtype)
        return known[shape]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "measure_token_cost", measure_once)
        yield
