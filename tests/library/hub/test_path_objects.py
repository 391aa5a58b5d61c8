"""Every place that takes a model id or a folder takes a ``pathlib.Path`` as well."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle import hub
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import InvalidInputError
from twinkle.hub import HubOperation, LocalFolderId, parse_model_id
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler import LocalSampler
from twinkle.template import Template

LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer, two rows of data and an adapter in PEFT's format."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    model = TransformersModel(model_id="random://llama-tiny", device="cpu")
    model.model.save_pretrained(directory)
    hub.load_tokenizer("random://llama-tiny").save_pretrained(directory)
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "b")))
    return directory


def of_trainer(folder: Path) -> None:
    trainer = Trainer.from_pretrained(folder, device="cpu", dtype="fp32")
    assert trainer.model_id == str(folder)


def of_transformers_model(folder: Path) -> None:
    model = TransformersModel(model_id=folder, device="cpu")
    assert model.model_id == model.tokenizer_id == str(folder)
    model.add_adapter_to_model("mine", LORA)
    saved = model.save("first", folder / "saved", adapter_name="mine", save_optimizer=False)
    model.load(Path(saved), adapter_name="mine")
    model.load("first", folder / "saved", adapter_name="mine")
    again = TransformersModel(model_id=folder, tokenizer_id=folder, device="cpu")
    again.add_adapter_to_model("b", Path(saved))


def of_multi_lora_model(folder: Path) -> None:
    model = MultiLoraTransformersModel(model_id=folder, tokenizer_id=folder, device="cpu")
    assert model.base_model().model_id == str(folder)
    model.add_adapter_to_model("mine", LORA)
    saved = Path(model.save("first", folder / "multi", adapter_name="mine", save_optimizer=True))
    model.load(saved, adapter_name="mine")
    model.resume_from_checkpoint(saved, adapter_name="mine")
    sampler = LocalSampler(model)
    row = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}]
    assert sampler.sample(row, {"max_tokens": 2}, adapter_path=saved)


def of_template(folder: Path) -> None:
    assert Template(folder).model_id == str(folder)


def of_dataset(folder: Path) -> None:
    meta = DatasetMeta(folder / "rows.jsonl")
    dataset = Dataset(meta)
    assert len(dataset) == 2
    assert meta.get_id() == DatasetMeta(str(folder / "rows.jsonl")).get_id()
    dataset.set_template("Template", model_id=folder)


def of_hub(folder: Path) -> None:
    assert parse_model_id(folder) == LocalFolderId(folder)
    assert hub.resolve(folder).path == folder
    assert hub.load_tokenizer(folder).encode("a")
    assert HubOperation.download_model(folder) == str(folder)
    assert HubOperation.template_bytes(folder) == 0
    assert hub.resolve_model_id_alias(folder) == str(folder)


PLACES = [of_trainer, of_transformers_model, of_multi_lora_model, of_template, of_dataset, of_hub]


@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_path_objects(folder: Path, place: Callable[[Path], None]) -> None:
    place(folder)


@pytest.mark.parametrize("wrong", [Path("org/name"), Path("/no/such/folder"), 5, None])
def test_what_is_no_folder(wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path object never means a repository of a hub, and other types are refused by name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=r"model.id: got "):
        hub.resolve(wrong)
