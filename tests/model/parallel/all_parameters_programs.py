"""Programs that train all parameters of a model on every rank with a mesh, or in one process without one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model.parallel.lora_programs import ADAM, Request, Sizes, base_of, datum, mesh, rank_and_size
from twinkle.model import Datum, FullSpec, FullTrainer, TrainFailure, TrainItem, adopt_model
from twinkle.model.trainer.shard_requests import RequestShards

# Uneven shares, ranks without data, windows of two calls, an objective over a whole request.
STEPS: tuple[tuple[tuple[Request, ...], ...], ...] = (
    ((Request("run", (7, 19, 3), (0, 1, 1)), Request("run", (12, 5), (0, 0))),),
    ((Request("run", (9, 2, 33, 4), (1, 1, 1, 1)),), (Request("run", (6, 17), (0, 3), "importance_sampling"),)),
    ((Request("run", (5, 6, 7, 8), (1, 1, 1, 1), whole=True),), (Request("run", (30,), (0,)),)),
)


def make_trainer(
    sizes: Sizes, *, model: str = "toy", tied: bool = False, dtype: torch.dtype | None = None
) -> FullTrainer:
    """Return a trainer whose ranks have different numbers of micro-batches, because these are small."""
    base = adopt_model(base_of(model, tied))
    return FullTrainer(base, model_id="test", dtype=dtype, max_tokens_per_batch=40, device_mesh=mesh(sizes))


def train(sizes: Sizes, model: str = "toy", tied: bool = False, bf16: bool = False) -> dict[str, Any]:
    """Train, and return the state with all intermediate results; the gradient is that of the second window."""
    trainer = make_trainer(sizes, model=model, tied=tied, dtype=torch.bfloat16 if bf16 else None)
    trainer.create_adapter("run", FullSpec())
    vocabulary, seed, losses, norms, gradients = trainer.architecture.vocab_size, 0, [], [], {}
    probe = Request("run", (5, 9), (0, 1)).item(77, vocabulary)
    for number, calls in enumerate(STEPS):
        for requests in calls:
            seed += 1
            results = trainer.forward_backward([request.item(seed, vocabulary) for request in requests])
            losses += [result.metrics["loss:sum"] for result in results]
        trainer.forward([probe])  # a pass without gradients between the last gradient and the step
        if number == 1:
            gradients = trainer.gradients("run")
        norms.append(trainer.optim_step("run", ADAM)["unclipped_grad_l2:mean"])
    scored = trainer.forward([probe])[0]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": trainer.weights("run"),
        "computed": {name: tensor.float().cpu().numpy() for name, tensor in trainer.gather_compute_weights()},
        "scored": scored.logprobs,
        "steps": trainer.step_count("run"),
    }


def saved_and_continued(sizes: Sizes, folder: str) -> dict[str, Any]:
    """Save in the middle of a run, continue; then load and restore into new runs, and continue these as well."""
    trainer, directory = make_trainer(sizes, tied=True), Path(folder)
    trainer.create_adapter("run", FullSpec())
    fresh = trainer.weights("run")
    _step(trainer, 1)
    trainer.save("run", directory / "saved", overwrite=True)
    trainer.prepare_save("run", optimizer=False)  # on all ranks; only the first writes
    snapshot = trainer.snapshot("run")
    _step(trainer, 2)
    weights = {"continued": trainer.weights("run")}
    trainer.remove_adapter("run")
    trainer.create_adapter("run", FullSpec())
    weights["after"] = trainer.weights("run")
    trainer.load("run", directory / "saved")
    _step(trainer, 2)
    weights["loaded"] = trainer.weights("run")
    trainer.remove_adapter("run")
    trainer.restore("run", trainer.ranks.gather(snapshot)[0])
    _step(trainer, 2)
    weights["restored"] = trainer.weights("run")
    return {"fresh": fresh, **weights, "snapshot": len(snapshot.weights)}


def _step(trainer: FullTrainer, seed: int) -> None:
    trainer.forward_backward([Request("run", (8, 5, 21), (0, 1, 0)).item(seed, trainer.architecture.vocab_size)])
    trainer.optim_step("run", ADAM)


def one_rank_is_wrong(sizes: Sizes) -> dict[str, Any]:
    """Run a request that succeeds, and two that fail on the last rank."""
    trainer = make_trainer(sizes)
    trainer.create_adapter("run", FullSpec())
    rank, size = rank_and_size()
    last, vocabulary = rank == size - 1, trainer.architecture.vocab_size
    wrong = Datum(np.array([1, vocabulary]), np.array([1, 2]))
    nan = Datum(np.array([1, 2]), np.array([1, 2]), np.array([1e38, np.inf], np.float32))
    good = Request("run", (8, 5), (0, 1)).item(1, vocabulary)
    results = trainer.forward_backward(
        [
            good,
            TrainItem("run", [wrong] if last else [datum(6, 2, vocabulary)]),
            TrainItem("run", [nan] if last else [datum(6, 2, vocabulary)]),
            TrainItem("unknown", [datum(5, 3, vocabulary)]),
        ]
    )
    errors = [str(result.error) if isinstance(result, TrainFailure) else None for result in results]
    return {"errors": errors, "gradients": trainer.gradients("run")}


def own_share_of_all(sizes: Sizes, items: Sequence[TrainItem]) -> tuple[list[Any], dict[str, Any]]:
    """Give every rank all requests; each computes its share, as the ranks of a server's group do."""
    trainer = make_trainer(sizes)
    trainer.create_adapter("run", FullSpec())
    rank, size = rank_and_size()
    results = trainer.forward_backward(RequestShards.by_tokens(items, size).share(rank))
    return results, trainer.gradients("run")
