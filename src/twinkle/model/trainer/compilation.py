"""Compiled decoder layers: torch.compile once for all layers, before the first tenant comes.

Training batches run compiled whatever their adapters: LoRA layers are single steps to the compiler (see lora.py), and
token counts and bounds are dynamic. Scoring without gradients and whatever the compiler did not foresee runs eagerly:
nothing is ever compiled inside a tenant's request.
"""

import torch

from twinkle.model.decoder.layers import run_layer
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.rehearsal import rehearse

# Lengths, one an adapter, and ranks of the batches to compile for: two, so that no size is taken for a constant.
_REHEARSALS = (([384, 256], 32), ([160, 96, 384], 16))


def compile_layers(engine: Engine, dtype: torch.dtype) -> None:
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in engine.layers:
        layer.compiled = compiled
    for lengths, rank in _REHEARSALS:
        rehearse(engine, dtype, [rank] * len(lengths), lengths)
    engine.freeze_compilation()
