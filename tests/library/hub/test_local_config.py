"""The config.json of models that are on this machine already; nothing is downloaded or built for it."""

import json
from pathlib import Path

import pytest

from twinkle import hub
from twinkle.hub.local_config import read_local_config


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the caches of Twinkle and of Hugging Face by empty ones."""
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "twinkle"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def test_a_random_model(tmp_path: Path) -> None:
    config = read_local_config("random://llama-tiny")
    assert config is not None
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert not (tmp_path / "twinkle").exists()
    written = json.loads((hub.resolve("random://llama-tiny").path / "config.json").read_text())
    assert dict(config).items() <= written.items()


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_local_config(str(tmp_path)) == {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text("[not json")
    assert read_local_config(str(tmp_path)) is None


def test_a_model_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    commit = "0" * 40
    snapshot = tmp_path / "hf" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "hf" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hf" / "models--org--name" / "refs" / "main").write_text(commit)
    assert read_local_config("org/name") == {"model_type": "llama"}
    assert read_local_config("hf://org/name") == {"model_type": "llama"}


@pytest.mark.parametrize("model_id", ["org/absent", "hf://org/absent@v2", "pypi://no-such-model", "/no/such/folder"])
def test_models_that_are_elsewhere(model_id: str) -> None:
    assert read_local_config(model_id) is None
