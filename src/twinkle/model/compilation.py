"""Compiled decoder layers: torch.compile once for all layers, before the first tenant comes.

Token counts, group counts and bounds are dynamic, so ragged batches run the same code. A batch of a kind that was not
compiled at start-up runs eagerly: nothing is ever compiled inside a tenant's request.
"""

import torch

from twinkle.model.engine import Engine
from twinkle.model.layers import run_layer
from twinkle.model.rehearsal import rehearse

# (ranks, lengths) of the batches to compile for: one adapter, several, and two stacks side by side.
_REHEARSALS: list[tuple[list[int], list[int]]] = [
    ([32], [384]),
    ([32], [640]),
    ([32, 32, 32], [96, 160, 224]),
    ([32, 32], [512, 256]),
    ([8, 32, 32], [96, 160, 224]),
    ([8, 8, 16], [512, 160, 256]),
]


def compile_layers(engine: Engine, dtype: torch.dtype) -> None:
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in engine.layers:
        layer.run = compiled
    for ranks, lengths in _REHEARSALS:
        rehearse(engine, dtype, ranks, lengths)
    engine.freeze_compilation()
