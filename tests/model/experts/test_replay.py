"""Routes to experts, recorded by the sampler and the trainer, and replayed in training."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import (
    Arrays,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    tolerance_of,
    with_random_weights,
)
from tests.support.models.sampling import prompt, request, run, toy_sampler
from tests.support.models.tiny_models import EXPERT_FAMILIES, the_result, tiny_model, tiny_trainer
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model import Datum, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult

Routes = NDArray[np.int16]

TENANTS: Mapping[str, tuple[LoraSpec, tuple[int, ...]]] = {
    "a": (LoraSpec(4, alpha=8, seed=1), (7, 21)),
    "b": (LoraSpec(9, alpha=5, seed=2), (13,)),
    "c": (LoraSpec(4, alpha=3, seed=3), (5, 16)),
}


@cache
def base_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


def trainer_of(family: str, **options: int) -> Trainer:
    trainer = tiny_trainer(base_model(family), **options)
    for name, (spec, _) in TENANTS.items():
        trainer.create_adapter(name, spec)
        trainer.restore(name, with_random_weights(trainer, name, seed=len(name)))
    return trainer


def item(family: str, name: str) -> TrainItem:
    lengths = TENANTS[name][1]
    data = [random_datum(base_model(family), "cross_entropy", each, seed=each) for each in lengths]
    return TrainItem(name, data)


def random_routes(trainer: Trainer, length: int, seed: int) -> Routes:
    """Return routes that no router would choose, of which the experts of one token differ."""
    spec, random = trainer.architecture.routing, np.random.default_rng(seed)
    assert spec is not None
    drawn = random.random((length, spec.layers, spec.experts)).argsort(-1)[..., : spec.chosen]
    return drawn.astype(np.int16)


def routed(given: TrainItem, routes: Sequence[Routes | None]) -> TrainItem:
    return replace(given, data=[replace(datum, routes=each) for datum, each in zip(given.data, routes, strict=True)])


def computed(trainer: Trainer, items: Sequence[TrainItem]) -> list[tuple[TrainResult, Arrays]]:
    """Return results and gradients, and drop the gradients."""
    results = [the_result(outcome) for outcome in trainer.forward_backward(items)]
    gradients = [trainer.gradients(each.adapter_id) for each in items]
    for each in items:
        trainer.zero_grad(each.adapter_id)
    return list(zip(results, gradients, strict=True))


def assert_same(left: tuple[TrainResult, Arrays], right: tuple[TrainResult, Arrays]) -> None:
    assert_logprobs_close(left[0].logprobs, right[0].logprobs)
    assert_numbers_close(left[0].metrics["loss:sum"], right[0].metrics["loss:sum"])
    assert_tensors_close(left[1], right[1])


# --- the plain model with forced routers ------------------------------------------------------------------------------


@dataclass
class Forced:
    """The routes that the routers of a plain model must choose for the sequence that comes next; None: as they like."""

    routes: Routes | None = None
    layers: list[int] = field(default_factory=list)

    def hook(
        self, family: str, layer: int, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        first, weights, chosen = output
        if self.routes is None:
            return output
        rows = inputs[0].reshape(-1, router.weight.shape[1])
        logits = linear(rows, router.weight, getattr(router, "bias", None))  # Transformers 5.5 returns probabilities
        given = torch.from_numpy(self.routes[:, layer].astype(np.int64))
        chosen = torch.cat([given, chosen[len(given) :]])
        picked = (logits.sigmoid() if family == "deepseek_v3" else logits.softmax(-1)).gather(1, chosen)
        if family not in ("qwen3_moe", "olmoe"):  # their configurations have norm_topk_prob=False
            picked = picked / picked.sum(-1, keepdim=True)
        if family == "deepseek_v3":
            picked = picked * 2.5
        self.layers.append(layer)
        return first, picked.to(weights.dtype), chosen


def forced_model(family: str, forced: Forced) -> PreTrainedModel:
    model = copy.deepcopy(base_model(family))
    if family == "deepseek_v3":
        assert model.config.routed_scaling_factor == 2.5
    for index, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "router" if family == "gpt_oss" else "gate", None)
        if router is not None:
            router.register_forward_hook(
                lambda router, inputs, output, index=index: forced.hook(family, index, router, inputs, output)
            )
    return model


@pytest.mark.matrix
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_other_routes_equal_the_plain_model_with_forced_routers(family: str) -> None:
    """Several tenants in one batch, of which one replays nothing and one only for the beginning of a sequence."""
    trainer, forced = trainer_of(family), Forced()
    if trainer.architecture.routing is None:
        assert family == "deepseek_v3"
        pytest.skip("in Transformers 5.5 its router does not choose the experts, so there are no routes to replay")
    given = {
        "a": routed(item(family, "a"), [random_routes(trainer, 7, 1), random_routes(trainer, 21, 2)]),
        "b": item(family, "b"),
        "c": routed(item(family, "c"), [None, random_routes(trainer, 10, 3)]),
    }
    for (name, asked), ours in zip(given.items(), computed(trainer, list(given.values())), strict=True):
        plain = ExpertsReference(forced_model(family, forced), trainer.spec(name), trainer.weights(name))
        loss, logprobs = 0.0, []
        for datum in asked.data:
            forced.routes = datum.routes
            result = plain.forward_backward(replace(asked, data=[datum]))
            loss, logprobs = loss + result.loss, [*logprobs, *result.logprobs]
        for mine, other in zip(ours[0].logprobs, logprobs, strict=True):
            assert_numbers_close(mine, other, tolerance_of(family))
        assert_numbers_close(ours[0].metrics["loss:sum"], loss, tolerance_of(family))
        assert_tensors_close(ours[1], plain.gradients(), tolerance_of(family))
    assert set(forced.layers) == {
        layer for layer in range(len(base_model(family).model.layers)) if family != "deepseek_v3" or layer
    }


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_what_the_sampler_recorded_is_what_the_trainer_uses(family: str) -> None:
    trainer = trainer_of(family)
    sampler, tokens = toy_sampler(trainer), prompt(23)
    plain = request("plain", "a", tokens, max_tokens=6, num_samples=3, seed=5)
    asked = replace(plain, request_id="asked", routed_experts=True)
    results = run(sampler, [plain, asked])  # the first one fills the prefix cache, which has no routes
    assert [each.routed_experts for each in results["plain"].sequences] == [None] * 3
    for before, sequence in zip(results["plain"].sequences, results["asked"].sequences, strict=True):
        assert sequence.tokens.tolist() == before.tokens.tolist()
        whole = np.concatenate([tokens, sequence.tokens])
        datum = Datum(whole[:-1], whole[1:])
        ((own, own_gradients),) = computed(trainer, [TrainItem("a", [datum], records_routes=True)])
        assert sequence.routed_experts is not None
        np.testing.assert_array_equal(sequence.routed_experts, own.routes[0])
        assert sequence.routed_experts.dtype == np.int16
        replayed = TrainItem("a", [replace(datum, routes=sequence.routed_experts)])
        ((result, gradients),) = computed(trainer, [replayed])
        assert result.routes == ()
        assert_same((result, gradients), (own, own_gradients))


def test_alone_in_company_and_in_parts() -> None:
    """Also sequence by sequence, and with activations that the backward pass computes again."""
    trainer, in_parts = trainer_of("qwen3_moe"), trainer_of("qwen3_moe", max_tokens_per_batch=10)
    items = []
    for name, (_, lengths) in TENANTS.items():
        routes = [random_routes(trainer, length, seed=length) for length in lengths]
        items.append(replace(routed(item("qwen3_moe", name), routes), records_routes=True))
    company, parts = computed(trainer, items), computed(in_parts, items)
    assert len(company) == 3
    for asked, together, apart in zip(items, company, parts, strict=True):
        (alone,) = computed(trainer, [asked])
        for each in (together, apart):
            assert_same(each, alone)
            for recorded, datum in zip(each[0].routes, asked.data, strict=True):
                np.testing.assert_array_equal(recorded, datum.routes)


def test_zeros_in_the_middle_are_no_routes() -> None:
    """A conversation has tokens that no sampler has routed, for which processors write zeros: routers choose there."""
    trainer, asked = trainer_of("qwen3_moe"), replace(item("qwen3_moe", "b"), records_routes=True)
    (own,) = computed(trainer, [asked])
    gap = own[0].routes[0].copy()
    gap[4:7] = 0
    (filled,) = computed(trainer, [routed(asked, [gap])])
    assert_same(filled, own)
    np.testing.assert_array_equal(filled[0].routes[0], own[0].routes[0])


def test_without_routes_nothing_changes_in_company() -> None:
    """A request without routes gets the same bits beside one with routes as beside the same without them."""
    trainer = trainer_of("qwen3_moe")
    free, other = item("qwen3_moe", "b"), item("qwen3_moe", "a")
    forced = routed(other, [random_routes(trainer, 7, 1), random_routes(trainer, 21, 2)])
    (before, _), (after, changed) = computed(trainer, [free, other]), computed(trainer, [free, forced])
    np.testing.assert_array_equal(before[0].logprobs[0], after[0].logprobs[0])
    assert all((before[1][name] == after[1][name]).all() for name in before[1])
    assert changed[0].metrics != computed(trainer, [other])[0][0].metrics


def test_mistakes_fail_one_request_alone() -> None:
    trainer = trainer_of("mixtral")
    good, base = item("mixtral", "a"), item("mixtral", "b")
    routes = random_routes(trainer, 13, 0)
    cases: list[tuple[object, str]] = [
        (routes[:, :1], r"data\[0\]\.routes: got 'shape \(13, 1, 2\)'.*\(T, 2, 2\) with 1 ≤ T ≤ 13"),
        (np.concatenate([routes, routes]), r"shape \(26, 2, 2\)"),
        (routes[:0], r"shape \(0, 2, 2\)"),
        (routes[0], r"shape \(2, 2\)"),
        (np.where(routes == routes[0, 0, 0], 4, routes), r"got 4, allowed: numbers of experts in \[0, 4\)"),
        (routes - 5, r"numbers of experts in \[0, 4\)"),
        (routes.astype(np.float32), r"dtype float32.*an integer array"),
        ("no", r"data\[0\]\.routes"),
        (np.repeat(routes[..., :1] % 3 + 1, 2, 2), r"got '\[(\d), \1\] for token 0 in layer 0'.*that differ"),
    ]
    (alone,) = computed(trainer, [good])
    for wrong, message in cases:
        refused = replace(base, data=[replace(base.data[0], routes=wrong)])  # type: ignore[arg-type]
        first, second = trainer.forward_backward([refused, good])
        assert isinstance(first, TrainFailure)
        with pytest.raises(InvalidInputError, match=message):
            raise first.error
        assert_numbers_close(the_result(second).metrics["loss:sum"], alone[0].metrics["loss:sum"])
        assert trainer.gradients("b") == {}
        trainer.zero_grad("a")


def test_routes_of_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("qwen3_moe")
    routing = trainer.architecture.routing
    assert routing is not None
    monkeypatch.setattr("twinkle.sampler.validation.MAX_CELLS", 59 * routing.layers * routing.chosen)
    sampler = toy_sampler(trainer)
    asked = replace(request("x", "a", prompt(14), max_tokens=6, num_samples=3), routed_experts=True)
    message = r"routed_experts: got '?60 tokens'?, allowed: at most 59 in num_samples × \(prompt \+ max_tokens\)"
    with pytest.raises(InvalidInputError, match=message):
        sampler.submit(asked)
    fewer = replace(asked, num_samples=2)
    assert len(run(sampler, [fewer])["x"].sequences) == 2


def test_a_model_without_experts_refuses_routes() -> None:
    model = tiny_model("llama")
    trainer = tiny_trainer(model)
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    datum = random_datum(model, "cross_entropy", 5, seed=0)
    for asked, name in (
        (TrainItem("a", [replace(datum, routes=np.zeros((5, 2, 2), np.int16))]), r"data\[0\]\.routes"),
        (TrainItem("a", [datum], records_routes=True), "records_routes"),
    ):
        (outcome,) = trainer.forward([asked])
        assert isinstance(outcome, TrainFailure)
        with pytest.raises((InvalidInputError, UnsupportedError), match=f"{name}: .*this model has no routers"):
            raise outcome.error
    sampler = toy_sampler(trainer)
    with pytest.raises(UnsupportedError, match="routed_experts: this sampler returns no routes"):
        sampler.submit(replace(request("x", None, prompt(5)), routed_experts=True))
