"""The base model that vLLM reads. These tests need no vLLM."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle import hub
from twinkle.model.decoder.loading import load_model
from twinkle.sampler.vllm import base_folder as module


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_random_weights_are_drawn_where_the_trainer_drew_its_own(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU and a GPU draw different numbers from one seed, and vLLM would compute with another base model."""
    devices: list[torch.device] = []

    def drawn(local: hub.LocalModel, dtype: torch.dtype, place: torch.device) -> Any:
        devices.append(place)
        return load_model(local, dtype, torch.device("cpu"))

    monkeypatch.setattr(module, "load_model", drawn)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with module.base_folder("random://llama-tiny", torch.float32, torch.device(device), tmp_path) as folder:
        assert (folder / "config.json").is_file()
        assert list(folder.glob("*.safetensors"))
    assert devices == [torch.device(device)]
    assert not folder.exists()


def test_other_models_are_read_where_they_are(tmp_path: Path) -> None:
    model = load_model(hub.resolve("random://llama-tiny"), torch.float32, torch.device("cpu"))
    model.save_pretrained(tmp_path / "model")
    with module.base_folder(str(tmp_path / "model"), torch.float32, torch.device("cpu"), tmp_path) as folder:
        assert folder == tmp_path / "model"
    assert folder.is_dir()
