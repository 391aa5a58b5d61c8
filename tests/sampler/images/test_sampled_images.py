"""Images in the sampler: what it computes is what Transformers with PEFT computes, and what the trainer computes."""

import copy
import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.models.reference import assert_numbers_close, target_logprobs, with_random_weights
from tests.support.models.sampling import (
    assert_same_samples,
    blocks,
    drain,
    prompt,
    reference,
    request,
    run,
    toy_sampler,
    toy_trainer,
)
from tests.support.models.seeing_models import (
    IMAGE,
    SEEING,
    picture,
    png,
    processing_of,
    seeing_datum,
    seeing_model,
)
from tests.support.models.tiny_models import the_result
from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem, adopt_model
from twinkle.sampler import SampleRequest, SampleResult, TorchSampler


@cache
def base(family: str) -> PreTrainedModel:
    return seeing_model(family)


@cache
def trainer_on(family: str, tokens: int = 16) -> Trainer:
    """Return a trainer with the adapter "a". Few tokens in a batch: pieces of prompts end inside images."""
    model = base(family)
    trainer = Trainer(
        adopt_model(copy.deepcopy(model)),
        model_id="tiny",
        processing=processing_of(model),
        max_tokens_per_batch=tokens,
    )
    trainer.create_adapter("a", LoraSpec(6, seed=1))
    trainer.restore("a", with_random_weights(trainer, "a", 1, size=0.05))
    return trainer


def ask(name: str, datum: Datum, version: str | None = "a", samples: int = 1, **params: object) -> SampleRequest:
    """Return a request for samples that end before they hold an image token, which the plain model would look up."""
    how = {"max_tokens": 6, "seed": 5, "stop_tokens": (IMAGE,)} | params
    return dataclasses.replace(request(name, version, datum.tokens, samples, **how), images=datum.images)


def continued(datum: Datum, tokens: NDArray[np.int64]) -> Datum:
    """Return the sequence of a prompt and its sample, as a datum that predicts each token after the first."""
    whole = np.concatenate([datum.tokens, tokens])
    return Datum(whole[:-1], whole[1:], images=datum.images)


def assert_exact(family: str, asked: SampleRequest, datum: Datum, result: SampleResult) -> None:
    """Check the log-probabilities of prompt and samples, against the plain model and against the trainer."""
    trainer = trainer_on(family)
    plain = base(family) if asked.version_id is None else reference(base(family), trainer, asked.version_id)
    for sequence in result.sequences:
        whole = continued(datum, sequence.tokens)
        ours = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
        with torch.no_grad():
            assert_numbers_close(ours, target_logprobs(plain, whole).numpy())
        if asked.version_id is not None:
            trained = the_result(trainer.forward([TrainItem(asked.version_id, [whole])])[0])
            assert_numbers_close(ours, trained.logprobs[0])


@pytest.mark.parametrize("family", SEEING)
def test_equal_to_peft_and_to_the_trainer(family: str) -> None:
    """Several images, of several sizes; the base model and an adapter; text beside them; pieces end inside images."""
    model, sampler = base(family), toy_sampler(trainer_on(family))
    data = {
        "two": seeing_datum(model, [(100, 70), (64, 130)], 1),
        "large": seeing_datum(model, [(150, 160)], 2, text=3),
        "at once": seeing_datum(model, [(64, 64)], 3, text=0),
        "text": Datum(prompt(9) % IMAGE, prompt(9)),
    }
    asked = [
        dataclasses.replace(ask(f"{name} {version}", datum, version, 2), prompt_logprobs=True)
        for name, datum in data.items()
        for version in ("a", None)
    ]
    results = run(sampler, asked)
    for each in asked:
        assert_exact(family, each, data[each.request_id.rsplit(" ", 1)[0]], results[each.request_id])


@pytest.mark.parametrize("family", SEEING)
def test_samples_share_one_image_and_others_come_and_go(family: str) -> None:
    """With room for few sequences: they are preempted, and compute the tokens of their images again."""
    model, trainer = base(family), trainer_on(family)
    data = {f"r{number}": seeing_datum(model, [(100, 96 + 32 * number)], 20 + number) for number in range(3)}
    asked = [ask(name, datum, samples=3, max_tokens=12) for name, datum in data.items()]
    large = toy_sampler(trainer)
    seen = trainer.numbers().images_seen
    expected = run(large, asked)
    assert trainer.numbers().images_seen == seen + len(data)
    assert any(len({tuple(each.tokens) for each in result.sequences}) > 1 for result in expected.values())
    few = {} if large._cache is None else {"kv_budget_bytes": blocks(large, 4)}
    small = toy_sampler(trainer, max_sequences=4, **few)
    preempted = []
    preempt = small._schedule._preempt
    small._schedule._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    results = run(small, asked)
    assert preempted or large._cache is None
    for name, result in expected.items():
        assert_same_samples(results[name], result)
    assert trainer.numbers().images_seen == seen + len(data)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_penalties_and_scores_behind_images(family: str) -> None:
    """A request with penalties is computed token by token; scores are one entry a position, also in images."""
    datum = seeing_datum(base(family), [(100, 70)], 7)
    asked = dataclasses.replace(
        ask("x", datum, repetition_penalty=1.3, presence_penalty=0.5),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=datum.targets[:-1, None],
    )
    result = run(toy_sampler(trainer_on(family)), [asked])["x"]
    assert_exact(family, asked, datum, result)
    assert result.topk_prompt_logprobs.token_ids.shape == (len(datum.tokens), 2)
    wanted = Datum(datum.tokens[:-1], datum.targets[:-1], images=datum.images)
    trained = the_result(trainer_on(family).forward([TrainItem("a", [wanted])])[0])
    assert_numbers_close(result.target_prompt_logprobs[:, 0], trained.logprobs[0])


# --- features and cached prompts --------------------------------------------------------------------------------------


def test_an_image_is_seen_once_by_trainer_and_sampler() -> None:
    trainer = trainer_on("qwen3_vl")
    datum, sampler = seeing_datum(base("qwen3_vl"), [(130, 96)], 31), toy_sampler(trainer)
    before = trainer.numbers()
    run(sampler, [ask("x", datum, samples=3), ask("y", datum, None), ask("z", datum, max_tokens=1)])
    the_result(trainer.forward([TrainItem("a", [datum])])[0])
    assert trainer.numbers().images_seen == before.images_seen + 1
    assert trainer.numbers().images_reused == before.images_reused + 1  # a prompt's passes are one use, not many


def test_a_file_is_decoded_only_if_its_features_are_unknown() -> None:
    trainer, model = trainer_on("qwen3_vl"), base("qwen3_vl")
    datum, sampler = seeing_datum(model, [(64, 96)], 32), toy_sampler(trainer)
    (image,) = datum.images
    file = dataclasses.replace(datum, images=[dataclasses.replace(image, pixels=png(picture(64, 96, 3200)))])
    unknown = dataclasses.replace(file, images=[dataclasses.replace(file.images[0], digest="file")])
    broken = dataclasses.replace(
        unknown, images=[dataclasses.replace(unknown.images[0], pixels=EncodedImage(b"no", "png"))]
    )
    with pytest.raises(InvalidInputError, match=r"images\[0\]\.data.*a whole png file"):
        sampler.submit(ask("broken", broken))
    expected = run(sampler, [ask("x", datum)])["x"]
    assert_same_samples(run(sampler, [ask("x", unknown)])["x"], expected)
    assert_same_samples(run(sampler, [ask("x", broken)])["x"], expected)  # of this digest, features are enough


@pytest.mark.parametrize("family", SEEING)
def test_cached_prompts_are_found_by_their_images(family: str) -> None:
    model, sampler = base(family), toy_sampler(trainer_on(family))
    datum = seeing_datum(model, [(100, 70), (64, 130)], 41, text=18)
    other = seeing_datum(model, [(100, 70), (64, 130)], 42, text=18)
    second = dataclasses.replace(datum, images=[datum.images[0], dataclasses.replace(other.images[1], digest="new")])
    both = dataclasses.replace(datum, images=[dataclasses.replace(other.images[0], digest="other"), datum.images[1]])
    found = {}
    for name, each in {"first": datum, "again": datum, "second": second, "both": both}.items():
        result = run(sampler, [ask(name, each)])[name]
        found[name] = result.cached_prompt_tokens
        assert_same_samples(result, run(toy_sampler(trainer_on(family)), [ask(name, each)])[name])
    full = (len(datum.tokens) - 1) // 16 * 16
    begin = [image.first // 16 * 16 for image in datum.images]
    if family == "qwen3_5":  # states are stored from 64 tokens on
        begin = [each if each >= 64 else 0 for each in begin]
    assert found == {"first": 0, "again": full, "second": begin[1], "both": begin[0]}
    elsewhere = dataclasses.replace(ask("x", datum), scope="another tenant")
    assert run(sampler, [elsewhere])["x"].cached_prompt_tokens == 0


def test_two_images_in_a_row_are_not_one() -> None:
    """The tokens are the same, but neither positions nor pixels are."""
    model, trainer = base("qwen3_vl"), trainer_on("qwen3_vl")
    (_, size), (left, half) = (processing_of(model).patches(png(picture(64, width, 9))) for width in (128, 64))
    assert size.tokens == 2 * half.tokens
    right, _ = processing_of(model).patches(png(picture(64, 64, 10)))
    one = seeing_datum(model, [(64, 128)], 51)
    (image,) = one.images
    apart = [
        dataclasses.replace(image, rows=half.rows, columns=half.columns, digest="left", pixels=left),
        dataclasses.replace(
            image, rows=half.rows, columns=half.columns, digest="right", pixels=right, first=image.first + half.tokens
        ),
    ]
    two = dataclasses.replace(one, images=apart)
    sampler = toy_sampler(trainer)
    for datum in (one, two):
        asked = dataclasses.replace(ask("x", datum), prompt_logprobs=True)
        result = run(sampler, [asked])["x"]
        ours = np.concatenate([result.prompt_logprobs[1:], result.sequences[0].logprobs])
        sequence = continued(datum, result.sequences[0].tokens)
        trained = the_result(trainer.forward([TrainItem("a", [sequence])])[0])
        assert_numbers_close(ours, trained.logprobs[0])


def test_other_weights_of_the_base_model_make_features_useless() -> None:
    family = "qwen2_5_vl"
    trainer = trainer_on(family)
    datum, sampler = seeing_datum(base(family), [(64, 64)], 61), toy_sampler(trainer)
    for _ in range(2):
        run(sampler, [ask("x", datum)])
        sampler.base_changed(moved=False)
    seen = trainer.numbers().images_seen
    run(sampler, [ask("x", datum)])
    assert trainer.numbers().images_seen == seen + 1


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 3}, r"images\[0\]\.first"),
        ({"rows": 0}, r"images\[0\]\.rows.*an integer ≥ 1"),
        ({"digest": ""}, r"images\[0\]\.digest"),
        ({"pixels": np.zeros((24, 5), np.float32)}, r"images\[0\]\.pixels"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, object], message: str) -> None:
    datum = seeing_datum(base("qwen3_vl"), [(64, 96)], 3)
    sampler = toy_sampler(trainer_on("qwen3_vl"))
    wrong = dataclasses.replace(datum, images=[dataclasses.replace(datum.images[0], **changes)])
    with pytest.raises(InvalidInputError, match=message):
        sampler.submit(ask("x", wrong))
    assert not sampler.busy


def test_a_text_model_refuses_images() -> None:
    sampler = TorchSampler(toy_trainer({}), None)
    with pytest.raises(InvalidInputError, match=r"images: got .*1 images.*this sampler reads text only"):
        sampler.submit(ask("x", seeing_datum(base("qwen3_vl"), [(64, 96)], 3), None))


def test_a_cancelled_request_leaves_nothing() -> None:
    sampler = toy_sampler(trainer_on("qwen3_vl"))
    for name in "xy":
        sampler.submit(ask(name, seeing_datum(base("qwen3_vl"), [(150, 160)], 71), samples=4, max_tokens=40))
    sampler.step()
    sampler.cancel("x")
    assert drain(sampler).keys() == {"y"}
