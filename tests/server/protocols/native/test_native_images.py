"""Images from the client to the server: rows and conversations, for training and for sampling."""

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig as LocalConfig
from PIL import Image as Pillow

from tests.support.models.sdk_images import SEES, jpeg, png
from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import BACKEND, Server, torch_config
from tests.support.servers.serving import SAMPLER
from twinkle.images import EncodedImage
from twinkle.model import MultiLoraTransformersModel as LocalModel
from twinkle.template import Qwen2_5VLTemplate
from twinkle.utils import load_image
from twinkle_client import InvalidRequestError, LoraConfig, TwinkleClient
from twinkle_client.client.images import rows_with_images
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import DatasetMeta, LazyDataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

pytestmark = pytest.mark.skipif(
    BACKEND == "megatron" or SAMPLER != "torch", reason="images are for Transformers' models and the torch sampler"
)
CAT, DOG = png(100, 70, 1), jpeg(64, 130, 2)
GREEDY = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("sees"), torch_config(SEES)).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[TwinkleClient]:
    with TwinkleClient(server.url, "sees") as connected:
        yield connected


@pytest.fixture(scope="module")
def template() -> Qwen2_5VLTemplate:
    return Qwen2_5VLTemplate(SEES)


@cache
def local_model() -> LocalModel:
    model = LocalModel(model_id=SEES, device="cpu", mixed_precision="fp32", memory_budget_bytes=2**29)
    model.add_adapter_to_model("fresh", LocalConfig(r=4, target_modules="all-linear"))
    return model


def adapter(client: TwinkleClient, name: str = "default") -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(SEES, client=client)
    model.add_adapter_to_model(name, LoraConfig(r=4), seed=5)
    model.set_template("Qwen2_5VLTemplate")
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def data_uri(image: EncodedImage) -> str:
    return f"data:image/{image.format};base64,{base64.b64encode(image.data).decode()}"


def picture(image: EncodedImage) -> Pillow.Image:
    return Pillow.open(io.BytesIO(image.data))


def talk(*images: Any, answer: str = "a cat") -> dict[str, Any]:
    """Return a conversation about two images, which stand beside its messages."""
    said = [{"role": "user", "content": "<image>What is it? Not <image>!"}, {"role": "assistant", "content": answer}]
    return {"messages": said if answer else said[:1], "images": list(images)}


def logps(model: Any, inputs: Any) -> np.ndarray:
    return np.concatenate([np.asarray(row) for row in model.forward_only(inputs=inputs)["logps"]])


def local_logps(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    outputs = local_model().forward_only(inputs=rows, adapter_name="fresh")["logps"]
    return np.concatenate([own[: len(row["input_ids"])].numpy() for own, row in zip(outputs, rows, strict=True)])


def test_every_form_is_the_same(client: TwinkleClient, template: Qwen2_5VLTemplate, tmp_path: Path) -> None:
    """Rows with patches, as numbers or packed, and conversations in all forms: the numbers of the local library."""
    path = tmp_path / "cat.png"
    path.write_bytes(CAT.data)
    row = template.encode(talk(picture(CAT), picture(DOG)))
    expected = local_logps([row])
    model = MultiLoraTransformersModel(SEES, client=client)
    model_of_rows = {name: np.asarray(row[name]).tolist() for name in row if name != "messages"}
    assert {"pixel_values", "image_grid_thw", "mm_token_type_ids", "position_ids"} < model_of_rows.keys()
    forms: list[Any] = [
        row,
        model_of_rows,
        talk(picture(CAT), data_uri(DOG)),
        talk(str(path), DOG.data),
        talk({"bytes": CAT.data, "path": "cat.png"}, base64.b64encode(DOG.data).decode()),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "path": path},
                        {"type": "text", "text": "What is it? Not "},
                        {"type": "image", "image": picture(DOG)},
                        {"type": "text", "text": "!"},
                    ],
                },
                {"role": "assistant", "content": "a cat"},
            ]
        },
    ]
    for form in forms:
        np.testing.assert_allclose(logps(model, [form]), expected, atol=1e-5)
    both = logps(model, [row, template.encode({"messages": talk("", "")["messages"]})])
    np.testing.assert_allclose(both[: len(expected)], expected, atol=1e-5)  # beside a row of text


def test_sampled_features_can_be_trained_on(client: TwinkleClient, template: Qwen2_5VLTemplate) -> None:
    """Conversations, rows with patches, and prompts with one token for each image and the images beside them."""
    model = adapter(client)
    sampler = Sampler(model)
    sampler.set_template("Qwen2_5VLTemplate")
    asked = talk(picture(CAT), picture(DOG), answer="")
    row = template.encode(asked, add_generation_prompt=True)
    short = {"input_ids": np.asarray(template.get_vllm_input_ids(row["input_ids"]))}
    if len(short["input_ids"]) == len(row["input_ids"]):
        pad = row["mm_token_type_ids"] == 1
        short = {"input_ids": row["input_ids"][~pad | ~np.append(False, pad[:-1])]}
    images = [picture(CAT), picture(DOG)]
    inputs = [asked, row, {**short, "images": images}, {**short, "multi_modal_data": {"image": images}}]
    answers = [sampler.sample([each], GREEDY, adapter_name="default")[0].sequences[0] for each in inputs]
    for answer in answers:
        assert answer.tokens == answers[0].tokens
        feature = answer.new_input_feature
        assert feature is not None
        assert feature["input_ids"][: len(row["input_ids"])] == row["input_ids"].tolist()
        trained = logps(model, [feature])[len(row["input_ids"]) - 1 :][: len(answer.tokens)]
        assert answer.logprobs is not None
        np.testing.assert_allclose(trained, [pairs[0][1] for pairs in answer.logprobs if pairs], atol=1e-5)


def test_a_kill_loses_nothing(tmp_path: Path, template: Qwen2_5VLTemplate) -> None:
    """The journal has files and patches: a replay gives the weights that were there before."""
    server = Server(tmp_path, torch_config(SEES)).start()
    try:
        tenant = NativeTenant(server.url, "killed", SEES.removeprefix("random://"))
        row = template.encode(talk(picture(CAT), picture(DOG)))
        numbers = {name: np.asarray(row[name]).tolist() for name in row if name != "messages"}
        sent = talk(data_uri(CAT), data_uri(DOG))
        for name in ("killed", "whole"):
            tenant.add_adapter(name, seed=3)
            tenant.verb("set_optimizer", adapter_name=name, optimizer_cls="AdamW", lr=1e-2)
        for number, inputs in enumerate(
            (numbers, sent, rows_with_images({**numbers, "pixel_values": row["pixel_values"]}))
        ):
            tenant.verb("forward_backward", adapter_name="whole", inputs=[inputs])
            tenant.verb("step", adapter_name="whole")
            tenant.verb("forward_backward", adapter_name="killed", inputs=[inputs])
            if number > 0:
                server.kill()
                server.start()
            tenant.verb("step", adapter_name="killed")
        after = [tenant.verb("forward_only", adapter_name=name, inputs=[sent])["logps"] for name in ("whole", "killed")]
        np.testing.assert_allclose(after[0], after[1], atol=1e-5)
        assert "Traceback" not in server.log()
    finally:
        server.close()


def test_batches_of_a_dataset_on_the_server(client: TwinkleClient, template: Qwen2_5VLTemplate) -> None:
    rows = [talk(data_uri(CAT), data_uri(DOG)), talk(data_uri(DOG), data_uri(CAT), answer="a dog")]
    model = adapter(client)
    whole = [template.encode(each) for each in rows]
    second = np.flatnonzero(whole[0]["mm_token_type_ids"])[-1]  # rows that are cut here have one image left
    for options in (
        {},
        {"max_length": int(second), "truncation_strategy": "right"},
        {"max_length": len(whole[0]["input_ids"]) - 8, "truncation_strategy": "left"},
        {"max_length": 3, "truncation_strategy": "right"},
    ):
        dataset = LazyDataset(DatasetMeta(data=rows), client=client)
        dataset.set_template("Qwen2_5VLTemplate", model_id=SEES, **options)
        dataset.encode()
        (batch,) = list(DataLoader(dataset=dataset, batch_size=2, shuffle=False, client=client))
        expected = local_logps([template.with_options(**options).encode(each) for each in rows])
        np.testing.assert_allclose(logps(model, batch), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"images": ["https://example.org/a.png", "x"]}, "images[0]: got 'https://example.org/a.png'"),
        ({"images": ["/etc/passwd", "x"]}, "images[0]: got '/etc/passwd"),
        ({"images": [{"path": "/etc/passwd"}]}, "images[0].path: got '/etc/passwd"),
        ({"videos": ["x"]}, "videos"),
        ({"audios": ["x"]}, "audios"),
        ({"images": ["AAAA"]}, "images[0]: got '3 bytes that begin with"),
    ],
    ids=["a URL", "a path", "a path in a dict", "videos", "sounds", "no image"],
)
def test_conversations_that_the_server_refuses(server: Server, changed: dict[str, Any], said: str) -> None:
    tenant = NativeTenant(server.url, "refused", SEES.removeprefix("random://"))
    tenant.add_adapter("a")
    refused = tenant.refusal("forward_backward", adapter_name="a", inputs=[{**talk(), **changed}])
    assert said in refused
    http = tenant.http.post(
        f"/api/v1/sampler/{tenant.model}/twinkle/sample",
        json={"inputs": [{**talk(), **changed}], "sampling_params": {"max_tokens": 1}},
    )
    assert (http.status_code, said in http.json()["detail"]) == (400, True)


def test_rows_that_the_server_refuses(server: Server, template: Qwen2_5VLTemplate) -> None:
    tenant = NativeTenant(server.url, "refused", SEES.removeprefix("random://"))
    tenant.add_adapter("a")
    row = template.encode(talk(picture(CAT), picture(DOG)))
    plain: dict[str, Any] = {name: np.asarray(row[name]).tolist() for name in row if name != "messages"}
    length, patches = len(plain["input_ids"]), plain["pixel_values"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"image_grid_thw": None}, "inputs[0].image_grid_thw: got None"),
        ({"image_grid_thw": [[1, 2, 2]]}, "inputs[0].image_grid_thw: got 'grids of 1 tokens'"),
        ({"image_grid_thw": [[2, 4, 4], [1, 2, 2]]}, "inputs[0].image_grid_thw[0]: got [2, 4, 4]"),
        ({"pixel_values": patches[:-4]}, "inputs[0].pixel_values: got 'shape"),
        ({"pixel_values": [[0.5, "x"]]}, "inputs[0].pixel_values: got"),
        ({"pixel_values": [[0.5], [0.5, 1.0]]}, "inputs[0].pixel_values: got"),
        ({"pixel_values": "numbers"}, "inputs[0].pixel_values: got 'numbers'"),
        ({"pixel_values": {"dtype": "float32", "shape": [1, 9], "data": "AAAA"}}, "inputs[0].pixel_values.shape"),
        ({"pixel_values": None}, "inputs[0].image_grid_thw: got 'grids'"),
        ({"attention_mask": [0] + [1] * (length - 1)}, "inputs[0].attention_mask: got 'padding'"),
        ({"position_ids": [0] * length}, "inputs[0].position_ids: got"),
        ({"mm_token_type_ids": [1]}, "inputs[0].mm_token_type_ids: got '1 numbers'"),
        ({"pixel_values_videos": [[1.0]]}, "inputs[0].pixel_values_videos"),
        ({"pixel_values": None, "image_grid_thw": None, "images": [data_uri(CAT)]}, "image tokens"),
        ({"pixel_values": None, "image_grid_thw": None, "images": ["a.png", "b.png"]}, "inputs[0].images[0]"),
    ]
    for changed, said in wrong:
        assert said in tenant.refusal("forward_backward", adapter_name="a", inputs=[{**plain, **changed}])
    beside = {"input_ids": [5, 6], "multi_modal_data": {"video": []}}
    assert "inputs[0].multi_modal_data: got" in tenant.refusal("forward_backward", adapter_name="a", inputs=[beside])
    ok = tenant.verb("forward_only", adapter_name="a", inputs=[plain])
    assert len(ok["logps"][0]) == length


def test_what_the_client_cannot_read(client: TwinkleClient, tmp_path: Path) -> None:
    model = MultiLoraTransformersModel(SEES, client=client)
    for image, said in (
        ("missing.png", r"inputs\[0\]\.images\[0\]: got 'missing.png'"),
        (tmp_path / "missing.png", "a file that can be read"),
        (object(), "a Pillow image"),
        (b"no image", "an image file"),
        ("http://127.0.0.1:9/a.png", "a URL that answers"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            model.forward_only(inputs=[talk(image, data_uri(DOG))])


def test_other_formats_become_png() -> None:
    written = io.BytesIO()
    picture(CAT).save(written, "BMP")
    sent = rows_with_images({"messages": [], "images": [written.getvalue()]})["images"][0]
    assert sent.startswith("data:image/png;base64,")
    with Pillow.open(io.BytesIO(base64.b64decode(sent.partition(",")[2]))) as back:
        np.testing.assert_array_equal(np.asarray(back), np.asarray(picture(CAT)))
    assert json.dumps(sent)


def test_the_client_makes_of_a_picture_what_the_library_makes() -> None:
    grey = Pillow.fromarray(np.array([[0, 257, 30000, 65535]], np.int32))
    assert grey.mode == "I"
    for image in (grey, grey.convert("I;16")):
        sent = rows_with_images({"messages": [], "images": [image]})["images"][0]
        np.testing.assert_array_equal(np.asarray(load_image(sent)), np.asarray(load_image(image)))
        assert np.asarray(load_image(sent))[0, :, 0].tolist() == [0, 1, 116, 255]
    text = "iVBORw0K" * 64  # base64, too long for the name of a file
    assert rows_with_images({"messages": [], "images": [text]})["images"] == [text]
