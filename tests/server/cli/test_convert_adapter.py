"""``twinkle-server convert-adapter`` writes an adapter in another form."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec
from twinkle.server.cli import command_line


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    trainer.create_adapter("a", LoraSpec(rank=4))
    trainer.save("a", tmp_path / "adapter", optimizer=False)
    return tmp_path / "adapter"


def test_writes_the_form(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not command_line.main(["convert-adapter", str(adapter), str(tmp_path / "peft"), "--format", "peft"])
    assert "in the form 'peft'" in capsys.readouterr().out
    assert "experts.base_layer.lora_A" in " ".join(load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_parameters"]


def test_writes_over_nothing(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["convert-adapter", str(adapter), str(adapter), "--format", "vllm"])
    assert "is not empty; name an empty or a new directory" in capsys.readouterr().err


def test_reads_adapters_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["convert-adapter", str(tmp_path), str(tmp_path / "out"), "--format", "vllm"])
    assert "has no adapter_config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
