"""The library's models on rows and conversations with images, beside plain Transformers and PEFT."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.models.plain_training import assert_close
from tests.support.models.seeing_models import picture
from twinkle import hub
from twinkle.errors import InvalidInputError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.processor import InputProcessor
from twinkle.sampler import LocalSampler
from twinkle.template import Qwen2_5VLTemplate, Qwen3_5Template, Template

PAD = 261
FAMILIES = {"qwen2.5-vl-tiny": Qwen2_5VLTemplate, "qwen3-vl-tiny": Qwen3_5Template, "qwen3.5-tiny": Qwen3_5Template}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0}
Row = dict[str, Any]


@cache
def template(name: str) -> Template:
    return FAMILIES[name](f"random://{name}")


def trajectories() -> list[Row]:
    """Return conversations with two images, with none, and with one."""
    images = [Pillow.fromarray(picture(*size, seed)) for seed, size in enumerate([(64, 100), (60, 40), (90, 60)])]
    asked = [
        ("<image>and<image>?", "red", images[:2]),
        ("Hello", "yes and no", []),
        ("<image>What?", "blue", images[2:]),
    ]
    return [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "images": seen,
        }
        for question, answer, seen in asked
    ]


def rows(name: str) -> list[Row]:
    """Return the rows; the model has drawn the image token in the last answer."""
    made = template(name).batch_encode(trajectories())
    made[2] = template(name).concat_input_feature(made[2], [65, PAD, 66])
    return made


class Plain:
    """One PEFT adapter on Transformers' own model, which sees one row at a time."""

    def __init__(self, name: str, weights: dict[str, Tensor]) -> None:
        local = hub.resolve(f"random://{name}")
        with torch.random.fork_rng():
            torch.manual_seed(local.random_seed)
            model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(local.path), dtype=torch.float32)
        self.inner = model.model
        self.model = peft.get_peft_model(model, peft.LoraConfig(**LORA, exclude_modules=r".*visual\..*")).eval()
        own = {key.replace(".default.", "."): value for key, value in self.model.named_parameters()}
        self.trained = {key: value for key, value in own.items() if value.requires_grad}
        assert self.trained.keys() == weights.keys()
        with torch.no_grad():
            for key, value in self.trained.items():
                value.copy_(weights[key])

    def logps(self, row: Row) -> Tensor:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        given: dict[str, Tensor] = {"inputs_embeds": self.inner.get_input_embeddings()(ids)[None]}
        if "pixel_values" in row:
            pixels, grids = (torch.from_numpy(row[key]) for key in ("pixel_values", "image_grid_thw"))
            types = torch.tensor(row["mm_token_type_ids"])[None]
            axes, _ = self.inner.get_rope_index(ids[None], types, image_grid_thw=grids)
            seen = self.inner.get_image_features(pixels, grids, return_dict=True)
            mask = types == 1
            given["inputs_embeds"] = given["inputs_embeds"].masked_scatter(
                mask[..., None], torch.cat(list(seen.pooler_output))
            )
            given["position_ids"] = axes
            if getattr(seen, "deepstack_features", None):
                given["visual_pos_masks"] = mask
                features = seen.deepstack_features  # of all images, or of each
                given["deepstack_visual_embeds"] = [
                    each if isinstance(each, Tensor) else torch.cat(each) for each in features
                ]
        hidden = self.inner.language_model(**given, use_cache=False).last_hidden_state
        logits = self.model.base_model.model.lm_head(hidden)[0]
        return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]

    def step(self, batch: list[Row], lr: float) -> list[Tensor]:
        found = [self.logps(row) for row in batch]
        learnt = torch.cat([each[torch.tensor(row["labels"]) != -100] for each, row in zip(found, batch, strict=True)])
        (-learnt.mean()).backward()
        with torch.no_grad():
            for value in self.trained.values():
                value -= lr * value.grad
                value.grad = None
        return [each.detach() for each in found]


def single(name: str) -> TransformersModel:
    model = TransformersModel(model_id=f"random://{name}", device="cpu", mixed_precision="fp32")
    model.add_adapter_to_model("a", LORA, seed=3)
    return model


def multi(name: str) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(
        model_id=f"random://{name}", device="cpu", mixed_precision="fp32", memory_budget_bytes=2**29
    )
    model.add_adapter_to_model("a", LORA, seed=3)
    return model


def assert_logps(outputs: Any, batch: list[Row], wanted: list[Tensor]) -> None:
    for found, row, own in zip(outputs["logps"], batch, wanted, strict=True):
        learnt = torch.tensor(row["labels"]) != -100
        torch.testing.assert_close(found[: len(own)][learnt], own[learnt], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [single, multi])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_equals_plain_transformers_and_peft(name: str, make: Callable[[str], Any]) -> None:
    model, batch = make(name), rows(name)
    plain = Plain(name, model.get_state_dict(adapter_name="a"))
    model.set_optimizer("SGD", lr=0.5, weight_decay=0.0, adapter_name="a")
    for _ in range(2):
        outputs = model.forward_backward(inputs=batch, adapter_name="a")
        assert_logps(outputs, batch, plain.step(batch, 0.5))
        model.clip_grad_and_step(1e9, adapter_name="a")
    tolerance = 1e-4 if name == "qwen3.5-tiny" else 1e-5  # its gates amplify rounding
    assert_close(model.get_state_dict(adapter_name="a"), plain.trained, tolerance)
    with torch.no_grad():
        wanted = [plain.logps(row) for row in batch]
    assert_logps(model.forward_only(inputs=batch, adapter_name="a", micro_batch_size=1), batch, wanted)
    model.set_processor(InputProcessor, padding_free=True, adapter_name="a")
    assert_logps(model.forward_only(inputs=batch, adapter_name="a"), batch, wanted)
    lists = [{key: np.asarray(row[key]).tolist() for key in row if key != "messages"} for row in batch]
    assert_logps(model.forward_only(inputs=lists, adapter_name="a"), batch, wanted)
    model.set_template(FAMILIES[name], adapter_name="a")
    conversations = model.forward_only(inputs=trajectories()[:2], adapter_name="a")
    assert_logps(conversations, batch[:2], wanted[:2])


@pytest.mark.parametrize("make", [single, multi])
def test_a_sampler_sees_what_the_model_sees(make: Callable[[str], Any]) -> None:
    name = "qwen3-vl-tiny"
    model = make(name)
    sampler = LocalSampler(model, kv_budget_bytes=2**20)
    sampler.set_template("Qwen3_5Template")
    asked = [{**each, "messages": each["messages"][:1]} for each in trajectories()]
    params = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1}
    responses = sampler.sample(asked, params, adapter_name="a")
    grown = [response.sequences[0].new_input_feature for response in responses]
    assert [len(each["messages"]) for each in grown] == [2, 2, 2]
    for response, feature in zip(responses, grown, strict=True):
        outputs = model.forward_only(inputs=[feature], adapter_name="a")
        drawn = [pair[0][1] for pair in response.sequences[0].logprobs]
        learnt = torch.tensor(feature["labels"]) != -100
        assert int(learnt.sum()) == len(drawn)
        torch.testing.assert_close(outputs["logps"][0][learnt], torch.tensor(drawn), atol=1e-5, rtol=1e-5)
    sampler.reset_prefix_cache()
    sampler.reset_encoder_cache()
    sampler.reset_mm_cache()
    encoded = sampler.template.batch_encode(asked, add_generation_prompt=True)
    shown = sampler.template.get_vllm_input_ids(encoded[0]["input_ids"].tolist())
    encoded[0] = {"input_ids": shown, "images": asked[0]["images"]}  # one image token each, and the images beside them
    again = sampler.sample(encoded, params, adapter_name="a")
    assert [each.sequences[0].tokens for each in again] == [each.sequences[0].tokens for each in responses]


def test_mistakes() -> None:
    model, row = single("qwen3-vl-tiny"), rows("qwen3-vl-tiny")[0]
    for changed, message in (
        ({"pixel_values": row["pixel_values"][:-4]}, r"inputs\.pixel_values: got 'shape"),
        ({"pixel_values": None}, r"inputs\.pixel_values: got None"),
        ({"image_grid_thw": row["image_grid_thw"][:1]}, r"inputs\.image_grid_thw: got 'grids of 6 tokens'"),
        ({"pixel_values_videos": row["pixel_values"]}, r"inputs\.pixel_values_videos.*videos and sounds"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            model.forward_only(inputs=[{**row, **changed}])
    text = TransformersModel(model_id="random://qwen3-tiny", device="cpu")
    with pytest.raises(InvalidInputError, match=r"inputs\.pixel_values: .*this model reads text only"):
        text.forward_only(inputs=[row])


def test_without_adapters_the_tower_is_trained_too() -> None:
    name = "qwen3-vl-tiny"
    model, row = TransformersModel(model_id=f"random://{name}", device="cpu", mixed_precision="fp32"), rows(name)[0]
    model.set_optimizer("SGD", lr=0.1)
    model.forward_backward(inputs=[row])
    model.clip_grad_norm(1e9)
    ours = {key: value.grad.clone() for key, value in model.model.named_parameters() if value.grad is not None}
    model.model.zero_grad()
    given = {key: torch.from_numpy(row[key])[None] for key in ("input_ids", "mm_token_type_ids")}
    pixels = {key: torch.from_numpy(row[key]) for key in ("pixel_values", "image_grid_thw")}
    logits = model.model(**given, **pixels).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(row["labels"])).backward()
    theirs = {key: value.grad for key, value in model.model.named_parameters() if value.grad is not None}
    assert any(".visual.patch_embed." in key for key in theirs)
    assert_close(ours, theirs)
