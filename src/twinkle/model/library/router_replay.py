"""Routes of tokens to experts in the library's passes: recorded by one pass, and replayed by another.

A pass with ``router_replay_action=RouterReplayAction.RECORD`` returns ``routed_experts`` (B, L, layers, K) among its
outputs. As the field ``routed_experts`` (T, layers, K) of features, they decide where tokens go in a pass with
``REPLAY_FORWARD``. A sampler returns such routes, too. Without an action, routers choose, and the field is not read.

``layers`` counts all layers of the decoder. The numbers of a layer without experts are 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.library.sequences import ROUTES, SequenceBatch
from twinkle.model.types import RouteArray

__all__ = ["RouterReplayAction"]


class RouterReplayAction(Enum):
    """What a pass does with routes of tokens to experts. ``REPLAY_BACKWARD`` is refused: see :func:`read_action`."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


_BY_NAME: Mapping[str, RouterReplayAction] = {
    **{each.name: each for each in RouterReplayAction},
    **{each.value: each for each in RouterReplayAction},
}


def read_action(given: object) -> RouterReplayAction | None:
    """Return the ``router_replay_action`` of a pass: a RouterReplayAction, or its name; None: the pass has none."""
    action = _BY_NAME.get(given) if isinstance(given, str) else given
    if action is None and given is None:
        return None
    if not isinstance(action, RouterReplayAction):
        raise InvalidInputError("router_replay_action", given, "RouterReplayAction.RECORD, REPLAY_FORWARD or None")
    if action is RouterReplayAction.REPLAY_BACKWARD:
        raise UnsupportedError(
            "router_replay_action: REPLAY_BACKWARD is not a pass of its own here; layers that the backward pass "
            "computes again use the routes of their forward pass"
        )
    return action


def with_routes(batch: SequenceBatch, action: RouterReplayAction | None) -> SequenceBatch:
    """Return the batch with the routes that its pass replays, and none if it replays nothing."""
    if action is RouterReplayAction.REPLAY_FORWARD:
        if not batch.empty and not any(ROUTES in row for row in batch.rows):
            raise InvalidInputError(f"inputs.{ROUTES}", None, "routes, because router_replay_action is REPLAY_FORWARD")
        return batch
    if not any(ROUTES in row for row in batch.rows):
        return batch
    rows = tuple({name: row[name] for name in row if name != ROUTES} for row in batch.rows)
    return replace(batch, rows=rows)


def routes_of(batch: SequenceBatch) -> list[RouteArray | None]:
    """Return the routes of each sequence, (T, layers, K), for as many of its first tokens as there are some.

    Processors fill up the tokens that were never routed, the last of a sample, with zeros. No router chooses one expert
    twice, so such tokens can be recognised where K > 1. Zeros in the middle stay: they are no routes, either.
    """
    found: list[RouteArray | None] = []
    for row in batch.rows:
        routes = row.get(ROUTES)
        if routes is None:
            found.append(None)
            continue
        array = routes.numpy()
        if array.ndim == 3 and array.shape[2] > 1:
            real = np.flatnonzero(array.any((1, 2)))
            array = array[: int(real[-1]) + 1 if len(real) else 0]
        found.append(array if len(array) else None)
    return found


def padded_routes(routes: list[RouteArray]) -> Tensor:
    """Return the routes of sequences as a tensor (B, L, layers, K), with 0 in the padding."""
    return pad_sequence([torch.from_numpy(each) for each in routes], batch_first=True)
