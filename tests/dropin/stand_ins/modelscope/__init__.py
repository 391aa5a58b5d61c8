"""Stand-in for ModelScope's client library: models and datasets are folders below the one that DROPIN_HUB names."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelscope.hub.api import HubApi
from modelscope.hub.errors import NotExistError

__all__ = ["AutoTokenizer", "HubApi", "MsDataset", "dataset_snapshot_download", "snapshot_download"]


def _folder(kind: str, name: str) -> Path:
    folder = Path(os.environ["DROPIN_HUB"]) / kind / name
    if not folder.is_dir():
        raise NotExistError(f"there is no {kind.removesuffix('s')} {name}")
    return folder


def snapshot_download(model_id: str, *positional: Any, repo_type: str = "model", **options: Any) -> str:
    return str(_folder(f"{repo_type or 'model'}s", model_id))


def dataset_snapshot_download(dataset_id: str, **options: Any) -> str:
    return str(_folder("datasets", dataset_id))


class MsDataset:
    @staticmethod
    def load(
        dataset_name: str,
        *positional: Any,
        subset_name: str | None = None,
        split: str | Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        from datasets import Dataset

        folder = _folder("datasets", dataset_name)
        named = folder / subset_name if subset_name not in (None, "default") else folder
        rows = [json.loads(line) for line in (named / f"{split or 'train'}.jsonl").open()]
        return Dataset.from_list(rows)


class AutoTokenizer:
    @staticmethod
    def from_pretrained(model_id: str, **options: Any) -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(snapshot_download(model_id))
