"""Programs in which something goes wrong on a rank of a mesh, or adapters move between meshes and one process."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.model.megatron.trainer_programs import ADAM, Request, Sizes, add_tenants, make_trainer, squared
from twinkle.errors import InvalidInputError, RankFailedError
from twinkle.model import (
    AdapterSnapshot,
    Datum,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    Trainer,
    TrainFailure,
    TrainItem,
)
from twinkle.model.megatron import engine
from twinkle.model.trainer.batch import Gradients

SPEC = LoraSpec(4, 2, 1, train_unembed=True, init_weights=False)


def datum(length: int, seed: int) -> Datum:
    tokens, targets = np.random.default_rng(seed).integers(0, 97, (2, length))
    return Datum(tokens, targets)


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def refuse_on_the_last_rank(values: Sequence[TokenValues]) -> ObjectiveValue:
    if is_last_rank():
        raise InvalidInputError("values", len(values), "something else")
    return ObjectiveValue(0.0, [np.zeros(len(value.logprobs), np.float32) for value in values])


def one_tenant_after_another_fails(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Run requests that fail in different ways, some on one rank only, beside good ones."""
    trainer = make_trainer(folder, sizes, 30)
    for name in ("good", "other", "nan", "not finite", "refused", "token", "empty"):
        trainer.create_adapter(name, SPEC)
    snapshot = trainer.snapshot("nan")
    snapshot.weights[-1] = np.nan  # in B of the head: the cut of one rank of the last stage
    trainer.restore("nan", snapshot)
    items = [
        TrainItem("good", [datum(9, 1), datum(20, 2)]),
        TrainItem("nan", [datum(8, 3)]),
        TrainItem("not finite", [datum(7, 4)]),
        TrainItem("refused", [datum(5, 5)], objective=refuse_on_the_last_rank),
        TrainItem("token", [Datum(np.array([1, 97]), np.array([1, 2]))]),
        TrainItem("empty", []),
        TrainItem("unknown", [datum(5, 6)]),
        TrainItem("other", [datum(30, 7), datum(2, 8)]),
    ]
    with mock.patch.object(engine, "harvest", harvest_nan_on_the_last_rank):
        results = trainer.forward_backward(items)
    errors = [str(result.error) if isinstance(result, TrainFailure) else None for result in results]
    gradients = {name: trainer.gradients(name) for name in trainer.adapter_ids()}
    return {"errors": errors, "gradients": gradients, "passes": [trainer.snapshot(name).passes for name in gradients]}


def harvest_nan_on_the_last_rank(gradients: Any, parts: Any) -> Gradients:
    found = _harvest(gradients, parts)
    names = [part.item.adapter_id for part in parts if part.adapter is not None]
    if is_last_rank() and "not finite" in names:
        finite = found.finite.array()
        finite[names.index("not finite")] = False
        return dataclasses.replace(found, finite=mock.Mock(array=lambda: finite))
    return found


_harvest = engine.harvest


def different_requests(folder: Path, sizes: Sizes) -> list[str]:
    """Give ranks different requests in several ways; return the errors, and that of a good call afterwards."""
    trainer = make_trainer(folder, sizes, 30)
    for name in ("a", "b"):
        trainer.create_adapter(name, SPEC)
    rank = dist.get_rank()
    calls = (
        [TrainItem(("a", "b")[rank % 2], [datum(5, 1)])],
        [TrainItem("a", [datum((5, 6)[rank % 2], 1)])],
        [TrainItem("a", [datum(5, rank % 2)])],
        [TrainItem("a", [datum(5, 1)])] * (1 + rank % 2),
        [TrainItem("a", [datum(5, 1)])],
    )
    return [_error(trainer, items) for items in calls]


def _error(trainer: Trainer, items: Sequence[TrainItem]) -> str:
    try:
        trainer.forward_backward(items)
    except InvalidInputError as error:
        return str(error)
    return ""


def break_down(values: Sequence[TokenValues]) -> ObjectiveValue:
    raise ZeroDivisionError("a mistake in a script's loss")


def broken_objective(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Run an objective that raises no error of ours, beside a good request. Return the error and the gradients."""
    trainer = make_trainer(folder, sizes, 30)
    for name in ("a", "good"):
        trainer.create_adapter(name, SPEC)
    items = [TrainItem("a", [datum(9, 1)], objective=break_down), TrainItem("good", [datum(20, 2), datum(15, 3)])]
    broken, good = trainer.forward_backward(items)
    assert isinstance(broken, TrainFailure)
    assert not isinstance(good, TrainFailure), good.error
    return {"error": str(broken.error), "gradients": {name: trainer.gradients(name) for name in ("a", "good")}}


def one_rank_fails(folder: Path, sizes: Sizes, failing: int) -> list[str]:
    """Let a rank run out of memory in the middle of a pass. Return the error, and that of the next call."""
    trainer = make_trainer(folder, sizes, 30)
    trainer.create_adapter("a", SPEC)
    items = [TrainItem("a", [datum(9, seed)]) for seed in range(4)]
    layer = trainer._passes.stage.layers[-1]
    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("tried to allocate 7 GiB"))
    trainer.forward_backward(items)
    errors = []
    with mock.patch.object(layer, "forward", out_of_memory) if dist.get_rank() == failing else nullcontext():
        for _ in range(2):
            try:
                trainer.forward_backward(items)
            except RankFailedError as error:
                errors.append(str(error))
    return errors


def pipeline_runs(folder: Path, model: str, sizes: Sizes, requests: Sequence[Request]) -> list[list[int]]:
    """Run one call, and return for each schedule the number of tenants in each of its micro-batches."""
    trainer = make_trainer(folder, sizes, 1000)
    add_tenants(trainer, model)
    pipeline, runs = trainer._pipeline, []
    assert pipeline is not None
    forward_backward = pipeline.forward_backward

    def watched(batches: Any, recompute: Any) -> Any:
        runs.append([len({part.item.adapter_id for part in parts}) for parts in batches])
        return forward_backward(batches, recompute)

    with mock.patch.object(pipeline, "forward_backward", watched):
        trainer.forward_backward([request.item for request in requests])
    return runs


def all_on_one_rank(folder: Path, sizes: Sizes) -> tuple[float, Any]:
    """Train with sequences on one data rank only, with an objective that needs a forward pass first."""
    trainer = make_trainer(folder, sizes, 20)
    trainer.create_adapter("a", dataclasses.replace(SPEC, train_mlp=False))
    data = trainer._parallel.data
    own = [datum(length, length) for length in (19, 8, 30, 2)] if data.number == data.size - 1 else []
    numbers = range(len(own))
    result = trainer.forward_backward([TrainItem("a", own, objective=squared if own else None, numbers=numbers)])[0]
    assert not isinstance(result, TrainFailure), result.error
    return result.metrics["loss:sum"], trainer.gradients("a")


def few_at_a_time(folder: Path, model: str, sizes: Sizes, requests: Sequence[Request]) -> dict[str, Any]:
    """Train tenants that do not all fit the device together, in one call; return gradients."""
    trainer = make_trainer(folder, sizes, 60)
    data = trainer.data_ranks
    add_tenants(trainer, model)
    adapters = [trainer.pool.get(name) for name in trainer.adapter_ids()]
    if sizes:
        trainer.pool.shrink(2 * max(adapter.stack.block_bytes + adapter.step_bytes for adapter in adapters))
    results = trainer.forward_backward([request.share(data.number, data.size) for request in requests])
    assert not [result for result in results if isinstance(result, TrainFailure)]
    resident = len(trainer.resident_adapter_ids())
    return {"gradients": {name: trainer.gradients(name) for name in trainer.adapter_ids()}, "resident": resident}


def save_trained(folder: Path, model: str, sizes: Sizes, requests: Sequence[Request], to: Path) -> Any:
    """Train a step, save all adapters to folders, and return their snapshots."""
    trainer = make_trainer(folder, sizes, 60)
    add_tenants(trainer, model)
    results = trainer.forward_backward([request.item for request in requests])
    assert not [result for result in results if isinstance(result, TrainFailure)]
    for name in trainer.adapter_ids():
        trainer.optim_step(name, ADAM)
        trainer.save(name, to / name)
    return _snapshots(trainer)


def load_saved(folder: Path, model: str, sizes: Sizes, source: Path, to: Path) -> dict[str, AdapterSnapshot]:
    """Load saved adapters, save them to other folders, and return their snapshots."""
    trainer = make_trainer(folder, sizes, 60)
    for path in sorted(source.iterdir()):
        trainer.create_adapter_from_checkpoint(path.name, path)
        trainer.save(path.name, to / path.name)
    return _snapshots(trainer)


def _snapshots(trainer: Trainer) -> dict[str, AdapterSnapshot]:
    return {name: trainer.snapshot(name) for name in trainer.adapter_ids()}


def random_model(sizes: Sizes, model_id: str = "random://llama-tiny?seed=3") -> Any:
    """Return log-probabilities of a model whose weights are drawn from a seed."""
    trainer = make_trainer(model_id, sizes, 60)
    tokens = np.arange(3, 30)
    result = trainer.forward([TrainItem("", [Datum(tokens, tokens)], base_model=True)])[0]
    assert not isinstance(result, TrainFailure), result.error
    return result.logprobs[0]
