"""Passes through a sharded model: gathering its weights needs all processes, so all of them must run the same passes.

Before each pass the ranks agree on what kind comes next: first all forward passes, then all forward-backward passes. A
rank that has no pass of that kind runs one dummy token instead and discards the result.
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
    """An engine that runs its passes together with ``ranks``, the processes that hold the shards of one model."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    @property
    def architecture(self) -> Architecture:
        return self._engine.architecture

    @property
    def token_rows(self) -> int:
        return self._engine.token_rows

    @property
    def padding_rows(self) -> int:
        return self._engine.padding_rows

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed:
        assert give_way is None, "ranks compute in step with each other"
        self._wait_for(_FORWARD)
        with _no_way_back():
            return self._engine.forward(parts)

    def forward_backward(self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None) -> Computed:
        assert give_way is None, "ranks compute in step with each other"
        self._wait_for(_FORWARD_BACKWARD)
        with _no_way_back():
            return self._engine.forward_backward(parts, recompute=recompute)

    def finish(self) -> None:
        """Run dummy passes for as long as other ranks have passes left."""
        self._wait_for(_NOTHING)

    def _wait_for(self, own: int) -> None:
        """Run dummy passes until all ranks agree that a pass of the kind ``own`` comes next."""
        while (turn := self._ranks.smallest(own)) != own:
            if turn == _FORWARD:
                self._engine.forward([one_token()])
            else:
                self._engine.forward_backward([one_token()], recompute=False)


@contextmanager
def _no_way_back() -> Iterator[None]:
    """Turn running out of memory into a CapacityError, which is not retried.

    When one rank stops in the middle of a pass, the others wait for layers that it will never gather.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            "a rank ran out of memory in a pass that all ranks share; restart with a smaller max_tokens_per_batch"
        ) from error


def one_token() -> Part:
    """Return a dummy request: one token through the base model, without an adapter.

    Its weight is 0, so that it adds nothing to the gradient where the model's own weights are trained.
    """
    token = np.zeros(1, np.int64)
    datum = CheckedDatum(token, token[:, None], {"weights": np.zeros((1, 1), np.float32)}, token.shape)
    item = CheckedItem("", get_loss("cross_entropy"), {}, (datum,))
    return Part(0, item, None, item.data)
