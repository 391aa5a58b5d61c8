"""Passes through a model whose weights are gathered from several processes: all of them must run the same ones.

Before each pass the ranks agree on what comes next: forward passes, then those forward and back. A rank that has
nothing of that kind to do runs a token of its own, and nobody asks what comes of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from twinkle.errors import CapacityError
from twinkle.loss import get_loss
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.parallel import Ranks
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.engine import Computed, Engine

_FORWARD, _FORWARD_BACKWARD, _NOTHING = range(3)


class Lockstep:
    """An engine among ``ranks``, the processes that hold the shards of one model."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    @property
    def architecture(self) -> Architecture:
        return self._engine.architecture

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        assert give_way is None, "ranks compute in step with each other"
        self._wait_for(_FORWARD)
        with _no_way_back():
            return self._engine.forward(parts)

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        assert give_way is None, "as above"
        self._wait_for(_FORWARD_BACKWARD)
        with _no_way_back():
            return self._engine.forward_backward(parts, recompute=recompute)

    def finish(self) -> None:
        """Go on with the others until nobody has anything left."""
        self._wait_for(_NOTHING)

    def _wait_for(self, own: int) -> None:
        """Run what others have to run first."""
        while (turn := self._ranks.smallest(own)) != own:
            if turn == _FORWARD:
                self._engine.forward([_one_token()])
            else:
                self._engine.forward_backward([_one_token()], recompute=False)


@contextmanager
def _no_way_back() -> Iterator[None]:
    """Out of memory in the midst of a pass: the others wait for layers that never come, so nobody may try again."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            "a rank ran out of memory in a pass that others take part in; start again with fewer max_tokens_per_batch"
        ) from error


def _one_token() -> Part:
    """Of the base model."""
    token = np.zeros(1, np.int64)
    datum = CheckedDatum(token, token[:, None], {}, token.shape)
    item = CheckedItem("", get_loss("cross_entropy"), {}, (datum,))
    return Part(0, item, None, item.data)
