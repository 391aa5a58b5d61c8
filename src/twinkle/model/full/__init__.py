"""Training of all parameters of a model, by one run at a time: :class:`~twinkle.model.full.trainer.FullTrainer`.

It runs the decoder with the same engine as the trainer of adapters, and may import ``model.library`` and everything
below it.
"""

from twinkle.model.full.trainer import FullTrainer

__all__ = ["FullTrainer"]
