"""Images in the trainer: equal to the plain model of Transformers with PEFT, alone and in company."""

import copy
import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models.reference import (
    TOLERANCE,
    Reference,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    with_random_weights,
)
from tests.support.models.seeing_models import (
    IMAGE,
    SEEING,
    image_processor,
    picture,
    png,
    processing_of,
    seeing_datum,
    seeing_model,
)
from tests.support.models.tiny_models import the_result
from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainFailure, TrainItem, adopt_model
from twinkle.model.types import Image

STEPS = 2
# Linear attention divides keys by their length, which magnifies rounding: measured 1.0e-5, in gradients.
BOUNDS = {"qwen3_5": 2e-5, "qwen3_5_moe": 2e-5}
ADAM = AdamParams(learning_rate=1e-3, eps=0.1)  # see test_numerics.py on eps


@cache
def base(family: str) -> PreTrainedModel:
    return seeing_model(family)


def trainer_on(family: str, **options: int) -> Trainer:
    model = base(family)
    return Trainer(adopt_model(copy.deepcopy(model)), model_id="tiny", processing=processing_of(model), **options)


def text_datum(family: str, length: int, seed: int) -> Datum:
    return random_datum(base(family).get_decoder(), "cross_entropy", length, seed)


@pytest.mark.parametrize("tokens", [4096, 40], ids=["whole", "in micro-batches"])
@pytest.mark.parametrize("family", [*SEEING, "qwen3_5_moe"])
def test_equal_to_peft_alone_and_in_company(family: str, tokens: int) -> None:
    """One tenant has images of several sizes, one has text, one has both; each is as if it were alone."""
    model = base(family)
    data = {
        "images": [seeing_datum(model, [(100, 70), (64, 130)], 1), seeing_datum(model, [(33, 40)], 2)],
        "text": [text_datum(family, 9, 3)],
        "both": [text_datum(family, 6, 4), seeing_datum(model, [(64, 64)], 5)],
    }
    trainer, references = trainer_on(family, max_tokens_per_batch=tokens), {}
    bound = BOUNDS.get(family, TOLERANCE)
    for number, name in enumerate(data):
        spec = LoraSpec(4 + 2 * number, seed=number, train_mlp=family != "qwen3_5_moe")
        trainer.create_adapter(name, spec)
        with_random_weights(trainer, name, number)
        references[name] = Reference(model, spec, trainer.weights(name))
    for _ in range(STEPS):
        items = [TrainItem(name, rows) for name, rows in data.items()]
        for item, outcome in zip(items, trainer.forward_backward(items), strict=True):
            ours, theirs = the_result(outcome), references[item.adapter_id].forward_backward(item)
            assert_logprobs_close(ours.logprobs, theirs.logprobs)
            assert_numbers_close(ours.metrics["loss:sum"], theirs.loss)
            gradients = references[item.adapter_id].gradients()
            assert_tensors_close(trainer.gradients(item.adapter_id), gradients, bound)
        for name, reference in references.items():
            trainer.optim_step(name, ADAM)
            reference.optim_step(ADAM)
            assert_tensors_close(trainer.weights(name), reference.weights(), bound)


@pytest.mark.parametrize("family", SEEING)
def test_two_images_in_a_row(family: str) -> None:
    """Transformers takes neighbouring images for one, so the plain model is given the positions here."""
    model, trainer = base(family), trainer_on(family)
    first, second = (processing_of(model).patches(png(picture(64, 96, seed))) for seed in (1, 2))
    size = first[1].rows, first[1].columns
    tokens = np.array([5, 6, *[IMAGE] * 2 * first[1].tokens, 7, 8])
    images = [Image(2, *size, "a", first[0]), Image(2 + first[1].tokens, *size, "b", second[0])]
    datum = Datum(tokens, tokens, np.ones(len(tokens), np.float32), images=images)
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    rows, columns = size
    longer = max(size)

    def image_at(place: int) -> list[tuple[int, int, int]]:
        return [(place, place + row, place + column) for row in range(rows) for column in range(columns)]

    end = 2 + 2 * longer
    axes = [(0,) * 3, (1,) * 3, *image_at(2), *image_at(2 + longer), (end,) * 3, (end + 1,) * 3]
    with torch.no_grad():
        logits_TV = model(
            input_ids=torch.from_numpy(tokens)[None],
            pixel_values=torch.from_numpy(np.concatenate([first[0], second[0]])),
            image_grid_thw=torch.tensor([(1, 2 * rows, 2 * columns)] * 2),
            position_ids=torch.tensor([(index, *place) for index, place in enumerate(axes)]).T[:, None],
        ).logits[0]
    plain = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
    assert_logprobs_close(the_result(trainer.forward([TrainItem("a", [datum])])[0]).logprobs, [plain])


def test_an_image_is_seen_once_over_epochs() -> None:
    trainer, model = trainer_on("qwen3_vl"), base("qwen3_vl")
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    datum = seeing_datum(model, [(64, 96)], 3)
    (image,) = datum.images
    files = dataclasses.replace(datum, images=[dataclasses.replace(image, pixels=png(picture(64, 96, 300)))])
    results = [the_result(trainer.forward_backward([TrainItem("a", [files])])[0]).logprobs[0] for _ in range(3)]
    numbers = trainer.numbers()
    assert (numbers.images_seen, numbers.images_reused) == (1, 2)
    np.testing.assert_array_equal(results[0], results[2])


def test_the_same_picture_under_another_digest_is_seen_again() -> None:
    trainer, model = trainer_on("qwen2_5_vl"), base("qwen2_5_vl")
    datum = seeing_datum(model, [(64, 96)], 3)
    other = dataclasses.replace(datum, images=[dataclasses.replace(datum.images[0], digest="of another tenant")])
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    for each in (datum, other):
        the_result(trainer.forward([TrainItem("a", [each])])[0])
    assert trainer.numbers().images_seen == 2


@pytest.mark.parametrize("family", SEEING)
def test_an_image_token_without_an_image_is_text(family: str) -> None:
    """A model may draw it. Transformers gives it its own embedding, too, if there are no images."""
    trainer, datum = trainer_on(family), text_datum(family, 9, 3)
    datum.tokens[4] = datum.targets[3] = IMAGE
    spec = LoraSpec(4, seed=1)
    trainer.create_adapter("a", spec)
    with_random_weights(trainer, "a", 1)
    item = TrainItem("a", [datum])
    theirs = Reference(base(family), spec, trainer.weights("a")).forward_backward(item)
    assert_logprobs_close(the_result(trainer.forward([item])[0]).logprobs, theirs.logprobs)
    seeing = seeing_datum(base(family), [(64, 96)], 3)
    seeing.tokens[0] = IMAGE
    the_result(trainer.forward([TrainItem("a", [seeing])])[0])


# --- mistakes fail their own request ----------------------------------------------------------------------------------


def changed(**fields: object) -> Datum:
    datum = seeing_datum(base("qwen3_vl"), [(64, 96)], 3)
    return dataclasses.replace(datum, images=[dataclasses.replace(datum.images[0], **fields)])


def with_token(place: int, token: int) -> Datum:
    datum = seeing_datum(base("qwen3_vl"), [(64, 96)], 3)
    tokens = datum.tokens.copy()
    tokens[place] = token
    return dataclasses.replace(datum, tokens=tokens)


MISTAKES = {
    "too early": (lambda: changed(first=3), r"images\[0\]\.first"),
    "past the end": (lambda: changed(first=99), r"images\[0\]\.first"),
    "a negative place": (lambda: changed(first=-1), r"images\[0\]\.first.*an integer ≥ 0"),
    "no rows": (lambda: changed(rows=0), r"images\[0\]\.rows.*an integer ≥ 1"),
    "patches of another width": (lambda: changed(pixels=np.zeros((24, 5), np.float32)), r"images\[0\]\.pixels"),
    "patches that are not finite": (lambda: changed(pixels=np.full((24, 1536), np.nan, np.float32)), "finite"),
    "no digest": (lambda: changed(digest=""), r"images\[0\]\.digest"),
    "a file that is no image": (lambda: changed(digest="new", pixels=EncodedImage(b"no", "png")), "whole png"),
    "a file of another size": (lambda: changed(digest="new", pixels=png(picture(96, 96))), "3 × 3, its size"),
    "text inside": (lambda: with_token(5, 7), r"images\[0\]\.first"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_alone(name: str) -> None:
    make, message = MISTAKES[name]
    trainer = _shared()
    good = seeing_datum(base("qwen3_vl"), [(64, 96)], 8)
    bad, fine = trainer.forward([TrainItem("a", [make()]), TrainItem("a", [good])])
    assert isinstance(bad, TrainFailure)
    with pytest.raises(InvalidInputError, match=message):
        raise bad.error
    the_result(fine)


@cache
def _shared() -> Trainer:
    trainer = trainer_on("qwen3_vl")
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    return trainer


def test_a_text_model_refuses_images(tiny_llama: Trainer) -> None:
    datum = seeing_datum(base("qwen3_vl"), [(64, 96)], 3)
    (failure,) = tiny_llama.forward([TrainItem("a", [datum])])
    assert isinstance(failure, TrainFailure)
    assert "reads text only" in str(failure.error)


@pytest.fixture
def tiny_llama() -> Trainer:
    trainer = Trainer.from_pretrained("random://llama-tiny", device="cpu", dtype="fp32")
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    return trainer


@pytest.mark.parametrize("family", SEEING)
def test_a_folder_loads_with_its_image_processor(family: str, tmp_path) -> None:
    model = base(family)
    model.save_pretrained(tmp_path)
    image_processor(model.config.vision_config.patch_size).save_pretrained(tmp_path)
    trainer = Trainer.from_pretrained(tmp_path, device="cpu", dtype="fp32")
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    datum = seeing_datum(model, [(64, 96)], 3)
    from_file = dataclasses.replace(
        datum, images=[dataclasses.replace(datum.images[0], digest="file", pixels=png(picture(64, 96, 300)))]
    )
    ours = the_result(trainer.forward([TrainItem("a", [from_file])])[0]).logprobs
    theirs = the_result(trainer.forward([TrainItem("a", [datum])])[0]).logprobs
    assert_logprobs_close(ours, theirs)
    assert trainer.numbers().images_seen == 2


def test_a_vision_model_whose_images_we_do_not_place_loads_for_text(tmp_path) -> None:
    model = seeing_model("qwen2_vl")
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")  # of a processor that we do not know, and do not need
    trainer = Trainer.from_pretrained(tmp_path, device="cpu", dtype="fp32")
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    datum = random_datum(model.get_decoder(), "cross_entropy", 19, seed=0)
    result = the_result(trainer.forward([TrainItem("a", [datum])])[0])
    with torch.no_grad():
        assert_logprobs_close(result.logprobs, [target_logprobs(model, datum).numpy()])
    (failure,) = trainer.forward([TrainItem("a", [seeing_datum(base("qwen2_5_vl"), [(64, 96)], 3)])])
    assert isinstance(failure, TrainFailure)
    assert "reads text only" in str(failure.error)
