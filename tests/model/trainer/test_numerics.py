"""A tenant gets the same numbers alone, with others, in any micro-batches, and from PEFT + Transformers + torch.

Equal means, in fp32: weights and gradients ‖a − b‖₂/‖b‖₂ ≤ 1e-5 for each tensor, losses
and log-probabilities |Δ| ≤ 1e-5·max(1, |x|).

Adam's eps: GEMMs of different shapes differ in the last bits, so gradients have a relative error δ of about 1e-6
(mostly in q and k of the attention). If eps is far below the gradient's size σ, Adam's first step is the sign of the
gradient. For elements smaller than δ·σ this sign is random, so some of them flip in any implementation, and each flip
is a relative error of 2/√n in a tensor of n elements. With a larger eps the error is about δ·√(σ/eps). The strict
comparison of weights therefore uses an eps within a factor of about ten of σ, which is 0.1 to 3 here.
``test_the_default_eps`` shows what holds at 1e-12, and test_optimizer.py compares the optimizer alone, with equal
gradients, at any eps.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.models.reference import (
    MODELS,
    Reference,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    padded_logprobs,
    random_datum,
    relative_error,
    toy_llama,
    wide_llama,
    with_random_weights,
)
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem, TrainResult

pytestmark = pytest.mark.matrix

STEPS = 5

MakeTrainer = Callable[..., Trainer]
Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Tenant:
    spec: LoraSpec
    loss: str
    lengths: tuple[int, ...]
    width: int = 0  # K of (T, K) targets
    config: Mapping[str, float] = field(default_factory=dict)
    token_clips: bool = False  # every token has its own clip bounds
    clip_norm: float = 0.0
    weight_decay: float = 0.0


# Three tenants share a stack. Lengths are equal (one batched product) or different (a loop); one sequence has one
# token.
TENANTS: Mapping[str, Tenant] = {
    "rank 1": Tenant(LoraSpec(1, alpha=2, seed=1), "cross_entropy", (5, 33), clip_norm=3.0),
    "rank 5": Tenant(LoraSpec(5, alpha=7.5, seed=2), "importance_sampling", (17,), weight_decay=0.1),
    "rank 8": Tenant(
        LoraSpec(8, alpha=16, seed=3), "ppo", (9, 9, 24), config={"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
    ),
    "attention": Tenant(LoraSpec(16, alpha=32, seed=4, train_mlp=False), "cispo", (40,), clip_norm=1.0),
    "mlp": Tenant(LoraSpec(16, alpha=32, seed=5, train_attn=False), "dro", (12, 12), config={"beta": 0.2}),
    "with head": Tenant(LoraSpec(32, alpha=32, seed=6, train_unembed=True), "gspo", (21, 8, 30), weight_decay=0.05),
    "rank 100": Tenant(LoraSpec(100, alpha=50, seed=7), "cross_entropy", (11,), width=3),
    "head alone": Tenant(
        LoraSpec(8, seed=8, train_attn=False, train_mlp=False, train_unembed=True), "ppo", (1, 64), token_clips=True
    ),
}
ALL = list(TENANTS)


def request(name: str, base: PreTrainedModel, step: int) -> TrainItem:
    """Return the tenant's request at a step. Each step has other data."""
    tenant, number = TENANTS[name], ALL.index(name)
    data = [
        random_datum(base, tenant.loss, length, seed=1000 * step + 10 * number + index, width=tenant.width)
        for index, length in enumerate(tenant.lengths)
    ]
    if tenant.token_clips:
        rng = np.random.default_rng(step)
        data = [
            replace(
                datum,
                extras={
                    **datum.extras,
                    "clip_low_threshold": rng.uniform(0.6, 0.9, len(datum.tokens)).astype(np.float32),
                    "clip_high_threshold": rng.uniform(1.1, 1.5, len(datum.tokens)).astype(np.float32),
                },
            )
            for datum in data
        ]
    return TrainItem(name, data, tenant.loss, tenant.config)


def adam(name: str, step: int) -> AdamParams:
    """Return Adam parameters that differ for each tenant and each step."""
    tenant, number = TENANTS[name], ALL.index(name)
    return AdamParams(
        learning_rate=1e-3 * (1 + number) / (1 + step),
        beta1=0.9 - 0.02 * step,
        beta2=0.95 + 0.01 * step,
        eps=0.1 + 0.05 * step,
        weight_decay=tenant.weight_decay,
        grad_clip_norm=tenant.clip_norm,
    )


@dataclass(frozen=True)
class Step:
    logprobs: list[NDArray[np.float32]]
    loss: float
    gradients: Arrays
    norm: float
    weights: Arrays  # after the step


History = Mapping[str, list[Step]]  # tenant → its steps


def train(
    trainer: Trainer, names: Sequence[str], base: PreTrainedModel, adam: Callable[[str, int], AdamParams] = adam
) -> History:
    """Train all tenants together, one call for each step."""
    for name in names:
        trainer.create_adapter(name, TENANTS[name].spec)
    history: dict[str, list[Step]] = {name: [] for name in names}
    for step in range(STEPS):
        results = trainer.forward_backward([request(name, base, step) for name in names])
        for name, result in zip(names, results, strict=True):
            assert isinstance(result, TrainResult), result
            gradients = trainer.gradients(name)
            norm = trainer.optim_step(name, adam(name, step))["unclipped_grad_l2:mean"]
            weights = trainer.weights(name)
            history[name].append(Step(result.logprobs, result.metrics["loss:sum"], gradients, norm, weights))
    return history


def train_reference(
    name: str, base: PreTrainedModel, initial: Arrays, adam: Callable[[str, int], AdamParams] = adam
) -> list[Step]:
    reference, steps = Reference(base, TENANTS[name].spec, initial), []
    for step in range(STEPS):
        result = reference.forward_backward(request(name, base, step))
        gradients = reference.gradients()
        norm = reference.optim_step(adam(name, step))
        steps.append(Step(result.logprobs, result.loss, gradients, norm, reference.weights()))
    return steps


def assert_same(ours: Sequence[Step], theirs: Sequence[Step]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert_logprobs_close(left.logprobs, right.logprobs)
        assert_numbers_close(left.loss, right.loss)
        assert_tensors_close(left.gradients, right.gradients)
        assert_numbers_close(left.norm, right.norm)
        assert_tensors_close(left.weights, right.weights)


@cache
def plain_model(model: str) -> PreTrainedModel:
    return MODELS[model]()


@cache
def initial_weights(model: str, name: str, make_trainer: MakeTrainer) -> Arrays:
    trainer = make_trainer(plain_model(model))
    trainer.create_adapter(name, TENANTS[name].spec)
    return trainer.weights(name)


@cache
def in_company(model: str, make_trainer: MakeTrainer) -> History:
    return train(make_trainer(plain_model(model)), ALL, plain_model(model))


# --- alone, together with others, and PEFT ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("model", MODELS)
def test_in_company_of_seven_equals_peft(model: str, name: str, make_trainer: MakeTrainer) -> None:
    theirs = train_reference(name, plain_model(model), initial_weights(model, name, make_trainer))
    assert_same(in_company(model, make_trainer)[name], theirs)
    assert relative_error(*(np.concatenate([w.ravel() for w in s.weights.values()]) for s in theirs[:2])) > 1e-4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("model", MODELS)
def test_alone_equals_in_company(model: str, name: str, make_trainer: MakeTrainer) -> None:
    alone = train(make_trainer(plain_model(model)), [name], plain_model(model))
    assert_same(in_company(model, make_trainer)[name], alone[name])


@pytest.mark.parametrize("model", MODELS)
def test_another_order_and_other_slots_change_nothing(model: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plain_model(model))
    for number in range(3):  # these take the first slots of the busiest stack
        trainer.create_adapter(f"other {number}", LoraSpec(7, seed=number))
        trainer.forward([replace(request("rank 8", plain_model(model), 0), adapter_id=f"other {number}")])
    history = train(trainer, ALL[::-1], plain_model(model))
    for name in ALL:
        assert_same(history[name], in_company(model, make_trainer)[name])


@pytest.mark.parametrize("name", ["rank 1", "rank 100"])
def test_the_default_eps(name: str, make_trainer: MakeTrainer) -> None:
    """Losses and log-probabilities still agree to 1e-5, weights except for flipped signs; see the top of this file."""

    def params(name: str, step: int) -> AdamParams:
        return AdamParams(learning_rate=1e-3)

    base = plain_model("wide")
    ours = train(make_trainer(base), ALL, base, params)[name]
    theirs = train_reference(name, base, initial_weights("wide", name, make_trainer), params)
    for left, right in zip(ours, theirs, strict=True):
        assert_logprobs_close(left.logprobs, right.logprobs)
        assert_numbers_close(left.loss, right.loss)
        assert_tensors_close(left.weights, right.weights, tolerance=5e-2)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's advice on merging
@pytest.mark.parametrize("model", MODELS)
def test_tied_embeddings_train_the_output_side_only(model: str, make_trainer: MakeTrainer) -> None:
    base = MODELS[model](tie_word_embeddings=True)
    assert base.lm_head.weight is base.model.embed_tokens.weight
    name = "with head"
    ours = train(make_trainer(base), [name, "rank 5"], base)[name]
    assert_same(ours, train_reference(name, base, initial_weights(model, name, make_trainer)))


BF16 = 1e-2  # for losses and log-probabilities; gradients may differ five times as much


@cache
def half_model() -> PreTrainedModel:
    """Half as wide as the wide model, whose products of 64 rows take 0.3 s on CPUs without bf16 instructions."""
    return wide_llama(hidden_size=256, intermediate_size=512, vocab_size=500).to(torch.bfloat16)


def one_pass(
    base: PreTrainedModel, names: Sequence[str], make_trainer: MakeTrainer
) -> dict[str, tuple[TrainResult, Arrays]]:
    """Return the result and the gradients of each tenant after one pass of all."""
    trainer = make_trainer(base)
    for tenant in names:
        trainer.create_adapter(tenant, TENANTS[tenant].spec)
        trainer.restore(tenant, with_random_weights(trainer, tenant, size=0.02))
    results = trainer.forward_backward([request(tenant, base, 0) for tenant in names])
    return {tenant: (result, trainer.gradients(tenant)) for tenant, result in zip(names, results, strict=True)}


@cache
def bf16_in_company(make_trainer: MakeTrainer) -> dict[str, tuple[TrainResult, Arrays]]:
    return one_pass(copy.deepcopy(half_model()), ALL, make_trainer)


@pytest.mark.parametrize("name", ["rank 1", "rank 5", "mlp", "rank 100"])
def test_bf16_stays_near_fp32_alone_and_in_company(name: str, make_trainer: MakeTrainer) -> None:
    """Compare with fp32 on the same rounded weights.

    There are no clipped losses, because a ratio near its bound may jump.
    """
    alone = one_pass(copy.deepcopy(half_model()), [name], make_trainer)
    exact, exact_gradients = one_pass(copy.deepcopy(half_model()).float(), [name], make_trainer)[name]
    for result, gradients in (alone[name], bf16_in_company(make_trainer)[name]):
        for ours, theirs in zip(result.logprobs, exact.logprobs, strict=True):
            assert_numbers_close(ours, theirs, BF16)
        assert_numbers_close(result.metrics["loss:sum"], exact.metrics["loss:sum"], BF16)
        assert_tensors_close(gradients, exact_gradients, 5 * BF16)


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "tokens"), [("toy", 1), ("toy", 40), ("toy", 100), ("wide", 40), ("wide", 100)])
def test_micro_batches_equal_the_whole(model: str, tokens: int, make_trainer: MakeTrainer) -> None:
    """Down to one sequence per batch. Sequences longer than the budget are recomputed in the backward pass."""
    base = plain_model(model)
    trainer = make_trainer(base, max_tokens_per_batch=tokens)
    batches = count_batches(trainer)
    history = train(trainer, ALL, base)
    assert len(batches) > STEPS
    for name in ALL:
        assert_same(history[name], in_company(model, make_trainer)[name])


def count_batches(trainer: Trainer) -> list[bool]:
    """Return a list to which each training batch appends its ``recompute``."""
    calls: list[bool] = []
    inner = trainer._engine.forward_backward

    def counted(parts: object, *, recompute: bool, give_way: object = None) -> object:
        calls.append(recompute)
        return inner(parts, recompute=recompute)

    trainer._engine.forward_backward = counted
    return calls


@pytest.mark.parametrize("model", MODELS)
def test_recomputed_activations_equal_kept_ones(model: str, make_trainer: MakeTrainer) -> None:
    """Both use the same batch, so the bits are equal."""
    base = plain_model(model)
    names = ["rank 5", "with head"]
    items = [replace(request(name, base, 0), data=request(name, base, 0).data[:1]) for name in names]
    outcomes = []
    for tokens, recompute in ((None, False), (8, True)):  # both sequences are longer than 8 tokens
        trainer = make_trainer(base, max_tokens_per_batch=tokens)
        for name in names:
            trainer.create_adapter(name, TENANTS[name].spec)
            trainer.restore(name, with_random_weights(trainer, name))
        batches, layer_calls = count_batches(trainer), count_layer_calls(trainer)
        results = trainer.forward_backward(items)
        assert batches == [recompute]
        assert len(layer_calls) == (2 if recompute else 1)
        outcomes.append((results, [trainer.gradients(name) for name in names]))
    (kept, kept_gradients), (recomputed, recomputed_gradients) = outcomes
    for left, right in zip(recomputed, kept, strict=True):
        np.testing.assert_array_equal(left.logprobs[0], right.logprobs[0])
        assert left.metrics == right.metrics
    for left, right in zip(recomputed_gradients, kept_gradients, strict=True):
        for key in right:
            np.testing.assert_array_equal(left[key], right[key])


def count_layer_calls(trainer: Trainer) -> list[None]:
    """Return a list that grows each time the first decoder layer runs."""
    calls: list[None] = []
    projection = trainer._engine.layers[0].inner.self_attn.q_proj
    projection.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    return calls


@pytest.mark.parametrize("tokens", [None, 8])
def test_no_adapter_stays_bound_to_a_layer_after_a_batch(tokens: int | None, make_trainer: MakeTrainer) -> None:
    """Otherwise its weights, and the activations that refer to them, would outlive the batch."""
    trainer = make_trainer(max_tokens_per_batch=tokens)
    trainer.create_adapter("rank 5", TENANTS["rank 5"].spec)
    trainer.forward_backward([request("rank 5", toy_llama(), 0)])
    bound = [linear.name for layer in trainer._engine.layers for linear in layer.linears if linear.lora is not None]
    assert bound == []


@pytest.mark.parametrize("model", MODELS)
def test_packed_equals_padded(model: str, make_trainer: MakeTrainer) -> None:
    """Compares the log-probabilities and gradients of a packed batch with the plain model, padded and masked."""
    base = plain_model(model)
    data = [random_datum(base, "cross_entropy", length, seed=length) for length in (7, 1, 30, 13, 13)]
    trainer = make_trainer(base)
    spec = LoraSpec(8, alpha=8, seed=0, train_unembed=True)
    trainer.create_adapter("a", spec)
    trainer.restore("a", with_random_weights(trainer, "a"))
    (result,) = trainer.forward_backward([TrainItem("a", data)])
    reference = Reference(base, spec, trainer.weights("a"))
    expected = padded_logprobs(reference.model, data)
    sum(-(torch.from_numpy(d.weights) * lp).sum() for d, lp in zip(data, expected, strict=True)).backward()
    assert_logprobs_close(result.logprobs, [lp.detach().numpy() for lp in expected])
    assert_tensors_close(trainer.gradients("a"), reference.gradients())


@pytest.mark.parametrize("model", MODELS)
def test_any_chunk_of_the_head_gives_the_same(model: str, make_trainer: MakeTrainer) -> None:
    """All requests go through the trainer; test_head.py compares the head alone with full logits."""
    base = plain_model(model)
    trainer = make_trainer(base)
    for name in ALL:
        trainer.create_adapter(name, TENANTS[name].spec)
        trainer.restore(name, with_random_weights(trainer, name, size=0.02))
    outcomes = []
    for rows in (1000, 16, 7, 1):
        trainer._engine.head.chunk_rows = rows
        results = trainer.forward_backward([request(name, base, 0) for name in ALL])
        outcomes.append((results, [trainer.gradients(name) for name in ALL]))
        for name in ALL:
            trainer.zero_grad(name)
    (whole, whole_gradients), *chunked = outcomes
    for results, gradients in chunked:
        for ours, theirs in zip(results, whole, strict=True):
            assert_logprobs_close(ours.logprobs, theirs.logprobs)
            assert_numbers_close(ours.metrics["loss:sum"], theirs.metrics["loss:sum"])
        for ours, theirs in zip(gradients, whole_gradients, strict=True):
            assert_tensors_close(ours, theirs)


# --- sums -------------------------------------------------------------------------------------------------------------


def gradients_of(trainer: Trainer, calls: Sequence[Sequence[TrainItem]]) -> Arrays:
    """Return the gradient of adapter "a" after several calls."""
    for items in calls:
        assert all(isinstance(result, TrainResult) for result in trainer.forward_backward(items))
    gradients = trainer.gradients("a")
    trainer.zero_grad("a")
    return gradients


@pytest.mark.parametrize("model", MODELS)
def test_requests_calls_and_data_of_one_adapter_add_up(model: str, make_trainer: MakeTrainer) -> None:
    base = plain_model(model)
    trainer = make_trainer(base)
    trainer.create_adapter("a", LoraSpec(8, seed=0, train_unembed=True))
    trainer.create_adapter("b", LoraSpec(8, seed=1, train_unembed=True))
    trainer.restore("a", with_random_weights(trainer, "a", size=0.02))
    supervised = [random_datum(base, "cross_entropy", length, seed=length) for length in (9, 20)]
    sampled = [random_datum(base, "gspo", length, seed=length) for length in (15, 6)]
    one, two = TrainItem("a", supervised), TrainItem("a", sampled, "gspo")
    parts = [gradients_of(trainer, [[one]]), gradients_of(trainer, [[two]])]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert_tensors_close(gradients_of(trainer, [[one, two]]), total)
    assert_tensors_close(gradients_of(trainer, [[one], [two]]), total)
    assert_tensors_close(gradients_of(trainer, [[two, TrainItem("b", supervised), one]]), total)
    pieces = [TrainItem("a", [datum]) for datum in supervised] + [TrainItem("a", [datum], "gspo") for datum in sampled]
    assert_tensors_close(gradients_of(trainer, [pieces]), total)
    assert_tensors_close(gradients_of(trainer, [[piece] for piece in pieces]), total)


def test_forward_scores_like_training_and_leaves_no_gradient(make_trainer: MakeTrainer) -> None:
    base = plain_model("wide")
    trainer = make_trainer(base)
    for name in ALL:
        trainer.create_adapter(name, TENANTS[name].spec)
        trainer.restore(name, with_random_weights(trainer, name, size=0.02))
    items = [request(name, base, 0) for name in ALL]
    scored = trainer.forward(items)
    assert all(trainer.gradients(name) == {} for name in ALL)
    for name in ALL:
        assert trainer.optim_step(name, AdamParams()) == {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    trained = trainer.forward_backward(items)
    for left, right in zip(scored, trained, strict=True):
        assert_logprobs_close(left.logprobs, right.logprobs)
        assert left.metrics.keys() == right.metrics.keys()
        assert_numbers_close(list(left.metrics.values()), list(right.metrics.values()))
