"""Versions that are complete sets of weights: each one's samples are those of Transformers with its weights."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.models.reference import assert_numbers_close, random_datum, toy_llama
from tests.support.models.sampling import drain, next_logprobs, prompt, request, run, sample, toy_tokenizer
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.errors import CapacityError, CheckpointError, InvalidInputError
from twinkle.model import Trainer, adopt_model
from twinkle.model.decoder.joined import join_weights, joint
from twinkle.sampler import Progress, SampleFailure, SampleRequest, SamplingParams, TorchSampler
from twinkle.sampler.weight_sets import WeightVersions
from twinkle.sampler.weight_sets.slots import WeightSlots

LEARNING_RATE = 0.02


class Training:
    """Trains all parameters of a plain model, as the source of the versions and their reference."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._steps = 0

    def step(self) -> None:
        ids = torch.from_numpy(random_datum(self.model, "cross_entropy", 14, seed=self._steps).tokens)[None]
        self.model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def weights(self, adapter_id: str) -> Mapping[str, torch.Tensor]:
        assert adapter_id == "run"
        return dict(self.model.named_parameters())

    def frozen(self) -> PreTrainedModel:
        return copy.deepcopy(self.model).eval()


def base_model(family: str = "llama") -> PreTrainedModel:
    return toy_llama() if family == "llama" else tiny_model(family)


def on(model: PreTrainedModel, training: Training | None = None, sets: int | None = None) -> TorchSampler:
    """Return a sampler on a copy of the model. ``sets``: how many versions stay in memory."""
    trainer: Trainer = tiny_trainer(model)
    source = None if training is None else training.weights
    return TorchSampler(trainer, toy_tokenizer(), versions=WeightVersions(trainer, source, sets))


def trained(sets: int | None = None, family: str = "llama") -> tuple[PreTrainedModel, Training, TorchSampler]:
    model = base_model(family)
    training = Training(copy.deepcopy(model))
    return model, training, on(model, training, sets)


def scores(sampler: TorchSampler, version: str | None, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    asked = SampleRequest("score", version, tokens, SamplingParams(max_tokens=1), prompt_logprobs=True)
    return run(sampler, [asked])["score"].prompt_logprobs[1:]


def plain_scores(model: PreTrainedModel, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    return next_logprobs(model, tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def greedy(name: str, version: str | None, tokens: NDArray[np.int64], length: int = 12) -> SampleRequest:
    return request(name, version, tokens, max_tokens=length, temperature=0.0)


def plain_greedy(model: PreTrainedModel, tokens: NDArray[np.int64], length: int = 12) -> list[int]:
    grown = tokens.tolist()
    for _ in range(length):
        grown.append(int(next_logprobs(model, np.array(grown))[-1].argmax()))
    return grown[len(tokens) :]


def folder(model: PreTrainedModel, path: Path, **options: object) -> str:
    model.save_pretrained(path, **options)
    return str(path)


def versions_of(sampler: TorchSampler) -> WeightVersions:
    store = sampler._versions
    assert isinstance(store, WeightVersions)
    return store


def resident(sampler: TorchSampler) -> set[str]:
    return {one.version_id for one in versions_of(sampler)._held.values()}


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "qwen3_5"])
def test_log_probabilities_after_each_step(family: str) -> None:
    """qwen3_5 has states beside its cache; llama-tied has one weight for the embedding and the head."""
    model, training, sampler = trained(family=family)
    tokens = prompt(20)
    base = plain_scores(model, tokens)
    for step in range(3):
        training.step()
        sampler.publish(f"v{step}", "run")
        found = scores(sampler, f"v{step}", tokens)
        assert_numbers_close(found, plain_scores(training.frozen(), tokens))
        assert np.abs(found - base).max() > 0.01
        assert_numbers_close(scores(sampler, None, tokens), base)


def test_training_on_does_not_change_a_version() -> None:
    _, training, sampler = trained()
    training.step()
    sampler.publish("v", "run")
    before = scores(sampler, "v", prompt(20))
    training.step()
    np.testing.assert_array_equal(scores(sampler, "v", prompt(20)), before)


def test_requests_of_all_versions_at_the_same_time() -> None:
    """Requests of the base and of two versions run side by side, in turns: each draws what its own weights draw."""
    model, training, sampler = trained()
    references: dict[str | None, PreTrainedModel] = {None: model}
    for step in range(2):
        training.step()
        sampler.publish(f"v{step}", "run")
        references[f"v{step}"] = training.frozen()
    asked = [
        replace(greedy(f"{version} {n}", version, prompt(5 + 9 * n, n)), scope=f"tenant {n}", num_samples=2)
        for n in range(3)
        for version in references
    ]
    for name, result in run(sampler, asked).items():
        one = next(each for each in asked if each.request_id == name)
        expected = plain_greedy(references[one.version_id], one.prompt)
        assert [sequence.tokens.tolist() for sequence in result.sequences] == [expected] * 2


def test_turns_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With turns of one pass, the base and a version stream their tokens alternately, whoever was first."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    _, _, sampler = trained()
    sampler.publish("v", "run")
    for name, version in (("version", "v"), ("base", None)):
        sampler.submit(replace(greedy(name, version, prompt(9), 20), stream=True))
    streamed = []
    while sampler.busy:
        streamed += [event.request_id for event in sampler.step() if isinstance(event, Progress)]
    assert {streamed[n : n + 2].count("base") for n in range(0, 20, 2)} == {1}


def test_a_tenant_with_many_versions_gets_no_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    _, _, sampler = trained(sets=3)
    for n in range(3):
        sampler.publish(f"v{n}", "run")
        sampler.submit(replace(greedy(f"v{n}", f"v{n}", prompt(9), 40), stream=True, scope="many"))
    sampler.submit(replace(greedy("base", None, prompt(9), 10), stream=True, scope="one"))
    order = []
    while "base" not in order or order.count("base") < 10:
        order += [event.request_id for event in sampler.step() if isinstance(event, Progress)]
    assert order.count("base") >= len(order) // 2
    for n in range(3):
        sampler.cancel(f"v{n}")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_version_leaves_and_comes_back(tmp_path: Path) -> None:
    _, training, sampler = trained(sets=2)
    tokens, expected = prompt(20), {}
    for name in ("a", "b", "c"):
        training.step()
        sampler.publish(name, "run")
        sampler.version_saved(name, folder(training.model, tmp_path / name))
        expected[name] = plain_scores(training.frozen(), tokens)
        if name == "b":
            scores(sampler, "a", tokens)  # now b is the one that was used longest ago
    assert resident(sampler) == {"a", "c"}
    assert sampler.version_ids() == ["a", "b", "c"]
    assert_numbers_close(scores(sampler, "b", tokens), expected["b"])
    assert resident(sampler) == {"b", "c"}
    for name in expected:
        assert_numbers_close(scores(sampler, name, tokens), expected[name])


def test_more_versions_in_use_than_places(tmp_path: Path) -> None:
    """Three versions take turns in one place: all are read again and again, none is refused, none is mixed up."""
    _, training, sampler = trained(sets=1)
    references = {}
    for name in ("a", "b", "c"):
        training.step()
        references[name] = training.frozen()
        sampler.load_version(name, folder(training.model, tmp_path / name))
    asked = [greedy(f"{name} {n}", name, prompt(7 + n, n)) for n in range(2) for name in references]
    for name, result in run(sampler, asked).items():
        one = next(each for each in asked if each.request_id == name)
        assert result.sequences[0].tokens.tolist() == plain_greedy(references[one.version_id], one.prompt)


def test_a_version_in_use_without_files_keeps_its_place(tmp_path: Path) -> None:
    _, training, sampler = trained(sets=1)
    sampler.publish("a", "run")
    before = plain_greedy(training.frozen(), prompt(9))
    sampler.submit(greedy("one", "a", prompt(9)))
    training.step()
    with pytest.raises(CapacityError, match=r"use all 1 sets .* needs \d+ bytes .*max_weight_sets") as error:
        sampler.publish("b", "run")
    assert str(versions_of(sampler)._set_bytes) in str(error.value)
    assert sampler.version_ids() == ["a"]
    sampler.load_version("c", folder(training.model, tmp_path / "c"))  # it is read when its turn comes
    sampler.submit(greedy("two", "c", prompt(9)))
    drawn = {name: outcome.sequences[0].tokens.tolist() for name, outcome in drain(sampler).items()}
    assert drawn == {"one": before, "two": plain_greedy(training.frozen(), prompt(9))}
    assert sampler.version_ids() == ["c"]  # a had no files, and nobody used it any more


def test_requests_that_hold_all_places_make_way_for_those_that_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running requests have lost their weights' place to a version without files, whose requests wait behind."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    _, training, _ = trained()
    trainer = tiny_trainer(base_model())
    versions = WeightVersions(trainer, training.weights, 1)
    sampler = TorchSampler(trainer, toy_tokenizer(), max_sequences=2, versions=versions)
    sampler.load_version("filed", folder(training.model, tmp_path))
    expected = plain_greedy(training.frozen(), prompt(9), 30)
    for n in range(3):
        sampler.submit(greedy(f"{n}", "filed", prompt(9), 30))
    sampler.step()
    training.step()
    sampler.publish("live", "run")
    sampler.submit(greedy("live", "live", prompt(9), 30))
    drawn = {name: outcome.sequences[0].tokens.tolist() for name, outcome in drain(sampler).items()}
    assert drawn == {**dict.fromkeys("012", expected), "live": plain_greedy(training.frozen(), prompt(9), 30)}


def test_sets_that_do_not_fit_are_refused_with_their_bytes() -> None:
    model = base_model()
    size = sum(weight.numel() * 4 for weight in model.parameters())
    trainer = tiny_trainer(model, memory_budget_bytes=40 * size)
    with pytest.raises(CapacityError, match=rf"max_weight_sets: got 900.*{900 * size} bytes.*memory_budget_gib"):
        WeightVersions(trainer, None, 900)
    sampler = on(model, Training(copy.deepcopy(model)), sets=0)
    with pytest.raises(CapacityError, match=rf"second set of weights, and needs {size} bytes.*raise max_weight_sets"):
        sampler.publish("v", "run")
    trainer.set_aside(trainer.memory.adapters - size)  # there is no place for a set, though none was excluded
    with pytest.raises(CapacityError, match=rf"second set of weights, and needs {size} bytes.*memory_budget_gib"):
        WeightVersions(trainer, None).receive("v", {}, model.state_dict())
    assert_numbers_close(scores(sampler, None, prompt(9)), plain_scores(model, prompt(9)))


def test_a_retired_version_finishes_its_requests() -> None:
    _, training, sampler = trained(sets=1)
    sampler.publish("a", "run")
    expected = plain_greedy(training.frozen(), prompt(9))
    sampler.submit(greedy("one", "a", prompt(9)))
    sampler.retire("a")
    assert sampler.version_ids() == []
    with pytest.raises(InvalidInputError, match="version_id"):
        sampler.submit(greedy("two", "a", prompt(9)))
    assert drain(sampler)["one"].sequences[0].tokens.tolist() == expected
    training.step()
    sampler.publish("a", "run")  # the same id, other weights: nothing cached for the first may be found
    assert sample(sampler, greedy("two", "a", prompt(9)))[0].tokens.tolist() == plain_greedy(
        training.frozen(), prompt(9)
    )


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_folder_of_several_files(family: str, tmp_path: Path) -> None:
    model, training, sampler = trained(family=family)
    training.step()
    directory = folder(training.model, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sampler.load_version("v", directory)
    assert_numbers_close(scores(sampler, "v", prompt(20)), plain_scores(training.frozen(), prompt(20)))
    assert_numbers_close(scores(sampler, None, prompt(20)), plain_scores(model, prompt(20)))


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _without_one(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors")


def _outside(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "cut": (_cut, "could not read"),
    "gone": (lambda path: (path / "model.safetensors").unlink(), "holds no weights of a whole model"),
    "one weight less": (_without_one, "missing model.norm.weight"),
    "an adapter": (lambda path: (path / "adapter_config.json").write_text("{}"), "holds a LoRA adapter"),
    "a file outside": (_outside, "files of that folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_changes_nothing(damage: str, tmp_path: Path) -> None:
    model, training, sampler = trained(sets=1)
    training.step()
    sampler.publish("v", "run")
    before = scores(sampler, "v", prompt(20))
    path = tmp_path / "checkpoint"
    folder(training.model, path)
    change, message = DAMAGE[damage]
    change(path)
    with pytest.raises(CheckpointError, match=message):
        sampler.load_version("w", str(path))
    assert sampler.version_ids() == ["v"]
    np.testing.assert_array_equal(scores(sampler, "v", prompt(20)), before)
    assert_numbers_close(scores(sampler, None, prompt(20)), plain_scores(model, prompt(20)))


def test_the_folder_of_another_model(tmp_path: Path) -> None:
    _, _, sampler = trained()
    with pytest.raises(CheckpointError, match="does not fit this model"):
        sampler.load_version("v", folder(tiny_model("qwen3"), tmp_path))
    assert sampler.version_ids() == []


def test_files_that_vanish_fail_the_requests_for_them_alone(tmp_path: Path) -> None:
    model, training, sampler = trained(sets=1)
    sampler.load_version("a", folder(training.model, tmp_path / "a"))
    sampler.load_version("b", folder(training.model, tmp_path / "b"))  # takes the place of a
    (tmp_path / "a" / "model.safetensors").unlink()
    for name, version in (("one", "a"), ("two", "b"), ("three", None)):
        sampler.submit(greedy(name, version, prompt(9)))
    outcomes = drain(sampler)
    assert isinstance(outcomes["one"], SampleFailure)
    assert isinstance(outcomes["one"].error, CheckpointError)
    for name in ("two", "three"):
        assert outcomes[name].sequences[0].tokens.tolist() == plain_greedy(model, prompt(9))
    assert sampler.version_ids() == ["b"]


def test_a_copy_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, training, sampler = trained(sets=2)
    sampler.publish("v", "run")
    before = scores(sampler, "v", prompt(20))
    whole = training.weights("run")
    short = {name: weight for name, weight in whole.items() if name != "model.norm.weight"}
    monkeypatch.setattr(versions_of(sampler), "_source", lambda _id: short)
    with pytest.raises(InvalidInputError, match=r"no model\.norm\.weight"):
        sampler.publish("w", "run")
    with pytest.raises(InvalidInputError, match="shape"):
        sampler.receive_version("w", {}, {**whole, "model.norm.weight": torch.zeros(3)})
    assert sampler.version_ids() == ["v"]
    np.testing.assert_array_equal(scores(sampler, "v", prompt(20)), before)
    sampler.receive_version("w", {}, whole)
    np.testing.assert_array_equal(scores(sampler, "w", prompt(20)), before)


def test_two_samplers_share_nothing() -> None:
    """Replicas serve one tenant each: a version of one is unknown to the other, and their bases stay the same."""
    model, training, sampler = trained()
    other = on(model, Training(copy.deepcopy(model)))
    training.step()
    sampler.publish("v", "run")
    scores(sampler, "v", prompt(9))
    with pytest.raises(InvalidInputError, match="version_id"):
        other.submit(greedy("one", "v", prompt(9)))
    assert_numbers_close(scores(other, None, prompt(9)), plain_scores(model, prompt(9)))


def test_weights_that_are_joined_are_joined_in_every_set() -> None:
    """Otherwise captured graphs of the sets would need separate products."""
    model = base_model()
    join_weights(model)
    engine = Trainer(adopt_model(model), model_id="joined").engine
    slots = WeightSlots(engine, 2)
    attention = engine.layers[0].inner.self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    addresses = set()
    for number in range(3):
        slots.use(number)
        whole = joint([linear.weight_OI for linear in linears])
        assert whole is not None
        addresses.add(whole.data_ptr())
    assert len(addresses) == 3
    slots.fill(1, [("model.layers.0.self_attn.k_proj.weight", torch.ones_like(attention.k_proj.weight_OI))])
    slots.use(1)
    assert (attention.k_proj.weight_OI == 1).all()
    slots.use(0)
    assert not (attention.k_proj.weight_OI == 1).all()
