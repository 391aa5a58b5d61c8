"""The library's models on meshes of Megatron: the numbers, files and errors of the models of Transformers."""

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.model.megatron import library_programs, stage_programs
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import assert_numbers_close, assert_tensors_close
from tests.support.paths import ROOT
from twinkle.model import MultiLoraTransformersModel

pytestmark = pytest.mark.megatron

Sizes = Mapping[str, Any]
Results = dict[str, Any]

TP2: Sizes = {"tp_size": 2}
PP2: Sizes = {"pp_size": 2}
DP2: Sizes = {"dp_size": 2}
SP: Sizes = {"tp_size": 2, "sequence_parallel": True}
TP2_PP2: Sizes = {"tp_size": 2, "pp_size": 2}
DP2_TP2: Sizes = {"dp_size": 2, "tp_size": 2}
DROPOUT = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 whose vocabulary two ranks cannot divide evenly."""
    made = tmp_path_factory.mktemp("qwen3")
    stage_programs.make_model("qwen3").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def two_adapters(folder: Path) -> Results:
    """What two adapters learn in one process of Transformers, the first with dropout."""
    return library_programs.train_two(folder, None, DROPOUT)


@pytest.fixture(scope="module")
def one_adapter(folder: Path) -> Results:
    return library_programs.train_one(folder, None)


def check_same(found: list[Results], wanted: Results, dp: int = 1) -> None:
    """Compare the results of all ranks. Scores are those of a rank's own rows."""
    for rank, each in enumerate(found):
        assert_numbers_close([float(loss) for loss in each["losses"]], [float(loss) for loss in wanted["losses"]], 2e-4)
        norms = [[norm or 0.0 for norm in one["norms"]] for one in (each, wanted)]
        assert_numbers_close(*norms, 3e-5)
        assert each["configs"] == wanted["configs"]
        for name, weights in wanted["weights"].items():
            assert_tensors_close(each["weights"][name], weights, 3e-5)
        data_rank = 0 if dp == 1 else rank // (len(found) // dp)
        for name, scores in wanted["scores"].items():
            own = scores if dp == 1 else scores[2 * data_rank : 2 * data_rank + 2]
            for ours, theirs in zip(each["scores"][name], own, strict=True):
                assert_numbers_close(ours, theirs, 3e-5)


@pytest.mark.parametrize("sizes", [TP2, PP2, SP, DP2], ids=str)
def test_two_adapters_learn_what_they_learn_in_one_process(
    folder: Path, two: ProcessPool, two_adapters: Results, sizes: Sizes
) -> None:
    found = two.run(library_programs.train_two, folder, sizes, DROPOUT)
    check_same(found, two_adapters, sizes.get("dp_size", 1))


def test_two_adapters_on_one_process_of_megatron(folder: Path, two_adapters: Results) -> None:
    check_same([library_programs.train_two(folder, {}, DROPOUT)], two_adapters)


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
def test_one_adapter_learns_what_peft_learns(
    folder: Path, two: ProcessPool, one_adapter: Results, sizes: Sizes
) -> None:
    found = two.run(library_programs.train_one, folder, sizes)
    # PEFT's config has fields of its own, so descriptions differ.
    check_same([each | {"configs": None} for each in found], one_adapter | {"configs": None})
    for each in found:
        for ours, theirs in zip(each["base"], one_adapter["base"], strict=True):
            assert_numbers_close(ours, theirs, 3e-5)


@pytest.mark.parametrize("sizes", [TP2_PP2, DP2_TP2], ids=str)
def test_four_processes(folder: Path, four: ProcessPool, two_adapters: Results, sizes: Sizes) -> None:
    found = four.run(library_programs.train_two, folder, sizes, DROPOUT)
    check_same(found, two_adapters, sizes.get("dp_size", 1))


def contents(directory: str | Path) -> dict[str, bytes]:
    """Return the files of a checkpoint whose contents depend on weights and optimizer state alone."""
    found = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    return {name: data for name, data in found.items() if name.endswith((".safetensors", ".json"))}


def test_checkpoints_move_between_meshes_and_backends(folder: Path, two: ProcessPool, tmp_path: Path) -> None:
    saved = two.run(library_programs.save, folder, TP2, tmp_path / "tp2")[0]
    progress = {"cur_step": 3, "consumed_train_samples": 12, "gradient_accumulation_steps": 2}
    alone = library_programs.resave(folder, None, saved["adapter"], tmp_path / "transformers")
    cut = two.run(library_programs.resave, folder, PP2, str(tmp_path / "transformers" / "again"), tmp_path / "pp2")
    back = two.run(library_programs.resave, folder, TP2, str(tmp_path / "pp2" / "again"), tmp_path / "back")
    first = contents(saved["adapter"])
    assert {"adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"} <= first.keys()
    for place in ("transformers", "pp2", "back"):
        again = contents(tmp_path / place / "again")
        assert again.keys() == first.keys()
        assert [name for name in first if again[name] != first[name]] == []
    for each in (*cut, *back):
        assert each["progress"] == alone["progress"] == progress
        assert_tensors_close(each["weights"]["first"], alone["weights"]["first"], 3e-5)


def test_exports_load_in_peft_and_transformers(folder: Path, two: ProcessPool, tmp_path: Path) -> None:
    for sizes in (TP2, PP2):
        saved = two.run(library_programs.save, folder, sizes, tmp_path / str(len(sizes)) / str(*sizes))[0]
        merged = AutoModelForCausalLM.from_pretrained(saved["merged"])
        base = AutoModelForCausalLM.from_pretrained(folder)
        adapted = peft.PeftModel.from_pretrained(base, saved["weights"])
        for model in (merged, adapted):
            check_scores(model, saved["scores"]["second"])


def check_scores(model: Any, scores: Sequence[Any]) -> None:
    """Compare the log-probabilities of a model of Transformers with those that a Megatron model has returned."""
    for row, wanted in zip(library_programs.rows(80, 4), scores, strict=True):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        found = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0].numpy()
        kept = labels.numpy() != -100
        assert_numbers_close(found[kept], wanted[kept], 3e-5)


def test_whole_weights_are_those_of_the_files(folder: Path, two: ProcessPool) -> None:
    wanted = {name: each.numpy() for name, each in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    for sizes in (TP2, PP2):
        for found in two.run(library_programs.whole_weights, folder, sizes):
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("merge", [True, False, None], ids=["merged", "adapter", "whole"])
@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
def test_a_sampler_draws_with_the_weights_of_all_cuts(
    folder: Path, two: ProcessPool, sizes: Sizes, merge: bool | None
) -> None:
    for found in two.run(library_programs.synchronised, folder, sizes, merge):
        assert max(found) < 2e-5


def test_an_adapter_begins_again(folder: Path, two: ProcessPool) -> None:
    assert two.run(library_programs.initial_weights_again, folder, TP2) == [True, True]


def test_an_adapter_from_a_directory_is_scored_and_not_trained(folder: Path, two: ProcessPool, tmp_path: Path) -> None:
    saved = library_programs.save(folder, {}, tmp_path)
    for found in two.run(library_programs.from_directory, folder, PP2, saved["weights"]):
        assert len(found["errors"]) == 2
        assert "was added with is_trainable=False" in found["errors"][0]
        assert "'second' is frozen" in found["errors"][1]
        for ours, theirs in zip(found["scores"]["second"], saved["scores"]["second"], strict=True):
            assert_numbers_close(ours, theirs, 3e-5)


@pytest.fixture(scope="module")
def all_parameters(folder: Path) -> Results:
    return library_programs.train_whole(folder, None)


@pytest.mark.parametrize("sizes", [TP2, PP2, SP, DP2], ids=str)
def test_all_parameters_learn_what_they_learn_in_one_process(
    folder: Path, two: ProcessPool, all_parameters: Results, sizes: Sizes
) -> None:
    found = two.run(library_programs.train_whole, folder, sizes)
    assert found[1]["weights"] == {"": {}}, "whole weights are on the first process"
    check_same([found[0], found[1] | {"weights": found[0]["weights"]}], all_parameters, sizes.get("dp_size", 1))


def test_checkpoints_of_all_parameters_move_between_meshes(folder: Path, two: ProcessPool, tmp_path: Path) -> None:
    saved = two.run(library_programs.save_whole, folder, TP2, tmp_path / "tp2")[0]
    first = contents(saved["whole"])
    for sizes, place in ((PP2, "pp2"), (TP2, "back")):
        found = two.run(library_programs.resume_whole, folder, sizes, saved["whole"], tmp_path / place)[0]
        assert found["progress"] == {"cur_step": 3, "consumed_train_samples": 0, "gradient_accumulation_steps": 2}
        again = contents(found["again"])
        assert again.keys() == first.keys()
        assert [name for name in first if again[name] != first[name]] == []
        assert_numbers_close(found["norm"], saved["norm"], 3e-5)
        assert_tensors_close(found["weights"], saved["weights"], 3e-5)
    alone = library_programs.resume_whole(folder, {}, saved["whole"], tmp_path / "alone")
    assert contents(alone["again"]) == first
    reloaded = AutoModelForCausalLM.from_pretrained(saved["plain"]).state_dict()
    assert reloaded.keys() == saved["weights"].keys()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_moe")
    stage_programs.make_model("qwen3_moe").save_pretrained(made)
    return made


@pytest.mark.parametrize("sizes", [{"dp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=str)
def test_adapters_on_a_model_with_experts(experts: Path, two: ProcessPool, sizes: Sizes) -> None:
    wanted = library_programs.train_two(experts, None, DROPOUT, "experts")
    found = two.run(library_programs.train_two, experts, sizes, DROPOUT, "experts")
    check_same(found, wanted, sizes.get("dp_size", 1))


def test_a_merged_folder_with_experts(experts: Path, two: ProcessPool, tmp_path: Path) -> None:
    saved = two.run(library_programs.save, experts, {"tp_size": 2, "ep_size": 2}, tmp_path, "experts")[0]
    check_scores(AutoModelForCausalLM.from_pretrained(saved["merged"]), saved["scores"]["second"])


def test_a_script_under_torchrun(folder: Path, tmp_path: Path) -> None:
    """Models and data loaders take the mesh of ``initialize``; both processes get the same rows."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "tests.model.megatron.torchrun_script", str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "MegatronModel: tp 2" in done.stdout
    alone = MultiLoraTransformersModel(model_id=folder, mixed_precision="no", device="cpu")
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    seed = int.from_bytes(hashlib.sha256(b"3\ndefault").digest()[:4])
    alone.add_adapter_to_model("default", config, seed=seed)
    alone.set_optimizer("AdamW", lr=1e-3, eps=1e-5, adapter_name="default")
    alone.set_lr_scheduler("LambdaLR", lr_lambda=lambda step: (0.0, 1.0, 0.5)[step], adapter_name="default")
    data = library_programs.rows(0, 8)
    for batch in (data[:4], data[4:]):
        alone.forward_backward(inputs=batch, adapter_name="default")
        alone.clip_grad_and_step(adapter_name="default")
    weights = load_file(tmp_path / "last" / "adapter_model.safetensors")
    wanted = alone.get_state_dict(adapter_name="default")
    assert_tensors_close(
        {name: each.numpy() for name, each in weights.items()},
        {name: each.numpy() for name, each in wanted.items()},
        3e-5,
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "qwen3"
