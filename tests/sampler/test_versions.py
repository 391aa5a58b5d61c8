"""Versions: frozen when published, kept as long as they are in use, and paged like adapters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.reference import assert_tensors_close, random_datum, toy_llama, with_random_weights
from tests.support.models.sampling import (
    SPECS,
    assert_nothing_left,
    assert_same_samples,
    drain,
    prompt,
    reference,
    request,
    run,
    sample,
    toy_sampler,
    toy_trainer,
)
from tests.support.models.tiny_models import take_step
from twinkle.errors import AdapterNotFoundError, CapacityError, CheckpointError, InvalidInputError, NonFiniteError
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem
from twinkle.sampler import SampleFailure, SampleRequest, SampleResult, SamplingParams, TorchSampler
from twinkle.sampler.received_weights import as_tensors

BASE = toy_llama()


def scores(sampler: TorchSampler, version: str | None, tokens: np.ndarray | None = None) -> np.ndarray:
    tokens = prompt(20) if tokens is None else tokens
    asked = SampleRequest("score", version, tokens, SamplingParams(max_tokens=1), prompt_logprobs=True)
    return run(sampler, [asked])["score"].prompt_logprobs[1:]


def assert_same_scores(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Weights at another address are added up in another order on some CPUs, so the last digits may differ."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def train(trainer: Trainer, adapter_id: str, seed: int = 0) -> None:
    take_step(trainer, TrainItem(adapter_id, [random_datum(BASE, "cross_entropy", 12, seed)]), learning_rate=0.05)


def test_another_trainer_on_the_same_base_model_publishes() -> None:
    """Its adapters are copied: a trainer whose model only trains has a sampler on a base model of its own."""
    publisher = toy_trainer()
    alone, beside = TorchSampler(publisher, None), TorchSampler(toy_trainer({}), None, publisher=publisher)
    for name in SPECS:
        for sampler in (alone, beside):
            sampler.publish(name, name)
        assert_same_scores(scores(beside, name), scores(alone, name))
    before = scores(beside, "a")
    train(publisher, "a")
    assert_same_scores(scores(beside, "a"), before)
    with pytest.raises(AdapterNotFoundError):
        beside.publish("other", "no such adapter")


def test_training_on_does_not_change_a_version() -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    before = scores(sampler, "a")
    train(trainer, "a")
    assert_same_scores(scores(sampler, "a"), before)
    sampler.publish("a2", "a")
    after = scores(sampler, "a2")
    assert np.abs(after - before).max() > 0.01
    assert_same_scores(scores(sampler, "a"), before)
    trainer.remove_adapter("a")
    assert_same_scores(scores(sampler, "a2"), after)


def test_weights_from_another_process() -> None:
    trainer, other = toy_trainer(), toy_trainer()
    train(trainer, "a")
    sampler = toy_sampler(other)
    arrays = trainer.weights("a")
    for array in arrays.values():
        array.setflags(write=False)  # as arrays from shared memory are
    sampler.receive_version("received", trainer.peft_config("a"), as_tensors(arrays))
    here = toy_sampler(trainer)
    here.publish("new", "a")
    assert_same_scores(scores(sampler, "received"), scores(here, "new"))


def test_turns_of_training_and_sampling_do_not_disturb_each_other() -> None:
    requests = [
        request(f"{version}{n}", version, prompt(10 + n, n), 2, max_tokens=40, seed=n)
        for version in (None, *SPECS)
        for n in range(2)
    ]
    quiet = toy_trainer()
    expected = run(toy_sampler(quiet), requests)
    for step in range(5):
        for name in SPECS:
            train(quiet, name, step)
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    for each in requests:
        sampler.submit(each)
    outcomes, step = {}, 0
    while sampler.busy or step < 5:
        outcomes |= {finished.request_id: finished.outcome for finished in sampler.step()}
        if step < 5:
            for name in SPECS:
                train(trainer, name, step)
            step += 1
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)
    for name in SPECS:
        assert_tensors_close(trainer.weights(name), quiet.weights(name), tolerance=0.0)


def test_versions_have_no_optimizer_state_and_are_no_adapters() -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    scores(sampler, "a")
    version = sampler._versions["a"]
    assert version.exp_avg_P.numel() == version.exp_avg_sq_P.numel() == 0
    assert version.step_bytes < trainer.pool.get("a").step_bytes / 2
    assert trainer.adapter_ids() == list(SPECS)
    sampler.publish("same name as an adapter", "a")
    trainer.create_adapter("same name as an adapter", LoraSpec(rank=2, seed=0))
    assert sampler.version_ids() == [*SPECS, "same name as an adapter"]


def test_what_is_saved_and_loaded_is_the_same_version(tmp_path: Path) -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    for name in SPECS:
        trainer.save(name, tmp_path / name, optimizer=name == "a")
        sampler.load_version(f"{name} again", str(tmp_path / name))
        assert_same_scores(scores(sampler, f"{name} again"), scores(sampler, name))


def test_a_directory_of_peft(tmp_path: Path) -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    reference(BASE, trainer, "a").save_pretrained(tmp_path / "peft")
    sampler.load_version("peft", str(tmp_path / "peft"))
    assert_same_scores(scores(sampler, "peft"), scores(sampler, "a"))


def test_names_are_used_once() -> None:
    sampler = toy_sampler(toy_trainer())
    with pytest.raises(InvalidInputError, match=r"version_id: got 'a'.*never change"):
        sampler.publish("a", "b")
    with pytest.raises(InvalidInputError, match="version_id: got 'a'"):
        sampler.load_version("a", "/nowhere")
    with pytest.raises(InvalidInputError, match="version_id: got ''"):
        sampler.publish("", "b")
    with pytest.raises(AdapterNotFoundError):
        sampler.publish("new", "nobody")
    with pytest.raises(CheckpointError):
        sampler.load_version("new", "/nowhere")
    assert sampler.version_ids() == list(SPECS)


def test_a_retired_version_finishes_its_requests() -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer, max_sequences=1)
    asked = [request(name, "a", prompt(9, n), max_tokens=90, seed=n) for n, name in enumerate(("x", "y"))]
    expected = run(sampler, asked)
    for each in asked:
        sampler.submit(each)
    early = sampler.step()
    sampler.retire("a")
    assert sampler.version_ids() == ["b", "c"]
    assert len(trainer.pool._versions) == 3
    with pytest.raises(InvalidInputError, match="version_id: got 'a'"):
        sampler.submit(request("z", "a", prompt(5), max_tokens=1))
    sampler.publish("a", "b")  # the name is free again, and now means other weights
    sampler.submit(request("z", "a", prompt(9, 0), max_tokens=30, seed=0))
    outcomes = {each.request_id: each.outcome for each in early} | drain(sampler)
    assert_same_samples(outcomes["x"], expected["x"])
    assert_same_samples(outcomes["y"], expected["y"])
    assert outcomes["z"].sequences[0].tokens.tolist() != expected["x"].sequences[0].tokens[:30].tolist()
    assert len(trainer.pool._versions) == 3
    for version in ("a", "b", "c", "unknown"):
        sampler.retire(version)
    assert sampler.version_ids() == []
    assert not trainer.pool._versions


def test_a_cancelled_request_leaves_nothing() -> None:
    sampler = toy_sampler(toy_trainer(), max_sequences=4)
    keep = request("keep", "b", prompt(12), 3, max_tokens=50, seed=1)
    expected = run(sampler, [keep])["keep"]
    for name in ("first", "second", "third"):
        sampler.submit(request(name, "a", prompt(12), 3, max_tokens=110))
    sampler.submit(keep)
    finished = sampler.step()
    sampler.cancel("first")
    sampler.cancel("third")
    sampler.cancel("unknown")
    sampler.retire("a")
    sampler.cancel("second")
    outcomes = {each.request_id: each.outcome for each in finished} | drain(sampler)
    assert set(outcomes) <= {"first", "keep"}
    assert_same_samples(outcomes["keep"], expected)
    assert sampler.step() == []
    sampler.submit(request("only", "b", prompt(4), max_tokens=5))
    sampler.cancel("only")
    assert not sampler.busy
    assert_nothing_left(sampler)


def test_more_versions_than_the_device_holds() -> None:
    """Two stacks do not fit together, and there are more versions than slots: every request gets a turn."""
    specs = {f"a{n}": replace(SPECS["a"], seed=n) for n in range(12)} | {f"b{n}": SPECS["b"] for n in range(2)}
    trainer = toy_trainer(specs)
    sampler = toy_sampler(trainer)
    requests = [request(name, name, prompt(7, n), 2, max_tokens=12, seed=n) for n, name in enumerate(specs)]
    requests.append(request("base", None, prompt(7), 2, max_tokens=12, seed=0))
    expected = run(sampler, requests)
    largest = max(trainer.pool.get(name).stack.block_bytes + trainer.pool.get(name).step_bytes for name in ("a0", "b0"))
    trainer.pool.shrink(largest)
    assert not trainer.pool.fit([sampler._versions["a0"], sampler._versions["b0"]])
    for each in requests:
        sampler.submit(each)
    outcomes: dict[str, object] = {}
    while sampler.busy:
        outcomes |= {finished.request_id: finished.outcome for finished in sampler.step()}
        train(trainer, "a3")  # pages out versions that sampling needs
        assert trainer.pool._used_bytes() <= largest
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)


def test_a_version_that_never_fits() -> None:
    trainer = toy_trainer({"a": SPECS["a"]})
    sampler = toy_sampler(trainer)
    trainer.pool.shrink(trainer.pool.get("a").stack.block_bytes + trainer.pool.get("a").step_bytes)
    trainer.pool.budget_bytes = 1000
    with pytest.raises(CapacityError):
        sampler.publish("again", "a")
    assert sampler.version_ids() == ["a"]


def test_a_version_that_has_blown_up_fails_alone() -> None:
    trainer = toy_trainer()
    trainer.restore("c", with_random_weights(trainer, "c", size=1e25))
    sampler = toy_sampler(trainer)
    good = [request(name, name, prompt(20), 2, max_tokens=20, seed=3) for name in ("a", "b")]
    expected = run(sampler, good)
    bad = [
        request("c1", "c", prompt(20), 4, max_tokens=20),
        request("c2", "c", prompt(70), max_tokens=20, temperature=0),
        SampleRequest("c3", "c", prompt(20), SamplingParams(max_tokens=1), prompt_logprobs=True),
    ]
    for each in [bad[0], good[0], bad[1], good[1], bad[2]]:
        sampler.submit(each)
    outcomes = drain(sampler)
    for each in bad:
        failure = outcomes[each.request_id]
        assert isinstance(failure, SampleFailure)
        assert isinstance(failure.error, NonFiniteError)
    for each in good:
        assert_same_samples(outcomes[each.request_id], expected[each.request_id])
    # Later requests find no trace of it in the cache.
    for name, result in run(sampler, good).items():
        assert isinstance(result, SampleResult)
        assert_same_samples(result, expected[name])


def test_compiled_layers_are_for_training() -> None:
    trainer = toy_trainer({"a": SPECS["a"]})
    sampler = toy_sampler(trainer)
    before = scores(sampler, "a")

    def compiled(*_: object) -> None:
        raise AssertionError("sampling ran code that was compiled for training")

    for layer in trainer.engine.layers:
        layer.compiled = compiled
    assert_same_scores(scores(sampler, "a"), before)


def test_gradients_of_an_open_window_survive_sampling() -> None:
    trainer = toy_trainer()
    sampler = toy_sampler(trainer)
    trainer.forward_backward([TrainItem("a", [random_datum(BASE, "cross_entropy", 12, 0)])])
    before = trainer.gradients("a")
    sample(sampler, request("x", "a", prompt(10), 2, max_tokens=10))
    assert_tensors_close(trainer.gradients("a"), before, tolerance=0.0)
    trainer.optim_step("a", AdamParams())
