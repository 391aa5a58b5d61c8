"""A tenant's bad request fails alone and changes no state, and a removed adapter leaves nothing to the next one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.models.reference import (
    assert_tensors_close,
    random_datum,
    toy_llama,
    used_parameters,
    wide_llama,
    with_random_weights,
)
from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidInputError,
    NonFiniteError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.model import (
    AdamParams,
    AdapterSnapshot,
    Datum,
    LoraSpec,
    Trainer,
    TrainFailure,
    TrainItem,
    TrainResult,
)

MakeTrainer = Callable[..., Trainer]

BASE = toy_llama()
VOCAB, LONGEST = BASE.config.vocab_size, BASE.config.max_position_embeddings
ADAPTERS = {
    "a": LoraSpec(8, seed=0),
    "b": LoraSpec(4, seed=1),
    "c": LoraSpec(16, seed=2, train_unembed=True),
    "bad": LoraSpec(8, seed=3),
}


def datum(length: int = 12, loss: str = "cross_entropy", seed: int = 0) -> Datum:
    return random_datum(BASE, loss, length, seed)


def policy_datum(**extras: object) -> Datum:
    """Return a datum for ppo. ``extras`` replace or add inputs; None removes one."""
    good = datum(loss="ppo")
    return replace(good, extras={k: v for k, v in {**good.extras, **extras}.items() if v is not None})


def company() -> list[TrainItem]:
    return [
        TrainItem("a", [datum(20, seed=1), datum(7, seed=2)]),
        TrainItem("b", [datum(15, "ppo", seed=3)], "ppo"),
        TrainItem("c", [datum(9, "gspo", seed=4), datum(9, "gspo", seed=5)], "gspo"),
    ]


@cache
def shared_trainer(make_trainer: MakeTrainer, tokens: int | None) -> tuple[Trainer, dict[str, AdapterSnapshot]]:
    trainer = make_trainer(BASE, max_tokens_per_batch=tokens)
    for adapter_id, spec in ADAPTERS.items():
        trainer.create_adapter(adapter_id, spec)
        trainer.restore(adapter_id, with_random_weights(trainer, adapter_id, size=0.02))
    items = [TrainItem(adapter_id, [datum(10, seed=9)]) for adapter_id in ADAPTERS]
    trainer.forward_backward(items)
    for adapter_id in ADAPTERS:
        trainer.optim_step(adapter_id, AdamParams())
    trainer.forward_backward(items)
    return trainer, states(trainer)


def trained(make_trainer: MakeTrainer, tokens: int | None = None) -> Trainer:
    """Return a trainer whose adapters have weights, Adam state, an open window's gradient, and always the same slots.

    It is always the same trainer, restored to the same state, so anything that a failed request left behind would show
    in the bits of the next test.
    """
    trainer, snapshots = shared_trainer(make_trainer, tokens)
    for adapter_id in trainer.adapter_ids():
        trainer.remove_adapter(adapter_id)
    for adapter_id, snapshot in snapshots.items():
        trainer.restore(adapter_id, snapshot)
        trainer.forward([TrainItem(adapter_id, [datum(3)])])
    return trainer


def states(trainer: Trainer) -> dict[str, AdapterSnapshot]:
    return {adapter_id: trainer.snapshot(adapter_id) for adapter_id in trainer.adapter_ids()}


def assert_same_state(left: AdapterSnapshot, right: AdapterSnapshot) -> None:
    """Compare bit by bit."""
    assert (left.spec, left.step, left.layout) == (right.spec, right.step, right.layout)
    for name in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


def assert_same_states(left: Mapping[str, AdapterSnapshot], right: Mapping[str, AdapterSnapshot]) -> None:
    assert left.keys() == right.keys()
    for adapter_id in right:
        assert_same_state(left[adapter_id], right[adapter_id])


def assert_same_results(left: Sequence[object], right: Sequence[object]) -> None:
    """Compare bit by bit."""
    for ours, theirs in zip(left, right, strict=True):
        assert isinstance(ours, TrainResult), ours
        assert isinstance(theirs, TrainResult), theirs
        assert ours.metrics == theirs.metrics
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_array_equal(a, b)


# --- invalid requests -------------------------------------------------------------------------------------------------

NAN = np.full(12, np.nan, np.float32)
ONES = np.ones(12, np.float32)
TOKENS = np.arange(12)

# name → (the request, the error, a word in its message)
INVALID: Mapping[str, tuple[TrainItem, type[TwinkleError], str]] = {
    "no data": (TrainItem("bad", []), InvalidInputError, "data"),
    "data is None": (TrainItem("bad", None), InvalidInputError, "data"),
    "a datum is None": (TrainItem("bad", [datum(), None]), InvalidInputError, r"data\[1\]"),
    "unknown adapter": (TrainItem("nobody", [datum()]), AdapterNotFoundError, "adapter_id.*nobody"),
    "unknown loss": (TrainItem("bad", [datum()], "mse"), UnknownNameError, "loss 'mse'; known: .*ppo"),
    "a loss of the protocol": (TrainItem("bad", [datum()], "custom"), UnsupportedError, "custom"),
    "unknown config key": (
        TrainItem("bad", [policy_datum()], "ppo", {"epsilon": 0.2}),
        UnknownNameError,
        "'epsilon'; known: clip_high_threshold",
    ),
    "config value NaN": (
        TrainItem("bad", [datum(loss="dro")], "dro", {"beta": math.nan}),
        InvalidInputError,
        r"loss_config\.beta",
    ),
    "config out of order": (
        TrainItem("bad", [policy_datum()], "ppo", {"clip_low_threshold": 3.0}),
        InvalidInputError,
        r"loss_config\.clip_low_threshold",
    ),
    "token out of range": (
        TrainItem("bad", [datum(), replace(datum(), tokens=TOKENS + VOCAB - 11)]),
        InvalidInputError,
        rf"data\[1\]\.tokens: got {VOCAB}, allowed: .*{VOCAB}",
    ),
    "negative token": (
        TrainItem("bad", [replace(datum(), tokens=TOKENS - 1)]),
        InvalidInputError,
        r"data\[0\]\.tokens: got -1",
    ),
    "target out of range": (
        TrainItem("bad", [replace(datum(), targets=TOKENS + VOCAB)]),
        InvalidInputError,
        r"data\[0\]\.targets: got",
    ),
    "negative target": (
        TrainItem("bad", [replace(datum(), targets=-TOKENS)]),
        InvalidInputError,
        r"data\[0\]\.targets: got -11",
    ),
    "float tokens": (
        TrainItem("bad", [replace(datum(), tokens=TOKENS * 1.0)]),
        InvalidInputError,
        r"data\[0\]\.tokens",
    ),
    "bool tokens": (TrainItem("bad", [replace(datum(), tokens=TOKENS > 3)]), InvalidInputError, r"data\[0\]\.tokens"),
    "text for tokens": (TrainItem("bad", [replace(datum(), tokens="hello")]), InvalidInputError, r"data\[0\]\.tokens"),
    "no tokens": (TrainItem("bad", [replace(datum(), tokens=None)]), InvalidInputError, r"data\[0\]\.tokens"),
    "empty tokens": (
        TrainItem("bad", [Datum(np.zeros(0, np.int64), np.zeros(0, np.int64))]),
        InvalidInputError,
        r"data\[0\]\.tokens",
    ),
    "2-d tokens": (
        TrainItem("bad", [replace(datum(), tokens=TOKENS.reshape(3, 4))]),
        InvalidInputError,
        r"data\[0\]\.tokens: got .*\(3, 4\)",
    ),
    "ragged tokens": (
        TrainItem("bad", [replace(datum(), tokens=[[1, 2], [3]])]),
        InvalidInputError,
        r"data\[0\]\.tokens",
    ),
    "float targets": (TrainItem("bad", [replace(datum(), targets=ONES)]), InvalidInputError, r"data\[0\]\.targets"),
    "3-d targets": (
        TrainItem("bad", [Datum(TOKENS, np.zeros((12, 2, 2), np.int64))]),
        InvalidInputError,
        r"data\[0\]\.targets: got .*\(12, 2, 2\)",
    ),
    "targets without columns": (
        TrainItem("bad", [Datum(TOKENS, np.zeros((12, 0), np.int64))]),
        InvalidInputError,
        r"data\[0\]\.targets: got .*\(12, 0\)",
    ),
    "ragged targets": (
        TrainItem("bad", [replace(datum(), targets=[[1, 2]] * 11 + [[3]])]),
        InvalidInputError,
        r"data\[0\]\.targets",
    ),
    "2-d targets where the loss has none": (
        TrainItem("bad", [replace(policy_datum(), targets=np.zeros((12, 2), np.int64))], "ppo"),
        InvalidInputError,
        r"data\[0\]\.targets: .*'ppo'",
    ),
    "fewer targets than tokens": (
        TrainItem("bad", [replace(datum(), targets=TOKENS[:-1])]),
        InvalidInputError,
        r"data\[0\]\.targets: got .*\(11,\).*12",
    ),
    "NaN weight": (
        TrainItem("bad", [replace(datum(), weights=NAN)]),
        InvalidInputError,
        r"data\[0\]\.weights: got nan, allowed: finite",
    ),
    "infinite weight": (
        TrainItem("bad", [replace(datum(), weights=ONES * np.inf)]),
        InvalidInputError,
        r"data\[0\]\.weights: got inf",
    ),
    "weight beyond fp32": (
        TrainItem("bad", [replace(datum(), weights=np.full(12, 1e300))]),
        InvalidInputError,
        r"data\[0\]\.weights",
    ),
    "complex weights": (
        TrainItem("bad", [replace(datum(), weights=ONES * 1j)]),
        InvalidInputError,
        r"data\[0\]\.weights",
    ),
    "weights of another length": (
        TrainItem("bad", [replace(datum(), weights=ONES[:-1])]),
        InvalidInputError,
        r"data\[0\]\.weights: got .*\(11,\)",
    ),
    "ragged weights": (
        TrainItem("bad", [replace(datum(), weights=[[0.5], [0.5, 0.5]])]),
        InvalidInputError,
        r"data\[0\]\.weights",
    ),
    "missing advantages": (
        TrainItem("bad", [policy_datum(advantages=None)], "ppo"),
        InvalidInputError,
        r"data\[0\]\.advantages: .*'ppo' needs it",
    ),
    "missing logprobs": (
        TrainItem("bad", [policy_datum(logprobs=None)], "importance_sampling"),
        InvalidInputError,
        r"data\[0\]\.logprobs",
    ),
    "missing mask": (
        TrainItem("bad", [policy_datum()], "gspo"),
        InvalidInputError,
        r"data\[0\]\.sequence_ratio_mask: .*'gspo' needs it",
    ),
    "NaN advantages": (
        TrainItem("bad", [policy_datum(advantages=NAN)], "cispo"),
        InvalidInputError,
        r"data\[0\]\.advantages: got nan",
    ),
    "logprobs of another shape": (
        TrainItem("bad", [policy_datum(logprobs=np.zeros((12, 1), np.float32))], "dro"),
        InvalidInputError,
        r"data\[0\]\.logprobs: got .*\(12, 1\)",
    ),
    "NaN clip bounds": (
        TrainItem("bad", [policy_datum(clip_low_threshold=NAN)], "ppo"),
        InvalidInputError,
        r"data\[0\]\.clip_low_threshold",
    ),
    "clip bounds out of order": (
        TrainItem("bad", [policy_datum(clip_low_threshold=ONES * 1.5, clip_high_threshold=ONES)], "ppo"),
        InvalidInputError,
        r"data\[0\]\.clip_low_threshold: got 1\.5",
    ),
    "too long": (
        TrainItem("bad", [datum(LONGEST), Datum(np.zeros(LONGEST + 1, np.int64), np.zeros(LONGEST + 1, np.int64))]),
        InvalidInputError,
        rf"data\[1\]\.tokens: .*{LONGEST}",
    ),
}


@cache
def without_it(method: str, make_trainer: MakeTrainer) -> tuple[list[object], dict[str, AdapterSnapshot]]:
    trainer = trained(make_trainer)
    return getattr(trainer, method)(company()), states(trainer)


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("method", ["forward_backward", "forward"])
def test_an_invalid_request_fails_alone(name: str, method: str, make_trainer: MakeTrainer) -> None:
    """At any position in the call, the other requests get the same bits as in a call without it."""
    item, error_type, message = INVALID[name]
    expected, expected_states = without_it(method, make_trainer)
    for position in (0, 2, 3) if method == "forward_backward" else (1,):
        trainer = trained(make_trainer)
        items = company()
        items.insert(position, item)
        results = getattr(trainer, method)(items)
        failure = results.pop(position)
        assert isinstance(failure, TrainFailure)
        with pytest.raises(error_type, match=message):
            raise failure.error
        assert_same_results(results, expected)
        assert_same_states(states(trainer), expected_states)


def test_a_call_of_invalid_requests_only(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    before = states(trainer)
    results = trainer.forward_backward([item for item, _, _ in INVALID.values()])
    assert all(isinstance(result, TrainFailure) for result in results)
    assert trainer.forward_backward([]) == []
    assert_same_states(states(trainer), before)


def test_a_bad_request_takes_nothing_from_a_good_one_of_the_same_adapter(make_trainer: MakeTrainer) -> None:
    item = TrainItem("a", [datum(20, seed=1)])
    trainer = trained(make_trainer)
    expected, expected_states = trainer.forward_backward([item]), states(trainer)
    trainer = trained(make_trainer)
    good, bad = trainer.forward_backward([item, TrainItem("a", [replace(datum(), weights=NAN)])])
    assert isinstance(bad, TrainFailure)
    assert_same_results([good], expected)
    assert_same_states(states(trainer), expected_states)


def test_inputs_are_left_as_they_were(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    items = company()
    arrays = [
        array
        for item in items
        for d in item.data
        for array in (d.tokens, d.targets, d.weights, *d.extras.values())
        if array is not None
    ]
    for array in arrays:
        array.flags.writeable = False
    copies = [array.copy() for array in arrays]
    results = trainer.forward_backward(items)
    assert all(isinstance(result, TrainResult) for result in results)
    for array, before in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, before)


def test_python_lists_and_narrow_integers_are_taken_as_arrays(make_trainer: MakeTrainer) -> None:
    plain = datum(9)
    listed = Datum(plain.tokens.tolist(), plain.targets.astype(np.int16), plain.weights.tolist())
    trainer = trained(make_trainer)
    expected, result = trainer.forward([TrainItem("a", [plain]), TrainItem("a", [listed])])
    np.testing.assert_allclose(result.logprobs[0], expected.logprobs[0], rtol=1e-6)
    assert result.metrics == pytest.approx(expected.metrics)


# --- requests that become NaN or infinite during computation ----------------------------------------------------------


def ruin(trainer: Trainer, adapter_id: str, value: float) -> None:
    """Put ``value`` into all weights of an adapter."""
    snapshot, used = trainer.snapshot(adapter_id), used_parameters(trainer, adapter_id)
    trainer.restore(adapter_id, replace(snapshot, weights=np.where(used, value, 0).astype(np.float32)))


def infinite_weights(trainer: Trainer) -> TrainItem:
    ruin(trainer, "bad", np.inf)
    return TrainItem("bad", [datum(14, seed=6)])


def nan_weights(trainer: Trainer) -> TrainItem:
    ruin(trainer, "bad", np.nan)
    return TrainItem("bad", [datum(14, seed=6)])


def restored(trainer: Trainer) -> TrainItem:
    """Return a finite request.

    Its adapter is restored as in the two functions above, so that all adapters have the same slots.
    """
    trainer.restore("bad", trainer.snapshot("bad"))
    return TrainItem("bad", [datum(14, seed=6)])


def huge_step(trainer: Trainer) -> TrainItem:
    trainer.optim_step("bad", AdamParams(learning_rate=1e30))
    return TrainItem("bad", [datum(14, seed=6)])


def huge_ratio(trainer: Trainer) -> TrainItem:
    tokens = datum(14, "importance_sampling", seed=6)
    extras = {"logprobs": np.full(14, -80, np.float32), "advantages": np.full(14, 3e38, np.float32)}
    return TrainItem("bad", [replace(tokens, extras=extras)], "importance_sampling")


def huge_weights(trainer: Trainer) -> TrainItem:
    """Return a request whose loss terms are finite, but whose gradient is not."""
    return TrainItem("bad", [replace(datum(14, seed=6), weights=np.full(14, 3e37, np.float32))])


def finite(trainer: Trainer) -> TrainItem:
    return TrainItem("bad", [datum(14, seed=6)])


def finite_policy(trainer: Trainer) -> TrainItem:
    return TrainItem("bad", [datum(14, "importance_sampling", seed=6)], "importance_sampling")


NON_FINITE: Mapping[str, tuple[Callable[[Trainer], TrainItem], Callable[[Trainer], TrainItem]]] = {
    "infinite weights": (infinite_weights, restored),
    "NaN weights": (nan_weights, restored),
    "huge step": (huge_step, finite),
    "huge ratio": (huge_ratio, finite_policy),
    "huge loss weights": (huge_weights, finite),
}


@pytest.mark.parametrize("tokens", [None, 30])
@pytest.mark.parametrize("name", NON_FINITE)
def test_a_request_that_turns_non_finite_fails_alone(name: str, tokens: int | None, make_trainer: MakeTrainer) -> None:
    """The other requests get the bits of the same call with finite data of the same shape.

    The bad adapter is unchanged.
    """
    make_bad, make_finite = NON_FINITE[name]
    for position in (0, 1, 3):
        outcomes = []
        for make in (make_bad, make_finite):
            trainer = trained(make_trainer, tokens)
            items = company()
            items.insert(position, make(trainer))
            before = trainer.snapshot("bad")
            results = trainer.forward_backward(items)
            own = results.pop(position)
            outcomes.append((own, results, before, states(trainer)))
        (failure, results, before, after), (success, expected, _, expected_after) = outcomes
        assert isinstance(failure, TrainFailure)
        assert isinstance(failure.error, NonFiniteError)
        assert isinstance(success, TrainResult)
        assert_same_results(results, expected)
        assert_same_state(after.pop("bad"), before)
        expected_after.pop("bad")
        assert_same_states(after, expected_after)


@pytest.mark.parametrize("name", ["infinite weights", "NaN weights", "huge step", "huge ratio"])
def test_scoring_turns_non_finite_alone(name: str, make_trainer: MakeTrainer) -> None:
    make_bad, make_finite = NON_FINITE[name]
    outcomes = []
    for make in (make_bad, make_finite):
        trainer = trained(make_trainer)
        outcomes.append(trainer.forward([make(trainer), *company()]))
    assert isinstance(outcomes[0][0], TrainFailure)
    assert isinstance(outcomes[0][0].error, NonFiniteError)
    assert_same_results(outcomes[0][1:], outcomes[1][1:])


@pytest.mark.parametrize("tokens", [None, 30])
def test_a_non_finite_request_next_to_a_good_one_of_the_same_adapter(
    tokens: int | None, make_trainer: MakeTrainer
) -> None:
    good = TrainItem("bad", [datum(11, "importance_sampling", seed=7)], "importance_sampling")
    outcomes = []
    for make in (huge_ratio, finite_policy):
        trainer = trained(make_trainer, tokens)
        results = trainer.forward_backward([make(trainer), good])
        outcomes.append((results, trainer.gradients("bad")))
    (results, gradients), (expected, _) = outcomes
    assert isinstance(results[0], TrainFailure)
    assert_same_results(results[1:], expected[1:])
    trainer = trained(make_trainer)
    before = trainer.gradients("bad")
    trainer.forward_backward([good])
    assert_tensors_close(gradients, trainer.gradients("bad"))
    assert all((gradients[name] != before[name]).any() for name in before)


def test_one_non_finite_sequence_fails_its_whole_request(make_trainer: MakeTrainer) -> None:
    """Also if its sequences are computed in different micro-batches."""
    for tokens in (None, 16):
        trainer = trained(make_trainer, tokens)
        before = states(trainer)
        item = huge_ratio(trainer)
        fine = datum(14, "importance_sampling", seed=8)
        for data in ([fine, *item.data], [*item.data, fine], [fine, *item.data, fine]):
            (failure,) = trainer.forward_backward([replace(item, data=data)])
            assert isinstance(failure, TrainFailure)
            assert isinstance(failure.error, NonFiniteError)
            assert_same_states(states(trainer), before)


def test_gradients_that_overflow_in_their_sum_fail_too(make_trainer: MakeTrainer) -> None:
    """The gradient of each micro-batch is finite, but the sum is not: none of it may reach the adapter."""
    trainer = make_trainer(BASE, max_tokens_per_batch=6)
    trainer.create_adapter("a", LoraSpec(1, seed=0, target_modules=["layers.1.mlp.down_proj"]))
    trainer.restore("a", with_random_weights(trainer, "a"))
    part = replace(datum(6), weights=np.ones(6))
    trainer.forward_backward([TrainItem("a", [part])])
    total = sum(np.abs(gradient).sum() for gradient in trainer.gradients("a").values())
    part = replace(part, weights=np.full(6, 3e38 / total))
    (result,) = trainer.forward_backward([TrainItem("a", [part])])
    assert isinstance(result, TrainResult)
    before = states(trainer)
    (result,) = trainer.forward_backward([TrainItem("a", [part] * used_parameters(trainer, "a").sum())])
    assert isinstance(result, TrainFailure)
    assert isinstance(result.error, NonFiniteError)
    assert_same_states(states(trainer), before)


def test_a_window_whose_gradients_overflow_in_their_sum_takes_no_step(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    snapshot = trainer.snapshot("a")
    trainer.restore("a", replace(snapshot, gradient=np.full_like(snapshot.gradient, np.inf)))
    with pytest.raises(NonFiniteError, match="'a'"):
        trainer.optim_step("a", AdamParams(grad_clip_norm=1.0))
    trainer.zero_grad("a")
    assert_same_state(trainer.snapshot("a"), replace(snapshot, gradient=None))


@pytest.mark.parametrize("kind", ["invalid", "NaN"])
def test_bits_hold_on_a_wide_model_with_threads(kind: str, make_trainer: MakeTrainer, two_threads: None) -> None:
    """Uses a wide model: toy models can be bit-equal where real models are not."""
    base = wide_llama()
    lengths = {"a": (33, 8), "b": (50,), "c": (21, 21), "bad": (40,)}
    items = {
        name: TrainItem(name, [random_datum(base, "cross_entropy", n, n) for n in lengths[name]]) for name in lengths
    }
    outcomes = []
    for broken in (True, False):
        trainer = make_trainer(base)
        for name, spec in ADAPTERS.items():
            trainer.create_adapter(name, spec)
            trainer.restore(name, with_random_weights(trainer, name, size=0.02))
        calls = [items["a"], items["bad"], items["b"], items["c"]]
        if kind == "NaN" and broken:
            ruin(trainer, "bad", np.nan)
        elif kind == "invalid" and broken:
            calls[1] = replace(items["bad"], data=[replace(items["bad"].data[0], weights=np.full(40, np.nan))])
        elif kind == "invalid":
            del calls[1]
        results = trainer.forward_backward(calls)
        if kind == "NaN" or broken:
            assert isinstance(results.pop(1), TrainFailure if broken else TrainResult)
        outcomes.append((results, {name: trainer.snapshot(name) for name in "abc"}))
    assert_same_results(outcomes[0][0], outcomes[1][0])
    assert_same_states(outcomes[0][1], outcomes[1][1])


def test_after_a_failure_training_goes_on_as_if_nothing_had_been(make_trainer: MakeTrainer) -> None:
    outcomes = []
    for failures in (True, False):
        trainer = trained(make_trainer)
        if failures:
            bad = [INVALID["NaN weight"][0], huge_ratio(trainer), INVALID["unknown loss"][0]]
            assert all(isinstance(result, TrainFailure) for result in trainer.forward_backward(bad))
        results = trainer.forward_backward(company())
        for adapter_id in ADAPTERS:
            trainer.optim_step(adapter_id, AdamParams(learning_rate=1e-3))
        outcomes.append((results, states(trainer)))
    assert_same_results(outcomes[0][0], outcomes[1][0])
    assert_same_states(outcomes[0][1], outcomes[1][1])


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_a_removed_adapter_leaves_nothing_to_its_successor(make_trainer: MakeTrainer) -> None:
    """The successor gets the same slot in the same stack, with a smaller rank.

    It starts and trains like a first adapter.
    """
    item = TrainItem("new", [datum(16, seed=3)])
    outcomes = []
    for predecessor in (True, False):
        trainer = make_trainer(BASE)
        if predecessor:
            trainer.create_adapter("old", LoraSpec(8, seed=0))
            ruin(trainer, "old", 1e6)
            trainer.forward([TrainItem("old", [datum()])])
            ruin(trainer, "old", np.nan)
            trainer.forward([TrainItem("old", [datum()])])
            trainer.remove_adapter("old")
        trainer.create_adapter("new", LoraSpec(3, seed=1))
        results = trainer.forward_backward([item])
        trainer.optim_step("new", AdamParams(learning_rate=1e-2))
        results += trainer.forward_backward([item])
        outcomes.append((results, states(trainer)))
    assert_same_results(outcomes[0][0], outcomes[1][0])
    assert_same_states(outcomes[0][1], outcomes[1][1])


def test_a_fresh_adapter_of_a_used_name_starts_anew(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    trainer.remove_adapter("a")
    trainer.create_adapter("a", ADAPTERS["a"])
    fresh = make_trainer(BASE)
    fresh.create_adapter("a", ADAPTERS["a"])
    assert_same_state(trainer.snapshot("a"), fresh.snapshot("a"))
    assert trainer.step_count("a") == 0
    assert trainer.gradients("a") == {}


def test_names_of_adapters(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    before = states(trainer)
    with pytest.raises(AdapterExistsError, match="'a' exists already"):
        trainer.create_adapter("a", LoraSpec(4))
    for call in (
        trainer.remove_adapter,
        trainer.zero_grad,
        trainer.gradients,
        trainer.weights,
        trainer.snapshot,
        trainer.spec,
        trainer.step_count,
        lambda name: trainer.optim_step(name, AdamParams()),
    ):
        with pytest.raises(AdapterNotFoundError, match="no adapter 'nobody'"):
            call("nobody")
    assert_same_states(states(trainer), before)
    trainer.remove_adapter("a")
    assert trainer.adapter_ids() == ["b", "c", "bad"]


def test_what_the_trainer_hands_out_is_a_copy(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    before = states(trainer)
    for adapter_id in ADAPTERS:
        for arrays in (trainer.weights(adapter_id), trainer.gradients(adapter_id), vars(trainer.snapshot(adapter_id))):
            for array in arrays.values():
                if isinstance(array, np.ndarray):
                    array[:] = 7.0
    assert_same_states(states(trainer), before)


def test_a_restored_snapshot_does_not_alias_the_adapter(make_trainer: MakeTrainer) -> None:
    trainer = trained(make_trainer)
    snapshot = trainer.snapshot("a")
    kept = {k: v.copy() for k, v in vars(snapshot).items() if isinstance(v, np.ndarray)}
    trainer.restore("twin", snapshot)
    trainer.forward_backward([TrainItem("twin", [datum()])])
    trainer.optim_step("twin", AdamParams(learning_rate=0.1))
    for key, value in kept.items():
        np.testing.assert_array_equal(getattr(snapshot, key), value)
    assert_same_state(trainer.snapshot("a"), snapshot)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -4}, "rank"),
        ({"rank": 513}, "rank"),
        ({"rank": 8.0}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": None}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": math.inf}, "alpha"),
        pytest.param({"alpha": 10**400}, "alpha", id="alpha-10**400"),
        ({"alpha": "32"}, "alpha"),
        ({"alpha": None}, "alpha"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"seed": "0"}, "seed"),
        ({"train_attn": False, "train_mlp": False}, "train_attn, train_mlp, train_unembed"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["q_proj", "w_proj"]}, "target_modules"),
        ({"target_modules": ["embed_tokens"]}, "target_modules"),
        ({"target_modules": "no such module"}, "target_modules"),
        ({"target_modules": "(unbalanced"}, "target_modules"),
    ],
)
def test_specs_that_cannot_be(changes: dict[str, object], field: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(BASE)
    with pytest.raises(InvalidInputError, match=f"^{field}: got .*allowed: "):
        trainer.create_adapter("x", replace(LoraSpec(8), **changes))
    assert trainer.adapter_ids() == []


# --- initial weights --------------------------------------------------------------------------------------------------


def initial(trainer: Trainer, spec: LoraSpec, adapter_id: str = "new") -> dict[str, np.ndarray]:
    trainer.create_adapter(adapter_id, spec)
    return trainer.weights(adapter_id)


@pytest.mark.parametrize("rank", [1, 5, 8, 100])
def test_initial_weights_depend_on_seed_and_module_only(rank: int, make_trainer: MakeTrainer) -> None:
    spec = LoraSpec(rank, seed=11, train_unembed=True)
    first = initial(make_trainer(BASE), spec)
    busy = trained(make_trainer)  # other adapters, other slots, another order, and torch's random state has advanced
    for again in (initial(busy, spec), initial(busy, replace(spec, alpha=1.0), "third")):
        assert again.keys() == first.keys()
        for name in first:
            np.testing.assert_array_equal(again[name], first[name])
    fewer = initial(busy, replace(spec, train_mlp=False, train_unembed=False), "fewer targets")
    assert 0 < len(fewer) < len(first)
    for name in fewer:
        np.testing.assert_array_equal(fewer[name], first[name])


def test_initial_weights_are_those_of_kaiming_uniform(make_trainer: MakeTrainer) -> None:
    weights = initial(make_trainer(BASE), LoraSpec(64, seed=5, train_unembed=True))
    for name, values in weights.items():
        if ".lora_B." in name:
            assert not values.any()
        else:
            bound = 1 / math.sqrt(values.shape[1])  # kaiming with a = √5
            assert np.abs(values).max() <= bound
            assert np.abs(values).max() > 0.99 * bound
            assert values.mean() == pytest.approx(0, abs=0.05 * bound)
            assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.03)
            assert len(np.unique(values)) > 0.99 * values.size


def test_another_seed_or_module_has_other_weights(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(BASE)
    one, two = initial(trainer, LoraSpec(8, seed=1), "one"), initial(trainer, LoraSpec(8, seed=2), "two")
    seen = [values for weights in (one, two) for name, values in weights.items() if ".lora_A." in name]
    for index, values in enumerate(seen):
        for other in seen[:index]:
            assert values.shape != other.shape or not np.isclose(values, other).any(axis=1).all()


def test_a_missing_seed_is_drawn_and_recorded(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(BASE)
    one = trainer.create_adapter("one", LoraSpec(8))
    two = trainer.create_adapter("two", LoraSpec(8))
    assert isinstance(one.seed, int)
    assert one.seed != two.seed
    assert trainer.spec("one") == one
    trainer.create_adapter("again", one)
    for name, values in trainer.weights("one").items():
        np.testing.assert_array_equal(trainer.weights("again")[name], values)


MALFORMED = {
    "no item": (None, "item"),
    "unhashable adapter_id": (TrainItem(["a"], [datum()]), "adapter_id"),
    "loss is None": (TrainItem("a", [datum()], None), "loss"),
    "loss_config is None": (TrainItem("a", [datum()], loss_config=None), "loss_config"),
    "extras is None": (TrainItem("a", [replace(datum(), extras=None)]), "data[0].extras"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_request_of_wrong_types_fails_alone(make_trainer: MakeTrainer, kind: str) -> None:
    bad, field = MALFORMED[kind]
    trainer = trained(make_trainer)
    before = states(trainer)
    (result,) = trainer.forward_backward([bad])
    assert isinstance(result, TrainFailure)
    assert str(result.error).startswith(f"{field}: ")
    assert_same_states(states(trainer), before)


@pytest.mark.parametrize("name", ["weights", "exp_avg", "gradient"])
def test_a_snapshot_of_wrong_size_changes_nothing(make_trainer: MakeTrainer, name: str) -> None:
    trainer = trained(make_trainer)
    before = states(trainer)
    with pytest.raises(InvalidInputError, match=f"snapshot.{name}"):
        trainer.restore("a", replace(trainer.snapshot("a"), **{name: np.zeros(1, np.float32)}))
    assert_same_states(states(trainer), before)
