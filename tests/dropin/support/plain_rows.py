"""The rows that a script trains on, read from the hub folder."""

from pathlib import Path
from typing import Any

from twinkle.dataset import Dataset, DatasetMeta

Rows = list[dict[str, Any]]


def encoded(model_folder: Path, name: str, preprocessor: Any, template: str = "Qwen3_5Template") -> Rows:
    """Return all rows of a dataset, encoded."""
    dataset = Dataset(DatasetMeta(str(model_folder.parents[2] / "datasets" / name / "train.jsonl")))
    dataset.set_template(template, model_id=str(model_folder))
    dataset.map(preprocessor)
    dataset.encode()
    return [dataset[number] for number in range(len(dataset))]


def batches(rows: Rows, count: int, size: int) -> list[Rows]:
    """Return the first ``count`` rows, again from the start after the last one, in batches."""
    wrapped = [rows[number % len(rows)] for number in range(count)]
    return [wrapped[start : start + size] for start in range(0, count, size)]
