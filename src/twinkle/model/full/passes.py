"""Passes whose gradients are added to weights while they run: one that runs out of memory cannot be undone alone."""

import dataclasses
from collections.abc import Sequence

import torch

from twinkle.errors import CapacityError
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
        self.tokens = tokens
        self.hopeless = sequences == 1 and recompute
        self._recompute = recompute

    @property
    def error(self) -> CapacityError:
        return CapacityError(f"a sequence of {self.tokens} tokens does not fit this device's memory")

    def smaller_budget(self, budget: Budget) -> Budget:
        """Return the budget for the next try: half of the tokens that did not fit."""
        half = max(1, self.tokens // 2)
        if not self._recompute:
            return dataclasses.replace(budget, tokens=min(budget.tokens, half))
        if self.hopeless:
            return budget
        return dataclasses.replace(
            budget, tokens_recomputed=min(budget.tokens_recomputed, half), longest_sequence=budget.longest
        )


class WholePasses:
    """An engine, or a lockstep around one, whose training passes raise :class:`FailedPassError` without memory."""

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
            torch.cuda.empty_cache()
            lengths = [length for part in parts for length in part.lengths]
            raise FailedPassError(sum(lengths), len(lengths), recompute) from error

    def finish(self) -> None:
        self._passes.finish()
