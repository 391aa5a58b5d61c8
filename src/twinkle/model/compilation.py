"""Compiled decoder layers: torch.compile once for all layers, before the first tenant comes.

Training batches whose adapters share one stack run compiled. Token counts, group counts and bounds are dynamic, so
ragged batches run the same code. Everything else (several ranks or sets of target modules in one batch, scoring without
gradients) and whatever the compiler did not foresee runs eagerly: nothing is ever compiled inside a tenant's request.
"""

import torch

from twinkle.model.engine import Engine
from twinkle.model.layers import run_layer
from twinkle.model.rehearsal import rehearse

# Lengths, one an adapter, of the batches to compile for: one request, equal ones and ragged ones. Each kind comes
# twice, so that no length is taken for a constant.
_REHEARSALS = ([384], [640], [256, 256], [160, 160, 160], [96, 160, 224], [512, 256])
_RANK = 32


def compile_layers(engine: Engine, dtype: torch.dtype) -> None:
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in engine.layers:
        layer.compiled = compiled
    for lengths in _REHEARSALS:
        rehearse(engine, dtype, [_RANK] * len(lengths), lengths)
    engine.freeze_compilation()
