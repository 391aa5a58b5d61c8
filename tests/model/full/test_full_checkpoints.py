"""Checkpoints of full-parameter runs are Hugging Face folders; training continues from them bit by bit.

A folder that is damaged or belongs to another model is refused before anything changes.
"""

import errno
import json
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.model.full.plain_run import RUN, full_trainer, request, train, with_run
from tests.support.models.reference import assert_numbers_close, toy_llama
from tests.support.models.tiny_models import tiny_model
from twinkle.errors import CheckpointError, InvalidInputError, NoOptimizerStateError
from twinkle.model import AdamParams, AdapterSnapshot, FullSpec, FullTrainer, LoraSpec, Trainer, adopt_model
from twinkle.model.adapters.checkpoint import write_whole
from twinkle.model.full import checkpoint
from twinkle.model.weights.tensor_files import write_tensors

ADAM = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.01)
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "untied": toy_llama,
    "tied": lambda: toy_llama(tie_word_embeddings=True),
    "head bias": lambda: tiny_model("phi"),
}


def trained(model: PreTrainedModel, **options: Any) -> FullTrainer:
    """Return a trainer whose run has Adam moments, so that losing them shows."""
    trainer = with_run(model, **options)
    for seed in range(2):
        train(trainer, request(model, seed), ADAM)
    return trainer


def go_on(trainer: FullTrainer, model: PreTrainedModel) -> AdapterSnapshot:
    for seed in (10, 11):
        train(trainer, request(model, seed), ADAM)
    return trainer.snapshot(RUN)


def assert_same(ours: AdapterSnapshot, theirs: AdapterSnapshot) -> None:
    """Compare two snapshots bit by bit."""
    for name in vars(theirs):
        np.testing.assert_equal(getattr(ours, name), getattr(theirs, name), name)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", [True, False], ids=["with optimizer", "weights only"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_the_folder(name: str, optimizer: bool, tmp_path: Path) -> None:
    model = MODELS[name]()
    trainer = trained(model)
    trainer.save(RUN, tmp_path / "x", optimizer=optimizer)
    opened, information = AutoModelForCausalLM.from_pretrained(tmp_path / "x", output_loading_info=True)
    assert not any(information.values()), information
    assert opened.dtype == torch.float32
    assert type(opened) is type(model)
    weights = trainer.weights(RUN)
    assert dict(opened.named_parameters()).keys() == weights.keys()
    for key, parameter in opened.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[key]), key
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[key]))
    assert_numbers_close(logits(opened.eval()), logits(model.eval()))  # torch adds up in an order of its own choice
    assert (tmp_path / "x" / "optimizer.safetensors").exists() is optimizer


@pytest.mark.matrix
def test_a_bf16_model_keeps_fp32_weights_with_the_optimizer(tmp_path: Path) -> None:
    """Both folders open as bf16: that is what the model computes with."""
    model = toy_llama()
    trainer = trained(model, dtype=torch.bfloat16)
    trainer.save(RUN, tmp_path / "with")
    trainer.save(RUN, tmp_path / "without", optimizer=False)
    computed = trainer.compute_weights()
    for folder, stored in (("with", torch.float32), ("without", torch.bfloat16)):
        assert {each.dtype for each in load_file(tmp_path / folder / "model.safetensors").values()} == {stored}
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert opened.dtype == torch.bfloat16
        for name, parameter in opened.named_parameters():
            assert torch.equal(parameter.data, computed[name]), name


def test_the_folder_has_the_base_models_tokenizer_and_configuration(tmp_path: Path) -> None:
    trainer = FullTrainer.from_pretrained("random://llama-tiny", device="cpu", dtype="fp32")
    trainer.create_adapter(RUN, FullSpec())
    trainer.save(RUN, tmp_path / "x", state={"note": 7}, companions=lambda path: (path / "more").touch())
    assert AutoTokenizer.from_pretrained(tmp_path / "x")("hello").input_ids
    assert (tmp_path / "x" / "more").exists()
    state = json.loads((tmp_path / "x" / "trainer_state.json").read_text())
    assert (state["train_mode"], state["step"], state["note"]) == ("full", 0, 7)
    assert state["base_model"] == trainer.base_name
    assert json.loads((tmp_path / "x" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    trainer = trained(toy_llama())
    trainer.save(RUN, tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def fail(staging: Path) -> None:
        assert (staging / "model.safetensors").exists()
        raise OSError("the disk is full")

    for name in ("new", "old"):
        with pytest.raises(OSError, match="full"):
            trainer.save(RUN, tmp_path / name, overwrite=True, companions=fail)
    assert not (tmp_path / "new").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    with pytest.raises(CheckpointError, match="old exists already"):
        trainer.save(RUN, tmp_path / "old")


def test_a_disk_that_takes_no_more_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    """Servers tell the two apart by the cause. safetensors reports errors of the system as text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not write") as raised:
            write_whole(tmp_path / "ck", lambda to: save_file({"w": torch.ones(1000)}, to / "w"), overwrite=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_later_is_what_was_copied(tmp_path: Path) -> None:
    model = toy_llama()
    trainer = trained(model)
    snapshot, write = trainer.snapshot(RUN), trainer.prepare_save(RUN)
    go_on(trainer, model)
    write(tmp_path / "x")
    trainer.load(RUN, tmp_path / "x")
    assert_same(trainer.snapshot(RUN), snapshot)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_save_load_continue_is_continue(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MODELS[name]()
    trainer = trained(model, dtype=dtype)
    trainer.save(RUN, tmp_path / "x")
    expected = go_on(trainer, model)
    other = with_run(model, dtype=dtype)
    other.load(RUN, tmp_path / "x")
    assert other.step_count(RUN) == 2
    assert_same(go_on(other, model), expected)
    trainer.forward_backward([request(model, 5)])  # a gradient of later weights is dropped
    trainer.load(RUN, tmp_path / "x")
    assert trainer.gradients(RUN) == {}
    assert_same(go_on(trainer, model), expected)


def test_other_optimizers_continue_too(tmp_path: Path) -> None:
    model, settings = toy_llama(), {"lr": 0.01}
    trainer = with_run(model)

    def step(trainer: FullTrainer, seed: int) -> None:
        trainer.forward_backward([request(model, seed)])
        trainer.optimizer_step(RUN, "NAdam", settings)

    step(trainer, 1)
    trainer.save(RUN, tmp_path / "x")
    step(trainer, 2)
    other = with_run(model)
    other.load(RUN, tmp_path / "x")
    step(other, 2)
    assert_same(other.snapshot(RUN), trainer.snapshot(RUN))
    assert other.snapshot(RUN).scalars


def test_weights_alone_start_a_new_optimizer(tmp_path: Path) -> None:
    model = toy_llama()
    trainer = trained(model)
    trainer.save(RUN, tmp_path / "x", optimizer=False)
    with pytest.raises(NoOptimizerStateError, match="optimizer=False"):
        trainer.load(RUN, tmp_path / "x")
    weights = trainer.snapshot(RUN).weights
    other = trained(model)
    other.load(RUN, tmp_path / "x", optimizer=False)
    snapshot = other.snapshot(RUN)
    assert np.array_equal(snapshot.weights, weights)
    assert (snapshot.step, snapshot.passes, snapshot.gradient) == (0, 0, None)
    assert not snapshot.exp_avg.any()
    assert not snapshot.exp_avg_sq.any()


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_transformers_is_loaded(name: str, tmp_path: Path) -> None:
    model, other = MODELS[name](), MODELS[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    other.save_pretrained(tmp_path / "x")
    trainer = trained(model)
    trainer.load(RUN, tmp_path / "x", optimizer=False)
    for key, parameter in other.named_parameters():
        assert np.array_equal(trainer.weights(RUN)[key], parameter.detach().numpy()), key


def test_several_files_with_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 60_000)
    model = toy_llama()
    trainer = trained(model)
    trainer.save(RUN, tmp_path / "x")
    files = list((tmp_path / "x").glob("model-*.safetensors"))
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) < 70_000
    snapshot = trainer.snapshot(RUN)
    go_on(trainer, model)
    trainer.load(RUN, tmp_path / "x")
    assert_same(trainer.snapshot(RUN), snapshot)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    for name, parameter in opened.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), trainer.weights(RUN)[name])


def test_both_names_of_tied_weights(tmp_path: Path) -> None:
    """A folder may hold the head beside the embedding, or only the head. Where both are there, they must agree."""
    trainer = trained(MODELS["tied"]())
    trainer.save(RUN, tmp_path / "x", optimizer=False)
    path, snapshot = tmp_path / "x" / "model.safetensors", trainer.snapshot(RUN)
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    trainer.load(RUN, tmp_path / "x", optimizer=False)
    save_file(tensors | {"lm_head.weight": embedding + 1}, path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        trainer.load(RUN, tmp_path / "x", optimizer=False)
    save_file({"lm_head.weight" if n == "model.embed_tokens.weight" else n: t for n, t in tensors.items()}, path)
    trainer.load(RUN, tmp_path / "x", optimizer=False)
    assert np.array_equal(trainer.snapshot(RUN).weights, snapshot.weights)


# --- damaged and foreign folders --------------------------------------------------------------------------------------


def _change(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return damage


def _cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def _index(content: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


NORM = "model.norm.weight"
DAMAGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, "holds no weights of a whole model"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights of a whole model"),
    "cut weights": (_cut("model.safetensors"), "could not read"),
    "cut moments": (_cut("optimizer.safetensors"), "could not read"),
    "cut state": (_cut("trainer_state.json"), "trainer_state.json"),
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json"),
    "a weight less": (_change("model.safetensors", lambda t: t.pop(NORM)), f"missing {NORM}, unexpected nothing"),
    "a weight more": (
        _change("model.safetensors", lambda t: t.update(other=torch.zeros(2))),
        "missing nothing, unexpected other",
    ),
    "another shape": (
        _change("model.safetensors", lambda t: t.update({NORM: torch.zeros(63)})),
        rf"{NORM} has shape \(63,\), expected \(64,\)",
    ),
    "NaN": (_change("model.safetensors", lambda t: t[NORM].fill_(torch.nan)), f"{NORM} holds NaN or infinity"),
    "whole numbers": (
        _change("model.safetensors", lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)})),
        f"{NORM} is torch.int64",
    ),
    "a moment less": (
        _change("optimizer.safetensors", lambda t: t.pop(f"exp_avg.{NORM}")),
        f"missing {NORM}, unexpected nothing",
    ),
    "an infinite moment": (
        _change("optimizer.safetensors", lambda t: t[f"exp_avg_sq.{NORM}"].fill_(torch.inf)),
        f"exp_avg_sq.{NORM} holds NaN or infinity",
    ),
    "an index without a map": (_index({}), "weight_map"),
    "an index to another folder": (_index({"weight_map": {NORM: "../part.safetensors"}}), "files of that folder"),
    "an index to no file": (_index({"weight_map": {NORM: "gone.safetensors"}}), "could not read"),
    "an index to a missing weight": (
        _index({"weight_map": {"other": "part.safetensors"}}),
        "other are in model.safetensors.index.json, but not in the files",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[FullTrainer, Path]:
    """Returns a trainer in the middle of a window, and a checkpoint of other weights."""
    trainer, folder = trained(toy_llama()), tmp_path_factory.mktemp("saved") / "x"
    trainer.save(RUN, folder)
    train(trainer, request(toy_llama(), 3), ADAM)
    trainer.forward_backward([request(toy_llama(), 4)])
    return trainer, folder


def assert_refused(trainer: FullTrainer, folder: Path, message: str) -> None:
    before = trainer.snapshot(RUN)
    with pytest.raises(CheckpointError, match=message):
        trainer.load(RUN, folder)
    after = trainer.snapshot(RUN)
    assert after.gradient is not None
    assert_same(after, before)
    for name, tensor in trainer.compute_weights().items():
        assert np.array_equal(tensor.numpy(), trainer.weights(RUN)[name])


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_changes_nothing(saved: tuple[FullTrainer, Path], name: str, tmp_path: Path) -> None:
    trainer, whole = saved
    damage, message = DAMAGES[name]
    shutil.copytree(whole, tmp_path / "x")
    damage(tmp_path / "x")
    assert_refused(trainer, tmp_path / "x", message)


def test_a_folder_of_another_model_changes_nothing(saved: tuple[FullTrainer, Path], tmp_path: Path) -> None:
    trainer, _ = saved
    wider, deeper = toy_llama(intermediate_size=112), toy_llama(num_hidden_layers=3)
    adapter = Trainer(adopt_model(toy_llama()), model_id="test")
    adapter.create_adapter("a", LoraSpec(4))
    adapter.save("a", tmp_path / "adapter")
    for name, model, message in (
        ("wider", wider, r"has shape \(112, 64\), expected \(96, 64\)"),
        ("deeper", deeper, r"missing nothing, unexpected model\.layers\.2.* and 4 more"),
    ):
        trained(model).save(RUN, tmp_path / name)
        assert_refused(trainer, tmp_path / name, message)
    assert_refused(trainer, tmp_path / "adapter", "holds no weights of a whole model")
    snapshot = full_trainer(deeper)
    snapshot.create_adapter(RUN, FullSpec())
    before = trainer.snapshot(RUN)
    with pytest.raises(InvalidInputError, match=r"snapshot.layout.*another base model"):
        trainer.restore(RUN, snapshot.snapshot(RUN))
    assert_same(trainer.snapshot(RUN), before)


def test_files_are_written_as_safetensors_writes_them(tmp_path: Path) -> None:
    """Tensors come one at a time and in any order; the bytes are those of save_file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"b.weight": (3, 5), "a": (2,), "a10": (4, 1), 'é"x': (0, 3), "a2": (1,)}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file({name: each.to(dtype) for name, each in tensors.items()}, tmp_path / "all", {"format": "pt"})
        write_tensors({tmp_path / "each": shapes}, dtype, reversed(tensors.items()))
        assert (tmp_path / "each").read_bytes() == (tmp_path / "all").read_bytes()
