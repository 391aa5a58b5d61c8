"""What the processes of a call tell each other: which requests they have, how they are cut, and what came of them.

All ranks get the same requests. Ranks with different data have some sequences of each request or none. The ranks that
hold the cuts of one model have the same sequences, and must compute them in the same order, cut in the same places:
one of them makes the plan. A difference is found here, and is an error on all ranks; without this check it would make
them wait for each other forever.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinkle.errors import CapacityError, InvalidInputError, TwinkleError
from twinkle.model.csr import Csr
from twinkle.model.decoder.lora.dropout import DropoutDraw
from twinkle.model.objectives.validation import CheckedItem
from twinkle.model.parallel import Ranks
from twinkle.model.trainer.packing import MicroBatch

Plan = list[tuple[MicroBatch, ...]]  # micro-batches that run one after another, in groups that run together


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others about its part of a request."""

    name: str  # of the adapter
    count: int  # sequences of the request on this rank
    error: TwinkleError | None = None
    digest: str = ""  # of the request's contents; where the ranks of one model compare them
    data: int = 0  # the number of the rank among those with different data


def agree(ranks: Ranks, own: Sequence[RankReport]) -> list[TwinkleError | None]:
    """Exchange reports. Return for each request the error with which it fails on all ranks; None if it does not fail.

    Raises an error on all ranks if they do not have the same requests, or those of one model not the same contents.
    """
    reports = ranks.gather(list(own))
    if any([each.name for each in report] != [each.name for each in reports[0]] for report in reports):
        names = [[each.name for each in report] for report in reports]
        raise InvalidInputError("items", f"{names} on the ranks", "the same requests on all ranks")
    errors: list[TwinkleError | None] = []
    for request in zip(*reports, strict=True):
        error = next((each.error for each in request if each.error is not None), None)
        if error is None and len({(each.data, each.digest) for each in request}) > len({each.data for each in request}):
            raise InvalidInputError(
                "items", f"different contents of a request of {request[0].name!r}", "the same data on ranks of a model"
            )
        if error is None and not any(each.count for each in request):
            error = InvalidInputError("data", [], "a sequence of at least one datum, on one rank at least")
        errors.append(error)
    return errors


def contents_digest(item: CheckedItem, layout: str, dropout: DropoutDraw | None) -> str:
    """Return a digest of all that decides the numbers of a request, except the weights. ``layout``: its digest."""
    draw = None if dropout is None else (dropout.probability, dropout.seed, dropout.number, tuple(dropout.sequences))
    said = item.loss.name, sorted(item.config.items()), item.temperature, item.statistics, item.output
    options = (*said, item.records_routes)
    summed = hashlib.blake2b(repr((layout, draw, *options)).encode(), digest_size=16)
    for datum in item.data:
        summed.update(repr([(image.first, image.rows, image.columns, image.digest) for image in datum.images]).encode())
        routes = np.empty(0, np.int16) if datum.routes is None else datum.routes
        given = (("", datum.tokens), ("", datum.targets), ("routes", routes), *sorted(datum.inputs.items()))
        for name, array in given:
            parts = (array.crow, array.col, array.values) if isinstance(array, Csr) else (array,)
            for part in parts:
                summed.update(f"{name} {part.shape} ".encode())
                summed.update(part.tobytes())
    return summed.hexdigest()


def agree_on_plan(
    model: Ranks, make: Callable[[int], Plan], fits: Callable[[frozenset[int]], bool], describe: Callable[[Plan], str]
) -> Plan:
    """Return the plan of the first of the ``model``'s ranks, on all of them.

    ``make(most)`` returns a plan with at most that many requests in one group. ``fits`` returns whether the adapters of
    requests can be on this rank's device together; ranks hold different cuts of adapters, so it may differ between
    them. ``describe`` returns all that must be the same on all ranks.
    """
    most, made = 1 << 30, list[tuple[MicroBatch, ...]]()
    while True:
        made = model.gather(make(most) if model.number == 0 else [])[0]
        groups = [frozenset(index for batch in group for index in batch.items) for group in made]
        if model.smallest(int(all(map(fits, groups)))):
            break
        largest = max(map(len, groups))
        if largest == 1:
            raise CapacityError("an adapter does not fit the memory of a rank")
        most = largest // 2
    digest = int.from_bytes(hashlib.blake2b(describe(made).encode(), digest_size=7).digest(), "little")
    if model.smallest(digest) != -model.smallest(-digest):
        raise InvalidInputError("items", "another plan than that of another rank", "the same requests on all ranks")
    return made
