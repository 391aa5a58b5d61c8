"""``resolve`` with local directories, and the public interface of ``twinkle.hub``."""

import json

import pytest

import twinkle.hub
from twinkle.errors import UnsupportedError
from twinkle.hub import LocalModel, resolve
from twinkle.hub.resolution import loadable_name

HEAVY = {"filelock", "gguf", "huggingface_hub", "modelscope", "numpy", "tokenizers", "torch", "transformers"}


def test_local_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("./model") == LocalModel("./model", tmp_path / "model", None)


def test_names_that_transformers_can_load(tmp_path, monkeypatch):
    """Saved adapters name their base model like this: a public repository, or a folder of this machine."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert loadable_name("./model") == str(tmp_path / "model")
    assert loadable_name("hf://org/name@v1") == loadable_name("org/name") == "org/name"
    assert loadable_name("random://llama-tiny?seed=3") == str(resolve("random://llama-tiny").path)


def test_directory_without_a_model(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_import_is_light(start_python):
    process = start_python("import json, sys, twinkle.hub; print(json.dumps(sorted(sys.modules)))")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert HEAVY.isdisjoint(json.loads(output))


def test_public_names():
    assert len(twinkle.hub.__all__) == len(set(twinkle.hub.__all__))
    assert all(name in vars(twinkle.hub) for name in twinkle.hub.__all__)
