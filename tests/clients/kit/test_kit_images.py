"""The client of twinkle-kit, unmodified, sends rows and conversations with images (``make test-kit``).

Its own template needs torchvision and qwen_vl_utils, so the library's template makes the rows beforehand.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.kit.recording import PYTHON, run_kit
from tests.support.models.sdk_images import SEES, jpeg, png
from tests.support.servers.running import Server, torch_config
from twinkle.template import Qwen2_5VLTemplate

pytestmark = pytest.mark.kit

MODEL = "org/sees"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip("twinkle-kit is not installed; `make test-kit` does that")
    running = Server(tmp_path_factory.mktemp("sees"), torch_config(SEES, aliases=[MODEL])).start()
    yield running
    assert running.stop() == 0


def talk(image: Any, answer: str) -> dict[str, Any]:
    said = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": answer}]
    uri = f"data:image/{image.format};base64,{base64.b64encode(image.data).decode()}"
    return {"messages": said if answer else said[:1], "images": [uri]}


def test_rows_messages_and_samples(server: Server, tmp_path: Path) -> None:
    template = Qwen2_5VLTemplate(SEES)
    talks = [talk(png(100, 70, 1), "a cat"), talk(jpeg(64, 130, 2), "a dog")]
    rows = [template.encode(each) for each in talks]
    plain = [{name: np.asarray(row[name]).tolist() for name in row if name != "messages"} for row in rows]
    assert all({"pixel_values", "image_grid_thw", "mm_token_type_ids"} <= row.keys() for row in plain)
    asked = talk(png(100, 70, 1), "")
    prompt = template.encode(asked, add_generation_prompt=True)
    is_image = prompt["mm_token_type_ids"] == 1
    short = prompt["input_ids"][~is_image | ~np.append(False, is_image[:-1])].tolist()
    prompts = [asked, {"input_ids": short, "images": asked["images"]}]
    (tmp_path / "given.json").write_text(json.dumps({"rows": plain, "messages": talks, "prompts": prompts}))
    seen = run_kit("see.py", server.url, MODEL, str(tmp_path / "given.json"))[-1]
    for one, other in zip(seen["rows"], seen["messages"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert seen["losses"][-1] < seen["losses"][0]
    assert seen["tokens"][0] == seen["tokens"][1]
