"""Templates of vision models: conversations with images in every form become rows with patches."""

import base64
import io
import threading
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from tests.support.models.seeing_models import picture
from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import EncodedImage, ImageLimits, ImageSize, ImageSource
from twinkle.template import Qwen2_5VLTemplate, Qwen3_5Template, Template
from twinkle.template.media import images_of
from twinkle.utils import load_image, load_mm_file

PAD, START, END = 261, 259, 260
FAMILIES = {"qwen2.5-vl-tiny": Qwen2_5VLTemplate, "qwen3-vl-tiny": Qwen3_5Template, "qwen3.5-tiny": Qwen3_5Template}
IMAGE = Pillow.fromarray(picture(70, 100, seed=1))
OTHER = Pillow.fromarray(picture(40, 40, seed=2))


@cache
def template(name: str = "qwen3-vl-tiny") -> Template:
    return FAMILIES[name](f"random://{name}")


def file_bytes(image: Pillow.Image, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def asked(content: object, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a cat"}]
    return {"messages": messages, **more}


def block(image: object, key: str = "image") -> dict[str, object]:
    return {"type": "image", key: image}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_what_the_models_own_parts_make(name: str) -> None:
    row = template(name).encode(asked("<image>What is <image>this?", images=[IMAGE, OTHER]))
    folder = hub.resolve(f"random://{name}").path
    own = AutoImageProcessor.from_pretrained(folder, backend="pil")(images=[IMAGE, OTHER], return_tensors="np")
    np.testing.assert_array_equal(row["image_grid_thw"], own["image_grid_thw"])
    np.testing.assert_array_equal(row["pixel_values"], own["pixel_values"])
    assert row["pixel_values"].dtype == np.float32
    counts = row["image_grid_thw"].prod(1) // 4
    runs = "".join("i" if token == PAD else "t" for token in row["input_ids"])
    assert [len(run) for run in runs.split("t") if run] == counts.tolist()
    np.testing.assert_array_equal(row["mm_token_type_ids"], row["input_ids"] == PAD)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    tensors = {key: torch.from_numpy(row[key]) for key in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    axes, _ = model.model.get_rope_index(
        tensors["input_ids"][None], tensors["mm_token_type_ids"][None], image_grid_thw=tensors["image_grid_thw"]
    )
    assert row["position_ids"].shape == (4, 1, row["length"])
    np.testing.assert_array_equal(row["position_ids"][0, 0], np.arange(row["length"]))
    np.testing.assert_array_equal(row["position_ids"][1:, 0], axes[:, 0])
    learnt = row["labels"][row["labels"] != -100]
    assert template(name).decode(learnt).strip() == "a cat<|im_end|>"


def test_every_form_of_an_image_gives_the_same_row(tmp_path: Path) -> None:
    data, path = file_bytes(IMAGE), tmp_path / "seen.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [
        IMAGE,
        data,
        EncodedImage(data, "png"),
        text,
        f"data:image/png;base64,{text}",
        str(path),
        path,
        path.as_uri(),
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        {"url": f"data:image/png;base64,{text}"},
    ]
    ways = [asked("Which animal?", images=[form]) for form in forms]
    ways += [asked([block(IMAGE, key), {"type": "text", "text": "Which animal?"}]) for key in ("image", "url", "path")]
    ways.append(asked([{"type": "image_url", "image_url": {"url": text}}, {"type": "text", "text": "Which animal?"}]))
    ways.append(asked([block(None), {"type": "text", "text": "Which animal?"}], images=[IMAGE]))
    ways.append(asked("<image>Which animal?", images=IMAGE))
    ways.append({"messages": [{**asked("Which animal?")["messages"][0], "images": [IMAGE]}, asked("")["messages"][1]]})
    rows = template().batch_encode(ways)
    for row in rows:
        assert template().decode(row["input_ids"]) == template().decode(rows[0]["input_ids"])
        np.testing.assert_array_equal(row["pixel_values"], rows[0]["pixel_values"])
        assert [image.size for image in images_of(row)] == [IMAGE.size]
        assert "images" not in row


def test_images_stand_where_the_conversation_says() -> None:
    encoded = template().encode(
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Look."}]},
                {"role": "user", "content": "First"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "then <image> <image>"},
            ],
            "images": [IMAGE, OTHER],
        }
    )
    text = template().decode(template().get_vllm_input_ids(encoded["input_ids"].tolist()))
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"then {seen}{seen}<|im_end|>" in text
    assert [image.size for image in images_of(encoded)] == [IMAGE.size, OTHER.size]
    missing = template().encode(asked("one <image>", images=[IMAGE, OTHER]), tokenize=False)
    assert f"user\n{seen}one {seen}<|im_end|>" in missing["prompt"]
    assert [image.size for image in images_of(missing)] == [IMAGE.size, OTHER.size]
    surplus = template().encode(asked("<image>one <image>", images=[IMAGE]), tokenize=False)
    assert f"user\n{seen}one <image><|im_end|>" in surplus["prompt"]


def test_images_of_a_message_stay_in_it() -> None:
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    empty, words = block(None), {"type": "text", "text": "and this?"}
    for first, second, images in (
        ("see <image>", "and this?", [IMAGE]),
        ("see <image>", [words], [IMAGE]),
        ("see <image>", [empty, words], [IMAGE]),
        ("see <image>", [empty, words], [IMAGE, OTHER]),
        ("see <image>", "<image>and this?", [IMAGE, OTHER]),
    ):
        messages = [
            {"role": "user", "content": first, "images": [OTHER]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": second, "images": images},
        ]
        row = template().encode({"messages": messages}, tokenize=False)
        assert f"user\nsee {seen}<|im_end|>" in row["prompt"]
        assert f"user\n{seen * len(images)}and this?<|im_end|>" in row["prompt"]
        assert [image.size for image in images_of(row)] == [OTHER.size, *(image.size for image in images)]


def test_images_in_lists_and_in_blocks_are_found_in_their_order() -> None:
    """Before and after the template has read the conversation."""
    third = Pillow.fromarray(picture(30, 30, seed=3))
    words = {"type": "text", "text": "?"}
    for content, images, expected in (
        ([block(IMAGE), words], [OTHER, third], [OTHER, third, IMAGE]),
        ([block(IMAGE), block(None), words], [OTHER], [IMAGE, OTHER]),
        ([block(IMAGE), block(None), words], [OTHER, third], [OTHER, IMAGE, third]),
    ):
        talk = {
            "messages": [
                {"role": "user", "content": content, "images": images},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": [block(IMAGE)]},
            ]
        }
        assert images_of(talk) == [*expected, IMAGE]
        row = template().encode(talk, tokenize=False)
        assert [image.size for image in images_of(row)] == [image.size for image in [*expected, IMAGE]]


def test_images_without_a_place_come_first() -> None:
    for content in ([block(None), {"type": "text", "text": "?"}], "<image>?"):
        row = template().encode(asked(content, images=[IMAGE, OTHER]), tokenize=False)
        assert [image.size for image in images_of(row)] == [IMAGE.size, OTHER.size]


def test_text_rows_have_no_fields_of_images() -> None:
    row = template().encode(asked("Hello", multi_modal_data={"image": None}))
    assert not {"pixel_values", "image_grid_thw", "mm_token_type_ids"} & row.keys()
    assert row["position_ids"].shape == (4, 1, row["length"])
    assert Template("random://qwen3-vl-tiny").encode(asked("Hello"))["position_ids"].ndim == 1


def test_the_answer_of_a_model_may_hold_the_image_token() -> None:
    prompt = template().encode(asked("What?", images=[IMAGE]), add_generation_prompt=True)
    grown = template().concat_input_feature(prompt, [PAD, 65, PAD])
    assert grown["mm_token_type_ids"].sum() == (prompt["input_ids"] == PAD).sum()
    before = int(grown["position_ids"][1:, 0, prompt["length"] - 1].max())
    assert grown["position_ids"][1, 0, -3:].tolist() == [before + 1, before + 2, before + 3]
    assert grown["labels"][-4:].tolist() == [PAD, 65, PAD, -100]
    assert len(grown["pixel_values"]) == len(prompt["pixel_values"])
    without_types = {key: value for key, value in prompt.items() if key != "mm_token_type_ids"}
    again = template().concat_input_feature(without_types, [PAD, 65, PAD])
    np.testing.assert_array_equal(again["mm_token_type_ids"], grown["mm_token_type_ids"])


def test_images_beside_tokens() -> None:
    wanted = template().encode(asked("What?", images=[IMAGE, OTHER]))
    one_each = template().get_vllm_input_ids(wanted["input_ids"].tolist())
    images = [file_bytes(IMAGE), OTHER]
    for given in (
        {"input_ids": one_each, "images": images},
        {"input_ids": one_each, "multi_modal_data": {"image": images}},
        {"input_ids": wanted["input_ids"], "images": images, "labels": wanted["labels"]},
        wanted,
    ):
        row = template().add_images(given)
        for name in ("input_ids", "position_ids", "image_grid_thw", "mm_token_type_ids", "pixel_values"):
            np.testing.assert_array_equal(row[name], wanted[name])
        np.testing.assert_array_equal(row.get("labels", wanted["labels"]), wanted["labels"])
    with pytest.raises(InvalidInputError, match="1 image tokens in the text and 2 images"):
        template().add_images({"input_ids": [1, PAD], "images": images})


def test_truncation_keeps_images_whole() -> None:
    whole = template().encode(asked("<image>between<image>after", images=[IMAGE, OTHER]))
    first = int(np.flatnonzero(whole["input_ids"] == PAD)[0])
    for strategy, most, count in (
        ("right", whole["length"] - 1, 2),
        ("right", first + 1, 0),
        ("left", whole["length"] - first - 1, 1),
        ("left", 3, 0),
    ):
        row = (
            template()
            .with_options(max_length=most, truncation_strategy=strategy)
            .encode(asked("<image>between<image>after", images=[IMAGE, OTHER]))
        )
        assert row["length"] <= most
        grids = row.get("image_grid_thw", np.zeros((0, 3), np.int64))
        assert len(grids) == count
        assert grids.prod(1).sum() == len(row.get("pixel_values", ())) == 4 * (row["input_ids"] == PAD).sum()
    assert template().with_options(max_length=4, truncation_strategy="delete").batch_encode([asked("<image>")]) == []
    with pytest.raises(InvalidInputError, match=r"exceeds max_length 9"):
        template().with_options(max_length=9).encode(asked("What?", images=[IMAGE]))
    with pytest.raises(InvalidInputError, match=r"truncation_strategy: got 'split'.*rows with images"):
        template().with_options(max_length=9, truncation_strategy="split").batch_encode([asked("?", images=[IMAGE])])


def test_a_server_reads_headers_only_and_no_paths(tmp_path: Path) -> None:
    (tmp_path / "seen.png").write_bytes(file_bytes(IMAGE))
    served = template().with_options()
    served.image_source, served.decodes_images = ImageSource(outside=False), False
    data = file_bytes(IMAGE)
    row = served.encode(asked("What?", images=[base64.b64encode(data).decode()]))
    own = template().encode(asked("What?", images=[IMAGE]))
    assert images_of(row) == [EncodedImage(data, "png")]
    assert "pixel_values" not in row
    for name in ("input_ids", "labels", "position_ids", "image_grid_thw", "mm_token_type_ids"):
        np.testing.assert_array_equal(row[name], own[name])
    outside = [str(tmp_path / "seen.png"), tmp_path / "seen.png", "http://x.org/seen.png", {"path": "/etc/hosts"}]
    for image in [*outside, (tmp_path / "seen.png").as_uri(), file_bytes(IMAGE, "BMP")]:
        with pytest.raises(InvalidInputError, match=r"^messages\[0\]\.content\[0\]"):
            served.encode(asked([block(image)]))
    assert ImageSource().read(file_bytes(IMAGE, "BMP")).size == IMAGE.size


def test_texts_with_images_are_measured_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_bytes(OTHER)
    data += bytes(1 + -len(data) % 3)  # so that the text ends with =
    text = base64.b64encode(data).decode()
    assert set("+/=") <= set(text)
    escaped = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert load_mm_file(f"data:image/png;base64,{escaped}").read() == data
    with pytest.raises(InvalidInputError, match="data:image/png;base64,…, or jpeg"):
        load_mm_file(f"data:image/png;base64,{text[:40]}%41{text[41:]}")
    monkeypatch.setattr("twinkle.images.sources._from_base64", lambda text: pytest.fail("a long text was read"))
    small = ImageSource(outside=False, limits=ImageLimits(file_bytes=len(data) // 4))
    for given in (text, f"data:image/png;base64,{escaped}", {"bytes": text}):
        with pytest.raises(InvalidInputError, match=rf"characters', allowed: at most {len(data) // 4} bytes"):
            small.open(given)


def test_an_image_in_dicts_in_dicts_is_refused() -> None:
    nested: object = "AAAA"
    for _ in range(5000):
        nested = {"bytes": nested}
    for source, allowed in ((ImageSource(), "a path or URL"), (ImageSource(outside=False), "read by the client")):
        with pytest.raises(InvalidInputError, match=rf"^images\[0\]\.bytes: got .*{allowed}"):
            source.open(nested, "images[0]")


def test_files_of_the_web_and_small_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    small, data = base64.b64encode(file_bytes(OTHER.crop((0, 0, 12, 12)))).decode(), file_bytes(IMAGE)
    assert 255 < len(small) < 4096  # too long for the name of a file
    assert load_image(small).size == (12, 12)
    (tmp_path / "seen.png").write_bytes(data)
    answers = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert load_mm_file(f"{url}/seen.png").read() == data
            np.testing.assert_array_equal(np.asarray(load_image(f"{url}/seen.png")), np.asarray(IMAGE))
            with pytest.raises(InvalidInputError, match=r"^image: .*a URL that answers \(HTTP Error 404"):
                load_image(f"{url}/none.png")
            with pytest.raises(InvalidInputError, match="got 'more than 9 bytes', allowed: at most 9 bytes"):
                ImageSource(limits=ImageLimits(file_bytes=9)).read(f"{url}/seen.png")
        finally:
            server.shutdown()
    with pytest.raises(InvalidInputError, match=r"^image: .*a whole image"):
        load_image(file_bytes(IMAGE, "TIFF")[:5000])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (asked("?", images=[3]), InvalidInputError, r"^images\[0\]: got '3'"),
        (asked("?", images=["no such file"]), InvalidInputError, r"^images\[0\].*no file, and no base64 text"),
        (asked([block(None)]), InvalidInputError, r"^messages\[0\]\.content\[0\].*without an image"),
        (asked([block(b"\x89PNG no more")]), InvalidInputError, r"^messages\[0\]\.content\[0\]\.data"),
        (asked("<|image_pad|>", images=[OTHER]), InvalidInputError, r"2 image tokens in the text and 1 images"),
        (asked("?", videos=["a.mp4"]), UnsupportedError, r"^videos: cannot be encoded; allowed: text and images"),
        (asked([{"type": "audio", "audio": "a.wav"}]), UnsupportedError, r"content\[0\] of type audio"),
        (asked({"type": "text", "text": "?"}), InvalidInputError, r"^messages\[0\]\.content: got .*a list of blocks"),
        (asked([block(OTHER), 5]), InvalidInputError, r"^messages\[0\]\.content\[1\]: got 5"),
        (asked([{"type": ["image"]}]), UnsupportedError, r"content\[0\] of type \['image'\]: .*text and images"),
        (asked("?", multi_modal_data={"image": OTHER}), InvalidInputError, r"^multi_modal_data: .*'images'"),
        (asked("?", multi_modal_data="x"), InvalidInputError, r"^multi_modal_data: got 'x'"),
        ({"messages": [{"role": "assistant", "content": [block(OTHER)]}]}, InvalidInputError, "image of the assistant"),
        (
            {"messages": [*asked("?")["messages"], {"role": "assistant", "content": "a", "images": [OTHER]}]},
            InvalidInputError,
            r"^messages\[2\]\.images: got 'an image of the assistant', allowed: images of user or tool",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "images": [OTHER]},
            InvalidInputError,
            r"^images\[0\].*no message is the user's",
        ),
    ],
)
def test_mistakes(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        template().encode(given)


def test_a_text_model_refuses_images() -> None:
    text = Template("random://qwen3-tiny")
    with pytest.raises(UnsupportedError, match="images cannot be encoded; allowed: text"):
        text.encode(asked("?", images=[OTHER]))
    with pytest.raises(InvalidInputError, match=r"^multi_modal_data: got"):
        text.encode(asked("?", multi_modal_data={"image": [OTHER]}))


@pytest.mark.parametrize("name", FAMILIES)
def test_patches_become_the_picture_again(name: str) -> None:
    processing = template(name).image_processing
    assert processing is not None
    seen = processing.resized_image(IMAGE)
    size = processing.size_seen(seen)
    assert size == ImageSize(
        *(side // 2 for side in template(name).encode(asked("", images=[IMAGE]))["image_grid_thw"][0, 1:])
    )
    np.testing.assert_array_equal(processing.picture(processing.patches_of(seen), size).rgb_HW3, seen.rgb_HW3)


def test_the_processor_of_a_vision_model(tmp_path: Path) -> None:
    processor = template().processor
    assert processor.tokenizer is template().tokenizer
    assert processor.image_token == "<|image_pad|>"
    processor.save_pretrained(str(tmp_path))
    assert {"preprocessor_config.json", "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}
