"""Uploads of the stand-in for ModelScope's hub: copies of folders."""

import os
import shutil
from pathlib import Path
from typing import Any


class HubApi:
    def __init__(self, **options: Any) -> None:
        self.token: str | None = options.get("token")

    def login(self, access_token: str | None = None, **options: Any) -> None:
        self.token = access_token

    def create_repo(self, repo_id: str, **options: Any) -> str:
        _uploaded(repo_id).mkdir(parents=True, exist_ok=True)
        return repo_id

    def upload_folder(self, repo_id: str, folder_path: str, path_in_repo: str = "", **options: Any) -> str:
        shutil.copytree(folder_path, _uploaded(repo_id) / path_in_repo, dirs_exist_ok=True)
        return repo_id

    def get_model_files(self, model_id: str, **options: Any) -> list[dict[str, Any]]:
        folder = Path(os.environ["DROPIN_HUB"]) / "models" / model_id
        return [{"Path": file.name, "Size": file.stat().st_size} for file in folder.iterdir()]


def _uploaded(repo_id: str) -> Path:
    return Path(os.environ["DROPIN_HUB"]) / "uploads" / repo_id
