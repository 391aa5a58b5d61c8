"""Adapters on disk and in snapshots: exact resumption, PEFT's format in both directions, and damaged directories."""

import copy
import dataclasses
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.models.reference import Reference, random_datum
from tests.support.models.tiny_models import add_trained_adapter, take_step, the_result, tiny_model, tiny_trainer
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import environment
from twinkle.errors import AdapterExistsError, CheckpointError, InvalidInputError, UnsupportedError
from twinkle.model import AdapterSnapshot, LoraSpec, Trainer, TrainItem
from twinkle.model.adapters import checkpoint
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK

SPEC = LoraSpec(rank=4, alpha=6, seed=1, train_unembed=True)


def item(model: PreTrainedModel, seed: int, adapter_id: str = "a") -> TrainItem:
    return TrainItem(adapter_id, [random_datum(model, "cross_entropy", length, seed) for length in (9, 14)])


def trained(model: PreTrainedModel, spec: LoraSpec = SPEC) -> Trainer:
    """Return a trainer whose adapter has Adam moments, so that losing them shows."""
    trainer = tiny_trainer(model)
    add_trained_adapter(trainer, "a", spec, model)
    for seed in range(2):
        take_step(trainer, item(model, seed))
    return trainer


def go_on(trainer: Trainer, model: PreTrainedModel) -> AdapterSnapshot:
    for seed in range(10, 13):
        take_step(trainer, item(model, seed))
    return trainer.snapshot("a")


def assert_same(ours: AdapterSnapshot, theirs: AdapterSnapshot) -> None:
    """Compare two snapshots bit by bit."""
    assert (ours.step, ours.layout) == (theirs.step, theirs.layout)
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert (ours.gradient is None) == (theirs.gradient is None)
    assert ours.gradient is None or np.array_equal(ours.gradient, theirs.gradient)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_save_load_continue_is_continue(llama: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(llama)
    trainer.save("a", tmp_path / "x")
    expected = go_on(trainer, llama)
    other = tiny_trainer(llama)
    other.create_adapter("a", dataclasses.replace(SPEC, seed=99))
    other.load("a", tmp_path / "x")
    assert other.step_count("a") == 3
    assert_same(go_on(other, llama), expected)


def test_load_brings_an_adapter_back_to_where_it_was(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Loads into the same trainer, while the adapter is resident and has a gradient of its later weights."""
    trainer = trained(llama)
    before = trainer.snapshot("a")
    trainer.save("a", tmp_path / "x")
    expected = go_on(trainer, llama)
    the_result(trainer.forward_backward([item(llama, 50)])[0])
    trainer.load("a", tmp_path / "x")
    assert_same(trainer.snapshot("a"), before)
    assert_same(go_on(trainer, llama), expected)


def test_a_new_adapter_from_a_checkpoint(llama: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(llama)
    trainer.save("a", tmp_path / "x")
    other = tiny_trainer(llama)
    spec = other.create_adapter_from_checkpoint("a", tmp_path / "x")
    assert (spec.rank, spec.alpha) == (SPEC.rank, SPEC.alpha)
    assert_same(go_on(other, llama), go_on(trainer, llama))
    with pytest.raises(AdapterExistsError):
        other.create_adapter_from_checkpoint("a", tmp_path / "x")


def test_without_the_optimizer_it_starts_anew(llama: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(llama)
    trainer.save("a", tmp_path / "bare", optimizer=False)
    trainer.save("a", tmp_path / "full")
    assert not (tmp_path / "bare" / checkpoint.OPTIMIZER).exists()
    snapshots = []
    for name in ("bare", "full"):
        trainer.load("a", tmp_path / name, optimizer=False)
        snapshots.append(trainer.snapshot("a"))
    assert_same(*snapshots)
    assert snapshots[0].step == 0
    assert not snapshots[0].exp_avg.any()
    assert not snapshots[0].exp_avg_sq.any()
    with pytest.raises(CheckpointError, match="bare holds no optimizer state; load it with optimizer=False"):
        trainer.load("a", tmp_path / "bare")
    assert_same(trainer.snapshot("a"), snapshots[0])


@pytest.mark.parametrize("rank", [1, 4, 8, 12])
def test_ranks_beside_and_on_a_bucket(llama: PreTrainedModel, tmp_path: Path, rank: int) -> None:
    trainer = trained(llama, dataclasses.replace(SPEC, rank=rank))
    trainer.save("a", tmp_path / "x")
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "x" / checkpoint.WEIGHTS).items()}
    assert {shape[0] for name, shape in shapes.items() if ".lora_A." in name} == {rank}
    assert {shape[1] for name, shape in shapes.items() if ".lora_B." in name} == {rank}
    other = tiny_trainer(llama)
    other.create_adapter_from_checkpoint("a", tmp_path / "x")
    assert_same(other.snapshot("a"), trainer.snapshot("a"))


def test_bf16_keeps_the_master_weights_exactly(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    trainer = trained(model)
    trainer.save("a", tmp_path / "x")
    weights = load_file(tmp_path / "x" / checkpoint.WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())
    other = tiny_trainer(model)
    other.create_adapter_from_checkpoint("a", tmp_path / "x")
    assert_same(other.snapshot("a"), trainer.snapshot("a"))
    assert_same(go_on(other, model), go_on(trainer, model))


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("open_window", [False, True])
def test_snapshot_restore_continue_is_continue(llama: PreTrainedModel, open_window: bool) -> None:
    trainer = trained(llama)
    if open_window:
        the_result(trainer.forward_backward([item(llama, 5)])[0])
    snapshot = trainer.snapshot("a")
    assert (snapshot.gradient is not None) == open_window
    expected = go_on(trainer, llama)
    for other in (tiny_trainer(llama), trainer):  # into a new trainer, and over an adapter that was trained further
        other.restore("a", snapshot)
        assert other.spec("a") == SPEC
        assert_same(go_on(other, llama), expected)


def test_a_snapshot_does_not_change_afterwards(llama: PreTrainedModel) -> None:
    trainer = trained(llama)
    the_result(trainer.forward_backward([item(llama, 5)])[0])
    snapshot = trainer.snapshot("a")
    kept = copy.deepcopy(snapshot)
    trainer.restore("a", snapshot)
    go_on(trainer, llama)
    assert_same(snapshot, kept)


def test_a_snapshot_of_another_model_is_refused(llama: PreTrainedModel) -> None:
    trainer = trained(llama)
    before = trainer.snapshot("a")
    foreign = trained(tiny_model("qwen2-sliding")).snapshot("a")
    with pytest.raises(InvalidInputError, match=r"snapshot\.layout"):
        trainer.restore("a", foreign)
    assert_same(trainer.snapshot("a"), before)


# --- PEFT -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "all-linear": LoraSpec(rank=4, alpha=6, seed=1),
    "attention": LoraSpec(rank=8, alpha=6, seed=1, train_mlp=False),
    "head": LoraSpec(rank=4, alpha=2.5, seed=1, train_unembed=True),
    "head-alone": LoraSpec(rank=3, seed=1, train_attn=False, train_mlp=False, train_unembed=True),
    "one-layer": LoraSpec(rank=4, seed=1, target_modules=["1.self_attn.q_proj", "0.mlp.up_proj"]),
}


@pytest.mark.matrix
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`"
)  # PEFT's warning on loading; our adapter is on the output side
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exported_adapters_load_in_peft(family: str, shape: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    trainer = trained(model, SHAPES[shape])
    trainer.save("a", tmp_path / "x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", _never)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "x").eval()
    ours = trainer.weights("a")
    theirs = {
        name.replace(".default.", "."): parameter.numpy(force=True)
        for name, parameter in loaded.named_parameters()
        if ".lora_" in name
    }
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    datum = random_datum(model, "cross_entropy", 17, seed=3)
    every = np.tile(np.arange(97), (17, 1))  # all tokens as targets: log-probabilities are the logits, up to a constant
    whole = dataclasses.replace(datum, targets=every, weights=None)
    result = the_result(trainer.forward([TrainItem("a", [whole])])[0])
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    assert np.abs(result.logprobs[0] - logits.log_softmax(-1).numpy()).max() <= 1e-5


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("all-linear", marks=pytest.mark.matrix),
        "head",  # transformers 5.5 looks for LoRA on the head, even PEFT's, under a wrong name
    ],
)
def test_exported_adapters_load_in_transformers(llama: PreTrainedModel, tmp_path: Path, shape: str) -> None:
    trainer = trained(llama, SHAPES[shape])
    trainer.save("a", tmp_path / "x", optimizer=False)
    plain = copy.deepcopy(llama)
    plain.load_adapter(str(tmp_path / "x"))
    datum = random_datum(llama, "cross_entropy", 17, seed=3)
    result = the_result(trainer.forward([TrainItem("a", [datum])])[0])
    with torch.no_grad():
        logprobs = plain(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1)
    expected = logprobs.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0].numpy()
    assert np.abs(result.logprobs[0] - expected).max() <= 1e-5


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["q_proj", "lm_head"], r".*\.1\..*_proj"])
def test_adapters_that_peft_wrote(family: str, targets: object, tmp_path: Path) -> None:
    """Also with dropout, in bf16, and with the copy of the head that PEFT saves next to LoRA on the head."""
    model = tiny_model(family)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "x")
    trainer = tiny_trainer(model)
    spec = trainer.create_adapter_from_checkpoint("a", tmp_path / "x", optimizer=False)
    assert (spec.rank, spec.alpha) == (5, 7.0)
    written = load_file(tmp_path / "x" / checkpoint.WEIGHTS)
    ours = trainer.weights("a")
    assert {name for name in written if ".lora_" in name} == ours.keys()
    assert all(np.array_equal(ours[name], written[name].numpy()) for name in ours)
    one = item(model, 3)
    result = the_result(trainer.forward([one])[0])
    expected = Reference(model, spec, ours).forward_backward(one)
    assert all(np.abs(a - b).max() <= 1e-5 for a, b in zip(result.logprobs, expected.logprobs, strict=True))
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        trainer.create_adapter_from_checkpoint("b", tmp_path / "x")
    assert trainer.adapter_ids() == ["a"]


def test_half_precision_adapters_are_read(llama: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(llama)
    trainer.save("a", tmp_path / "x")
    path = tmp_path / "x" / checkpoint.WEIGHTS
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    trainer.load("a", tmp_path / "x")
    stored = load_file(path)
    assert all(np.array_equal(array, stored[name].float().numpy()) for name, array in trainer.weights("a").items())


def test_what_a_directory_holds(llama: PreTrainedModel, tmp_path: Path) -> None:
    trainer = trained(llama)
    trainer.save("a", tmp_path / "deep" / "er" / "x")
    directory = tmp_path / "deep" / "er" / "x"
    assert sorted(path.name for path in directory.iterdir()) == [
        "USAGE.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    ]
    assert [path.name for path in directory.parent.iterdir()] == ["x"]
    state = json.loads((directory / checkpoint.STATE).read_text())
    assert (state["format"], state["step"], state["base_model"]) == (1, 3, "tiny")
    assert LoraSpec(**state["spec"]) == SPEC
    config = json.loads((directory / checkpoint.CONFIG).read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert "lm_head" in config["target_modules"]
    assert "output head of its base model (`tiny`)" in (directory / "USAGE.md").read_text()


# --- invalid directories ----------------------------------------------------------------------------------------------


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("this must not be called")


def _edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**content, **changes}))

    return edit


def _edit_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / name)
        change(tensors)
        save_file(tensors, directory / name)

    return edit


def _cut(name: str) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size // 2)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD_B = "base_model.model.lm_head.lora_B.weight"

WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (_edit_json(checkpoint.CONFIG, r=8), r"holds rank 8, alpha 6; adapter 'a' has rank 4, alpha 6"),
    "alpha": (_edit_json(checkpoint.CONFIG, lora_alpha=8), r"holds rank 4, alpha 8; adapter 'a' has rank 4, alpha 6"),
    "config value": (_edit_json(checkpoint.CONFIG, r="x"), r"adapter_config\.json: r: got 'x', allowed: an integer"),
    "no config": (_remove(checkpoint.CONFIG), r"could not read .*adapter_config\.json: .*No such file"),
    "cut config": (_cut(checkpoint.CONFIG), r"could not read .*adapter_config\.json"),
    "list config": (_write(checkpoint.CONFIG, b"[]"), r"adapter_config\.json: expected a JSON object, got list"),
    "binary config": (_write(checkpoint.CONFIG, b"\xff\xfe"), r"could not read .*adapter_config\.json"),
    "no weights": (_remove(checkpoint.WEIGHTS), r"could not read .*adapter_model\.safetensors"),
    "cut weights": (_cut(checkpoint.WEIGHTS), r"could not read .*adapter_model\.safetensors"),
    "empty weights": (_write(checkpoint.WEIGHTS, b""), r"could not read .*adapter_model\.safetensors"),
    "garbage weights": (
        _write(checkpoint.WEIGHTS, b"\x80\x04K\x01." * 9),
        r"could not read .*adapter_model\.safetensors",
    ),
    "missing tensor": (
        _edit_tensors(checkpoint.WEIGHTS, lambda tensors: tensors.pop(A)),
        r"does not fit the adapter's target modules; missing \['base_model.*q_proj\.lora_A\.weight'\], unexpected \[\]",
    ),
    "further tensor": (
        _edit_tensors(checkpoint.WEIGHTS, lambda tensors: tensors.update({A.replace("q_proj", "x"): torch.ones(1)})),
        r"target modules; missing \[\], unexpected \['base_model.*x\.lora_A",
    ),
    "shape": (
        _edit_tensors(checkpoint.WEIGHTS, lambda tensors: tensors.update({A: torch.ones(4, 31)})),
        r"q_proj\.lora_A\.weight is torch\.float32 \(4, 31\), expected floats \(4, 32\)",
    ),
    "integers": (
        _edit_tensors(checkpoint.WEIGHTS, lambda tensors: tensors.update({A: torch.ones(4, 32).int()})),
        r"q_proj\.lora_A\.weight is torch\.int32 \(4, 32\), expected floats",
    ),
    "NaN": (
        _edit_tensors(checkpoint.WEIGHTS, lambda tensors: tensors[HEAD_B][3].fill_(float("nan"))),
        r"lm_head\.lora_B\.weight holds NaN or infinity",
    ),
    "too large for fp32": (
        _edit_tensors(
            checkpoint.WEIGHTS, lambda tensors: tensors.update({A: torch.full((4, 32), 1e200, dtype=torch.float64)})
        ),
        r"q_proj\.lora_A\.weight holds NaN or infinity",
    ),
    "no optimizer": (_remove(checkpoint.OPTIMIZER), "holds no optimizer state; load it with optimizer=False"),
    "cut optimizer": (_cut(checkpoint.OPTIMIZER), r"could not read .*optimizer\.safetensors"),
    "infinite moments": (
        _edit_tensors(checkpoint.OPTIMIZER, lambda tensors: tensors["exp_avg_sq." + A].fill_(float("inf"))),
        r"optimizer\.safetensors: exp_avg_sq\..*q_proj\.lora_A\.weight holds NaN or infinity",
    ),
    "missing moment": (
        _edit_tensors(checkpoint.OPTIMIZER, lambda tensors: tensors.pop("exp_avg." + A)),
        r"optimizer\.safetensors does not fit .* missing \['exp_avg\.",
    ),
    "no state": (_remove(checkpoint.STATE), r"could not read .*trainer_state\.json"),
    "cut state": (_cut(checkpoint.STATE), r"could not read .*trainer_state\.json"),
    "deep state": (
        lambda directory: (directory / checkpoint.STATE).write_text("[" * 100_000),
        r"could not read .*trainer_state\.json: maximum recursion depth",
    ),
    "step": (_edit_json(checkpoint.STATE, step=-1), r"trainer_state\.json: step: got -1, allowed: an integer ≥ 0"),
    "format": (_edit_json(checkpoint.STATE, format=2), r"trainer_state\.json: format: got 2, allowed: 1"),
}


@pytest.fixture(scope="module")
def victim(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    trainer = trained(llama)
    directory = tmp_path_factory.mktemp("saved") / "x"
    trainer.save("a", directory)
    the_result(trainer.forward_backward([item(llama, 5)])[0])
    return trainer, directory


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_directory_changes_nothing(victim: tuple[Trainer, Path], tmp_path: Path, case: str) -> None:
    damage, message = WRONG[case]
    trainer, directory = victim
    subprocess.run(["cp", "-r", directory, tmp_path / "x"], check=True)
    damage(tmp_path / "x")
    before = trainer.snapshot("a")
    with pytest.raises(CheckpointError, match=message) as error:
        trainer.load("a", tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value)
    assert_same(trainer.snapshot("a"), before)
    if case != "alpha":  # a wrong alpha is the only fault of that case
        with pytest.raises(CheckpointError):
            trainer.create_adapter_from_checkpoint("b", tmp_path / "x")
    assert trainer.adapter_ids() == ["a"]


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, alpha=6), LoraSpec(rank=4, alpha=6, train_mlp=False)])
def test_other_targets(victim: tuple[Trainer, Path], llama: PreTrainedModel, spec: LoraSpec) -> None:
    trainer = tiny_trainer(llama)
    trainer.create_adapter("a", spec)
    before = trainer.snapshot("a")
    with pytest.raises(CheckpointError, match=r"does not fit the adapter's target modules; missing \[\], unexpected"):
        trainer.load("a", victim[1])
    assert_same(trainer.snapshot("a"), before)


def test_no_directory(victim: tuple[Trainer, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not read .*nowhere"):
        victim[0].load("a", tmp_path / "nowhere")


def test_what_peft_trained_differently_is_unsupported(victim: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, directory = victim
    subprocess.run(["cp", "-r", directory, tmp_path / "x"], check=True)
    _edit_json(checkpoint.CONFIG, use_dora=True, lora_dropout=0.1)(tmp_path / "x")
    with pytest.raises(UnsupportedError, match=r"use_dora=True$"):
        trainer.create_adapter_from_checkpoint("b", tmp_path / "x", optimizer=False)


def test_pickle_is_never_read(victim: tuple[Trainer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that would run code lie next to ours, or take the place of a missing file."""
    trainer, directory = victim
    subprocess.run(["cp", "-r", directory, tmp_path / "x"], check=True)
    bomb = b"cposix\nsystem\n(S'touch " + os.fsencode(tmp_path / "exploded") + b"'\ntR."
    for name in ("adapter_model.bin", "adapter_model.pt", "optimizer.bin", "optimizer.pt", "training_args.bin"):
        (tmp_path / "x" / name).write_bytes(bomb)
    monkeypatch.setattr(torch, "load", _never)
    monkeypatch.setattr("pickle.load", _never)
    monkeypatch.setattr("pickle.loads", _never)
    snapshot = trainer.snapshot("a")
    trainer.load("a", tmp_path / "x")
    trainer.restore("a", snapshot)
    (tmp_path / "x" / checkpoint.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        trainer.load("a", tmp_path / "x")
    (tmp_path / "x" / checkpoint.WEIGHTS).write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        trainer.load("a", tmp_path / "x")
    assert not (tmp_path / "exploded").exists()


# --- writing ----------------------------------------------------------------------------------------------------------


def test_an_existing_directory_is_kept(victim: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, _ = victim
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="x exists already; choose another name or pass overwrite=True"):
        trainer.save("a", tmp_path / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "thesis.txt"]
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="file exists already"):
            trainer.save("a", tmp_path / "file", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwrite(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:  # as on other systems and some network file systems
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    trainer = trained(llama)
    trainer.save("a", tmp_path / "x")
    (tmp_path / "x" / "old").write_text("")
    take_step(trainer, item(llama, 7))
    trainer.save("a", tmp_path / "x", overwrite=True)
    trainer.save("a", tmp_path / "new", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x"]
    assert not (tmp_path / "x" / "old").exists()
    other = tiny_trainer(llama)
    other.create_adapter_from_checkpoint("a", tmp_path / "x")
    assert_same(other.snapshot("a"), trainer.snapshot("a"))


def test_overwriting_is_one_step(victim: tuple[Trainer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time a reader finds either the complete old directory or the complete new one."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    if not checkpoint._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange directories")
    victim[0].save("a", tmp_path / "x")
    (tmp_path / "x" / "old").write_text("")
    for name in ("rename", "renames", "replace"):
        monkeypatch.setattr(os, name, _never)
    victim[0].save("a", tmp_path / "x", overwrite=True)
    assert not (tmp_path / "x" / "old").exists()


def test_overwrite_replaces_what_a_link_points_to(victim: tuple[Trainer, Path], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    victim[0].save("a", tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / checkpoint.STATE).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_place_that_cannot_be_written(victim: tuple[Trainer, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not write .*file/x: .*Not a directory"):
        victim[0].save("a", tmp_path / "file" / "x")
    with pytest.raises(CheckpointError, match="could not write /proc/x"):
        victim[0].save("a", "/proc/x")


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("failing", ["write_arrays", "write_json", "_flush", "replace"])
def test_a_failure_leaves_everything_as_it_was(
    victim: tuple[Trainer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, exchange: bool
) -> None:
    """A failed save leaves no new directory; if it was to overwrite one, the old directory stays."""
    trainer, _ = victim
    trainer.save("a", tmp_path / "old")
    (tmp_path / "old" / "mark").write_text("")
    before = trainer.snapshot("a")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    replace = os.replace
    if failing == "replace":  # only the rename of the new directory fails, so that the old one can be moved back
        monkeypatch.setattr(os, "replace", lambda a, b: fail() if str(a).endswith(".tmp") else replace(a, b))
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    else:
        monkeypatch.setattr(checkpoint, failing, fail)
        if not exchange:
            monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    for name in ("new", "old"):
        with pytest.raises(CheckpointError, match=f"could not write .*{name}: .*No space left"):
            trainer.save("a", tmp_path / name, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "mark").exists()
    assert_same(trainer.snapshot("a"), before)


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from twinkle.model.adapters import checkpoint
from twinkle.model.decoder.lora.stacks import SLOTS_PER_BLOCK
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.lora.stacks import RowLayout, Stack, Target, initial_row
from twinkle.model.types import LoraSpec

directory, when, overwrite = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwrite"
layout = RowLayout(8, (Target("model.layers.0.q_proj", 16, 16),))
stack = Stack(layout, torch.float32, torch.device("cpu"))
adapter = Adapter.fresh("a", LoraSpec(8, seed=0), stack, initial_row(layout, [8] * len(layout.targets), 0))
arguments = dict(target_modules=["q_proj"], base_model="tiny", optimizer=True)
if overwrite:
    checkpoint.save_adapter(adapter, directory, overwrite=False, **arguments)
    (directory / "old").touch()

def killing(original):
    def call(*args, **kwargs):
        if when.startswith("in "):
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

name = when.removeprefix("in ").removeprefix("before ")
setattr(checkpoint, name, killing(getattr(checkpoint, name)))
checkpoint.save_adapter(adapter, directory, overwrite=overwrite, **arguments)
"""


def save_and_die(directory: Path, when: str, overwrite: str) -> None:
    """Save the adapter as ``directory / "x"`` in a process that is killed in or before the function ``when``."""
    script = directory.with_name(f"{directory.name}.py")
    script.write_text(_KILLED)
    done = run_forked([script, directory / "x", when, overwrite], environment())
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("when", ["in write_arrays", "before _put_in_place"])
@pytest.mark.parametrize("overwrite", ["fresh", "overwrite"])
def test_killed_while_saving(tmp_path: Path, when: str, overwrite: str) -> None:
    save_and_die(tmp_path, when, overwrite)
    if overwrite == "fresh":
        assert not (tmp_path / "x").exists()
    else:
        assert (tmp_path / "x" / "old").exists()
    left = [path.name for path in tmp_path.iterdir() if path.name != "x"]
    assert len(left) == 1
    assert left[0].startswith(".x.")
    assert left[0].endswith(".tmp")


def test_killed_right_after_the_exchange(tmp_path: Path) -> None:
    """The new directory is in place; the replaced one still exists under a hidden name."""
    save_and_die(tmp_path, "in _put_in_place", "overwrite")
    assert not (tmp_path / "x" / "old").exists()
    assert (tmp_path / "x" / checkpoint.STATE).exists()


def test_a_save_that_is_written_later_holds_what_was_there(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Training continues while the files are written; they hold the state of prepare_save."""
    trainer = trained(llama)
    write, expected = trainer.prepare_save("a"), trainer.snapshot("a")
    take_step(trainer, item(llama, 5))
    (tmp_path / "ck").mkdir()
    write(tmp_path / "ck")
    trainer.load("a", tmp_path / "ck")
    assert_same(trainer.snapshot("a"), expected)
    trainer.prepare_save("a", optimizer=False)(tmp_path / "weights")
    assert not (tmp_path / "weights" / "optimizer.safetensors").exists()


def test_a_prepared_save_holds_nothing_of_other_tenants(llama: PreTrainedModel) -> None:
    """On a Ray cluster it is sent to another process: one adapter's bytes, not those of all that are resident."""
    trainer = trained(llama)
    alone = len(pickle.dumps(trainer.prepare_save("a", state={})))
    for number in range(SLOTS_PER_BLOCK):  # so that the adapters need a second block of slots
        add_trained_adapter(trainer, f"other {number}", SPEC, llama)
        take_step(trainer, item(llama, number, f"other {number}"))
    assert len(trainer.resident_adapter_ids()) > SLOTS_PER_BLOCK
    assert len(pickle.dumps(trainer.prepare_save("a", state={}))) <= alone
