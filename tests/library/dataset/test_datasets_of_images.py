"""Datasets with images: columns of images, preprocessors that put them into messages, and encoded rows."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.support.models.seeing_models import picture
from twinkle.dataset import Dataset, DatasetMeta, LazyDataset, PackingDataset
from twinkle.errors import UnsupportedError
from twinkle.reward import MultiModalAccuracyReward
from twinkle.template import Qwen3_5Template

MODEL = "random://qwen3-vl-tiny"


def file(seed: int) -> dict[str, Any]:
    written = io.BytesIO()
    Pillow.fromarray(picture(64, 64, seed)).save(written, "PNG")
    return {"bytes": written.getvalue(), "path": None}


def questions(count: int = 3) -> DatasetMeta:
    rows = [{"image": file(i), "problem": f"How many {i}?", "solution": f"<answer>{i}</answer>"} for i in range(count)]
    return DatasetMeta(data=rows)


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    asked = [{"role": "user", "content": "<image>" + row["problem"]}, {"role": "assistant", "content": "three"}]
    return {"messages": asked, "images": [row["image"]]}


def conversations(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [conversation(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    return {name: [row[name] for row in rows] for name in ("messages", "images")}


@pytest.mark.parametrize("decode", [None, True, False])
def test_a_lazy_dataset_encodes_images(decode: bool | None) -> None:
    dataset = LazyDataset(questions())
    if decode is not None:
        dataset.cast_column("image", decode=decode)
    dataset.set_template(Qwen3_5Template, model_id=MODEL)
    dataset.map("CLEVRProcessor")
    trajectory = dataset[1]
    dataset.encode(add_generation_prompt=True)
    row = dataset[1]
    assert row["pixel_values"].shape == (16, 1536)
    assert row["image_grid_thw"].tolist() == [[1, 4, 4]]
    np.testing.assert_array_equal(np.asarray(row["messages"][1]["content"][0]["image"]), picture(64, 64, 1))
    answered = [*row["messages"], {"role": "assistant", "content": "<think>…</think><answer> 1 </answer>"}]
    assert MultiModalAccuracyReward()([{**trajectory, "messages": answered}]) == [1.0]


def test_a_stored_dataset_has_images_in_a_column_of_their_own() -> None:
    dataset = Dataset(questions())
    dataset.cast_column("image")
    with pytest.raises(UnsupportedError, match=r"messages: blocks with images cannot be stored.*LazyDataset"):
        dataset.map("CLEVRProcessor")
    dataset.map(conversations, remove_columns=["image", "problem", "solution"])
    template = Qwen3_5Template(MODEL)
    dataset.set_template(template)
    dataset.encode()
    row, lazy = dataset[2], template.encode(conversation({"problem": "How many 2?", "image": file(2)}))
    assert row["messages"][0]["content"] == "<image>How many 2?"
    for name in ("input_ids", "labels", "position_ids", "image_grid_thw", "mm_token_type_ids", "pixel_values"):
        np.testing.assert_array_equal(np.asarray(row[name]), lazy[name])


def test_packed_rows_keep_their_images() -> None:
    dataset = PackingDataset(questions(2))
    dataset.map(conversations, remove_columns=["image", "problem", "solution"])
    dataset.set_template(Qwen3_5Template, model_id=MODEL, max_length=256)
    dataset.encode(remove_columns=["images", "messages"])
    dataset.pack_dataset()
    (row,) = list(dataset)
    template = Qwen3_5Template(MODEL)
    alone = [template.encode(conversation({"problem": f"How many {i}?", "image": file(i)})) for i in range(2)]
    for name, axis in (("input_ids", 0), ("pixel_values", 0), ("image_grid_thw", 0), ("position_ids", -1)):
        np.testing.assert_array_equal(row[name], np.concatenate([each[name] for each in alone], axis=axis))
