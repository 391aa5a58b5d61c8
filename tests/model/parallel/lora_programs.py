"""Multi-LoRA programs that run on every rank with a mesh, or in one process without one.

A program gets the data of all ranks; :func:`share` selects those of one rank. The comparisons are in the tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.models.seeing_models import seeing_model
from twinkle.errors import InvalidInputError, RankFailedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import (
    AdamParams,
    Datum,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    Trainer,
    TrainFailure,
    TrainItem,
    adopt_model,
)
from twinkle.model.parallel import ProcessRanks, in_step
from twinkle.model.trainer.shard_requests import RequestShards

Sizes = Mapping[str, int]  # sizes of a mesh: dp_size and fsdp_size; empty: one process without a mesh

_WIDTHS = {"toy": (64, 96, 97), "wide": (512, 1024, 1000)}  # (hidden, intermediate, vocabulary)
ADAM = AdamParams(learning_rate=5e-4, eps=1e-8, weight_decay=0.01, grad_clip_norm=0.5)


def llama(name: str, *, tied: bool = False) -> PreTrainedModel:
    hidden, intermediate, vocabulary = _WIDTHS[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15 if name == "toy" else 0.04,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def base_of(name: str, tied: bool = False) -> PreTrainedModel:
    """Return a model by the name of its size, or by its family if it has a vision tower."""
    return llama(name, tied=tied) if name in _WIDTHS else seeing_model(name)


def mesh(sizes: Sizes) -> DeviceMesh | None:
    return DeviceMesh.from_sizes(device_type="cpu", **sizes) if sizes else None


def rank_and_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def share(items: Sequence[Any], owners: Sequence[int]) -> list[Any]:
    """Return the items of this rank. Item k belongs to rank ``owners[k]`` modulo the number of ranks."""
    rank, size = rank_and_size()
    return [item for item, owner in zip(items, owners, strict=True) if owner % size == rank]


def datum(length: int, seed: int, vocabulary: int, *, advantages: bool = False) -> Datum:
    generator = np.random.default_rng(seed)
    tokens, targets = generator.integers(0, vocabulary, (2, length))
    if not advantages:
        return Datum(tokens, targets, generator.random(length).astype(np.float32))
    extras = {
        "logprobs": -generator.random(length).astype(np.float32) * 6,
        "advantages": generator.standard_normal(length).astype(np.float32),
    }
    return Datum(tokens, targets, extras=extras)


@dataclass(frozen=True)
class Request:
    """A request for one adapter; ``owners`` gives the rank of each sequence."""

    adapter: str
    lengths: tuple[int, ...]
    owners: tuple[int, ...]
    loss: str = "cross_entropy"
    whole: bool = False  # an objective over all sequences of the request, which are on one rank

    def item(self, seed: int, vocabulary: int) -> TrainItem:
        advantages = self.loss != "cross_entropy"
        data = [datum(n, seed * 100 + k, vocabulary, advantages=advantages) for k, n in enumerate(self.lengths)]
        own = share(data, self.owners)
        objective = spread if self.whole else None
        return TrainItem(self.adapter, own, loss=self.loss, objective=objective)


def spread(values: Sequence[TokenValues]) -> ObjectiveValue:
    """Half the squared deviation of the sequences' sums from their mean. It cannot be computed sequence by sequence."""
    sums = np.array([value.logprobs.sum() for value in values])
    slopes = (sums - sums.mean()) * 0.01
    arrays = [np.full(len(value.logprobs), slope, np.float32) for value, slope in zip(values, slopes, strict=True)]
    return ObjectiveValue(float(0.005 * ((sums - sums.mean()) ** 2).sum()), arrays)


# Uneven shares, ranks without data, windows of two calls, three kinds of losses. A single process gets all data.
STEPS: tuple[tuple[tuple[Request, ...], ...], ...] = (
    (
        (
            Request("small", (7, 19, 3), (0, 1, 1)),
            Request("head", (12, 5), (0, 0)),  # the other ranks get nothing
        ),
    ),
    (
        (Request("small", (9, 2, 33, 4), (1, 1, 1, 1)),),
        (Request("small", (6, 17), (0, 3)), Request("head", (21, 8, 2), (2, 1, 0), "importance_sampling")),
    ),
    (
        (Request("head", (5, 6, 7, 8), (1, 1, 1, 1), whole=True), Request("small", (11, 13, 17), (3, 2, 1), "ppo")),
        (Request("small", (30,), (0,)),),
    ),
)


def make_trainer(sizes: Sizes, model: str, *, max_tokens: int = 40, tied: bool = False) -> Trainer:
    """Return a trainer. ``max_tokens`` is small, so that ranks have different numbers of micro-batches."""
    base = adopt_model(base_of(model, tied))
    return Trainer(base, model_id="test", max_tokens_per_batch=max_tokens, device_mesh=mesh(sizes))


def add_adapters(trainer: Trainer) -> None:
    trainer.create_adapter("small", LoraSpec(4, alpha=8, seed=1, train_mlp=False))
    trainer.create_adapter("head", LoraSpec(12, seed=2, train_unembed=True))


def train(sizes: Sizes, model: str, tied: bool = False) -> dict[str, Any]:
    """Train, and return the final weights and moments with all intermediate results."""
    trainer = make_trainer(sizes, model, tied=tied)
    add_adapters(trainer)
    vocabulary, seed, losses, norms, gradients = trainer.architecture.vocab_size, 0, [], [], {}
    for number, calls in enumerate(STEPS):
        for requests in calls:
            seed += 1
            results = trainer.forward_backward([request.item(seed, vocabulary) for request in requests])
            losses += [result.metrics["loss:sum"] for result in results]
        if number == 1:
            gradients = {name: trainer.gradients(name) for name in ("small", "head")}
        for name in ("small", "head"):
            norms.append(trainer.optim_step(name, ADAM)["unclipped_grad_l2:mean"])
    probe = Request("head", (5, 9), (0, 1))
    scored = trainer.forward([probe.item(77, vocabulary)])[0]
    states = {name: trainer.snapshot(name) for name in ("small", "head")}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": {name: trainer.weights(name) for name in states},
        "moments": {name: {"m": state.exp_avg, "v": state.exp_avg_sq} for name, state in states.items()},
        "scored": scored.logprobs,
        "steps": [trainer.step_count(name) for name in states],
    }


def own_share_of_all(sizes: Sizes, items: Sequence[TrainItem]) -> tuple[list[Any], dict[str, Any]]:
    """Give every rank all requests; each computes its share."""
    trainer = make_trainer(sizes, "toy")
    add_adapters(trainer)
    rank, size = rank_and_size()
    results = trainer.forward_backward(RequestShards.by_tokens(items, size).share(rank))
    return results, {name: trainer.gradients(name) for name in ("small", "head")}


def one_rank_is_wrong(sizes: Sizes) -> dict[str, Any]:
    """Run three requests that fail on the last rank in different ways, and one that succeeds."""
    trainer = make_trainer(sizes, "toy")
    for name in ("good", "bad", "refused", "empty"):
        trainer.create_adapter(name, LoraSpec(4, seed=1))
    rank, size = rank_and_size()
    last = rank == size - 1
    vocabulary = trainer.architecture.vocab_size
    wrong = Datum(np.array([1, vocabulary]), np.array([1, 2]))
    results = trainer.forward_backward(
        [
            Request("good", (8, 5), (0, 1)).item(1, vocabulary),
            TrainItem("bad", [wrong] if last else [datum(6, 2, vocabulary)]),
            TrainItem("refused", [datum(5, 3, vocabulary)], objective=refuse if last else spread),
            TrainItem("empty", []),
            TrainItem("unknown", [datum(5, 3, vocabulary)]),
        ]
    )
    gradients = {name: trainer.gradients(name) for name in trainer.adapter_ids()}
    errors = [str(result.error) if isinstance(result, TrainFailure) else None for result in results]
    return {"errors": errors, "gradients": gradients}


def refuse(values: Sequence[TokenValues]) -> ObjectiveValue:
    raise InvalidInputError("values", len(values), "something else")


def different_requests(sizes: Sizes) -> str:
    trainer = make_trainer(sizes, "toy")
    add_adapters(trainer)
    try:
        trainer.forward_backward([TrainItem(("small", "head")[rank_and_size()[0]], [datum(5, 1, 90)])])
    except InvalidInputError as error:
        return str(error)
    return ""


def gradient_looked_at(sizes: Sizes) -> dict[str, Any]:
    """Read, save and restore the gradient of a window while it is open."""
    trainer = make_trainer(sizes, "toy")
    add_adapters(trainer)
    vocabulary = trainer.architecture.vocab_size
    for seed, owners in enumerate([(0, 1), (1, 1), (0, 0)]):
        trainer.forward_backward([Request("small", (6, 9), owners).item(seed, vocabulary)])
        trainer.gradient_norm("small")
        trainer.scale_gradient("small", 0.5)
        trainer.restore("small", trainer.snapshot("small"))
    norm = trainer.optim_step("small", ADAM)["unclipped_grad_l2:mean"]
    return {"norm": norm, "weights": trainer.weights("small")}


def drawn_seed(sizes: Sizes) -> LoraSpec:
    return make_trainer(sizes, "toy").create_adapter("a", LoraSpec(4))


def numbers_held(sizes: Sizes) -> tuple[int, int]:
    """Return how many base weights this process holds, and how many there are in all."""
    base = adopt_model(llama("toy", tied=True))
    Trainer(base, model_id="test", max_tokens_per_batch=16, device_mesh=mesh(sizes))
    held = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in base.parameters()]
    return sum(each.numel() for each in held), sum(parameter.numel() for parameter in base.parameters())


def one_rank_breaks(failing: int) -> list[str]:
    """Let one rank raise where the other waits for it. Return the error, and that of the next operation."""
    whole = torch.distributed.group.WORLD
    assert whole is not None
    ranks, errors = ProcessRanks(whole), []
    del whole
    for _ in range(2):
        try:
            with in_step(ranks):
                if ranks.number == failing:
                    raise ZeroDivisionError("a bug")
                ranks.gather(1)
        except RankFailedError as error:
            errors.append(str(error))
    return errors
