"""Programs with adapters on experts that are divided among processes, some of which have no sequence of a request."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.model.megatron.failure_programs import datum
from tests.model.megatron.trainer_programs import Sizes, make_trainer
from twinkle.errors import CapacityError
from twinkle.model import LoraSpec, TrainFailure, TrainItem
from twinkle.model.megatron import engine
from twinkle.model.trainer import engine as transformers_engine
from twinkle.model.trainer.batch import Gradients

SPEC = LoraSpec(4, 2, 1, init_weights=False)
LENGTHS = {"first": (9, 30), "last": (12, 5), "not finite": (8,)}
PLACE = list(LENGTHS).index("not finite")


def _items(number: int, size: int, names: Sequence[str], seed: int) -> list[TrainItem]:
    """Return requests that are whole on one data rank: "first" on the first one, others on the last one."""
    items = []
    for name in names:
        own = number == (0 if name == "first" else size - 1)
        data = [datum(length, seed + length) for length in LENGTHS[name]]
        items.append(TrainItem(name, data if own else [], numbers=range(len(data)) if own else ()))
    return items


def others_requests(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Train requests that only one data rank has, with a gradient that is not finite where its experts are alone.

    Go on in an open window after its gradient was put together, and from a snapshot of it.
    """
    trainer = make_trainer(folder, sizes, 20)
    data = trainer.data_ranks
    for name in LENGTHS:
        trainer.create_adapter(name, SPEC)
    harvest = _harvest_not_finite if data.number == 0 else _harvest
    with mock.patch.object(engine, "harvest", harvest), mock.patch.object(transformers_engine, "harvest", harvest):
        results = trainer.forward_backward(_items(data.number, data.size, list(LENGTHS), 0))
    errors = {
        name: str(result.error)
        for name, result in zip(LENGTHS, results, strict=True)
        if isinstance(result, TrainFailure)
    }
    first = {name: trainer.gradients(name) for name in LENGTHS}
    trainer.forward_backward(_items(data.number, data.size, ("first", "last"), 50))
    trainer.restore("last", trainer.snapshot("last"))
    trainer.forward_backward(_items(data.number, data.size, ("last",), 90))
    sizes_of = {name: trainer.pool.get(name).layout.size for name in LENGTHS}
    return {
        "errors": errors,
        "first": first,
        "gradients": {name: trainer.gradients(name) for name in LENGTHS},
        "passes": [trainer.snapshot(name).passes for name in LENGTHS],
        "sizes": sizes_of,
        "host bytes": trainer.host_bytes_of(SPEC),
    }


_harvest = engine.harvest


def _harvest_not_finite(gradients: Any, parts: Any) -> Gradients:
    found = _harvest(gradients, parts)
    if PLACE not in found.indices:
        return found
    finite = found.finite.array()
    finite[found.indices.index(PLACE)] = False
    return dataclasses.replace(found, finite=mock.Mock(array=lambda: finite))


def no_room_for_others(folder: Path, sizes: Sizes) -> list[str]:
    """Train two tenants whose adapters do not fit together, each on another rank; then with room for both."""
    trainer = make_trainer(folder, sizes, 60)
    data = trainer.data_ranks
    names = ("first", "last")
    trainer.create_adapter("first", SPEC)
    trainer.create_adapter("last", dataclasses.replace(SPEC, rank=9))  # in a stack of its own
    largest = max(each.stack.block_bytes + each.step_bytes for each in map(trainer.pool.get, names))
    errors = []
    for room in (largest, 2 * largest):
        trainer.pool.budget_bytes = room
        try:
            trainer.forward_backward(_items(data.number, data.size, names, 0))
            errors.append("")
        except CapacityError as error:
            errors.append(str(error))
    return errors
