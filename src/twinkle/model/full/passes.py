"""Training passes that add to the gradient of their request layer by layer.

A pass that runs out of memory has added a part already, so the whole request must be computed again.
"""

import dataclasses
from collections.abc import Sequence

import torch

from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.call import Passes
from twinkle.model.trainer.engine import Computed
from twinkle.model.trainer.packing import Budget


class FailedPassError(Exception):
    """A training pass ran out of memory. The request must begin again, with smaller micro-batches."""

    def __init__(self, tokens: int, sequences: int, recompute: bool) -> None:
        super().__init__(f"{tokens} tokens in {sequences} sequences")
        self._tokens = tokens
        self._recompute = recompute

    def smaller_budget(self, budget: Budget) -> Budget:
        """Return the budget for the next try: half of the tokens that did not fit."""
        half = max(1, self._tokens // 2)
        if not self._recompute:
            return dataclasses.replace(budget, tokens=min(budget.tokens, half))
        return dataclasses.replace(
            budget, tokens_recomputed=min(budget.tokens_recomputed, half), longest_sequence=budget.longest
        )


class WholePasses:
    """An engine, or a lockstep around one, whose training passes raise FailedPassError when they run out of memory.

    A single sequence whose activations are recomputed already cannot be made smaller: torch's own error is raised then,
    and the request fails.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @property
    def architecture(self) -> Architecture:
        return self._passes.architecture

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        return self._passes.forward(parts, give_way)

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        try:
            return self._passes.forward_backward(parts, recompute=recompute, give_way=give_way)
        except torch.OutOfMemoryError as error:
            lengths = [length for part in parts for length in part.lengths]
            if recompute and len(lengths) == 1:
                raise
            torch.cuda.empty_cache()
            raise FailedPassError(sum(lengths), len(lengths), recompute) from error

    def finish(self) -> None:
        self._passes.finish()
