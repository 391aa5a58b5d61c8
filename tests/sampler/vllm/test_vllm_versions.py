"""Versions never change, are complete or refused, and leave no files behind."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.sampler.vllm.vllm_model import BOUND, events, logprobs, make_adapter, peft_reference, prompt, request, run
from twinkle.errors import CapacityError, CheckpointError, InvalidInputError, TwinkleServerError, UnsupportedError
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem
from twinkle.sampler.received_weights import as_tensors

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler

pytestmark = pytest.mark.vllm

PROMPT = prompt(10, 3)


def greedy(sampler: "VllmSampler", version: str | None) -> np.ndarray:
    one = request("r", version, PROMPT, max_tokens=8, temperature=0.0)
    return run(sampler, [one])["r"].sequences[0].logprobs


def files(sampler: "VllmSampler") -> set[str]:
    return {path.name for path in sampler._files.root.iterdir()}


def test_training_on_does_not_change_a_version(sampler: "VllmSampler", trainer: Trainer) -> None:
    make_adapter(trainer, "trained", LoraSpec(rank=8, seed=9, train_unembed=True), seed=9)
    before = files(sampler)
    sampler.publish("one", "trained")
    first = greedy(sampler, "one")
    row = prompt(20, 5)
    trainer.forward_backward([TrainItem("trained", [Datum(row[:-1], row[1:])])])
    trainer.optim_step("trained", AdamParams(learning_rate=1e-2))
    sampler.publish("two", "trained")
    both = [request(name, name, PROMPT, max_tokens=8, temperature=0.0) for name in ("one", "two")]
    together = run(sampler, both)
    np.testing.assert_array_equal(together["one"].sequences[0].logprobs, first)
    assert np.abs(together["two"].sequences[0].logprobs - first).max() > 1e-3
    with pytest.raises(InvalidInputError, match="versions never change"):
        sampler.publish("one", "trained")
    for name in ("one", "two"):
        sampler.retire(name)
    trainer.remove_adapter("trained")
    assert files(sampler) == before


def test_weights_from_another_process(sampler: "VllmSampler", trainer: Trainer) -> None:
    before = files(sampler)
    sampler.receive_version("received", trainer.peft_config("a"), as_tensors(trainer.weights("a")))
    np.testing.assert_array_equal(greedy(sampler, "received"), greedy(sampler, "a"))
    sampler.retire("received")
    assert files(sampler) == before


def test_retired_while_in_use(sampler: "VllmSampler", trainer: Trainer, tmp_path: Path) -> None:
    trainer.save("a", tmp_path / "a", optimizer=False)
    before = files(sampler)
    sampler.load_version("short-lived", str(tmp_path / "a"))
    wanted = request("r", "short-lived", PROMPT, max_tokens=60, seed=1)
    sampler.submit(wanted)
    sampler.retire("short-lived")
    sampler.retire("never was")
    assert "short-lived" not in sampler.version_ids()
    assert files(sampler) > before
    (finished,) = events(sampler)
    expected = run(sampler, [request("r", "a", PROMPT, max_tokens=60, seed=1)])["r"]
    np.testing.assert_array_equal(finished.outcome.sequences[0].tokens, expected.sequences[0].tokens)
    assert files(sampler) == before
    with pytest.raises(InvalidInputError, match="version_id"):
        sampler.submit(wanted)


def test_retired_right_after_its_requests_were_cancelled(
    sampler: "VllmSampler", trainer: Trainer, tmp_path: Path
) -> None:
    """At this moment vLLM does not know of the cancellation. It must still find the files, or it would die."""
    trainer.save("a", tmp_path / "a", optimizer=False)
    before = files(sampler)
    for number in range(6):  # more than vLLM holds at once
        name = f"brief-{number}"
        sampler.load_version(name, str(tmp_path / "a"))
        sampler.submit(request(name, name, PROMPT, 40, max_tokens=200))
    for number in range(6):
        sampler.cancel(f"brief-{number}")
        sampler.retire(f"brief-{number}")
    assert not sampler.busy
    run(sampler, [request("r", "a", PROMPT, max_tokens=40)])
    while sampler._used:
        assert sampler.step() == []
    assert files(sampler) == before


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["down_proj", "lm_head"]])
def test_an_adapter_of_pefts(sampler: "VllmSampler", model_dir: Path, tmp_path: Path, modules: list[str]) -> None:
    """Includes the files that PEFT writes if the head is among the modules."""
    model = get_peft_model(peft_reference(model_dir, None), LoraConfig(r=4, lora_alpha=8, target_modules=modules))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    model.eval().save_pretrained(tmp_path / "peft")
    sampler.load_version("peft", str(tmp_path / "peft"))
    one = request("r", "peft", PROMPT, max_tokens=8, seed=4)
    (sequence,) = run(sampler, [one])["r"].sequences
    rows = logprobs(model, np.concatenate([PROMPT, sequence.tokens]))[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(sequence.logprobs, rows[np.arange(8), sequence.tokens], atol=BOUND)
    sampler.retire("peft")


def test_more_versions_than_fit_a_batch(sampler: "VllmSampler", trainer: Trainer) -> None:
    """vLLM drops versions and reads them again; each gives the same samples as alone."""
    names = [f"many-{number}" for number in range(9)]
    for number, name in enumerate(names):
        make_adapter(trainer, name, LoraSpec(rank=4, seed=number), seed=20 + number)
        sampler.publish(name, name)
    alone = {name: greedy(sampler, name) for name in names}
    together = run(sampler, [request(name, name, PROMPT, max_tokens=8, temperature=0.0) for name in names])
    for name in names:
        np.testing.assert_allclose(together[name].sequences[0].logprobs, alone[name], atol=BOUND)
        sampler.retire(name)
        trainer.remove_adapter(name)
    assert len({tuple(value.tolist()) for value in alone.values()}) == len(names)


def test_a_head_that_vllm_would_not_apply(
    sampler: "VllmSampler", trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with a message that says what to do, or left out if it changes nothing."""
    assert sampler._unapplied == frozenset()
    monkeypatch.setattr(sampler, "_unapplied", frozenset({"lm_head"}))
    before = files(sampler)
    with pytest.raises(UnsupportedError, match=r"lm_head.*train_unembed=False.*sampler_type torch"):
        sampler.publish("headed", "b")
    assert "headed" not in sampler.version_ids()
    assert files(sampler) == before
    trainer.create_adapter("fresh", LoraSpec(rank=4, seed=1, train_unembed=True))
    sampler.publish("headed", "fresh")
    np.testing.assert_allclose(greedy(sampler, "headed"), greedy(sampler, None), atol=BOUND)
    sampler.retire("headed")
    trainer.remove_adapter("fresh")


def test_an_adapter_that_vllm_computes_otherwise(sampler: "VllmSampler", trainer: Trainer) -> None:
    """vLLM's numbers differ as if it had ignored a module: no version is published."""
    from twinkle.sampler.vllm.versions import AdapterWeights

    before = files(sampler)
    make_adapter(trainer, "whole", LoraSpec(rank=4, seed=5), seed=5)
    make_adapter(trainer, "part", LoraSpec(rank=4, seed=5, train_mlp=False), seed=5)
    sampler._scorer.publish("wrong", "whole")
    with pytest.raises(TwinkleServerError, match="does not compute this adapter as the trainer does"):
        sampler._install("wrong", lambda: AdapterWeights(*trainer.peft_adapter("part", torch.float32)))
    assert "wrong" not in sampler.version_ids()
    assert "wrong" not in sampler._scorer.version_ids()
    assert files(sampler) == before
    for name in ("whole", "part"):
        trainer.remove_adapter(name)


def test_what_cannot_be_published(
    sampler: "VllmSampler", trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.create_adapter("wide", LoraSpec(rank=64, seed=1))
    with pytest.raises(UnsupportedError, match=r"rank: the adapter has 64.*32 at most.*engine_args.max_lora_rank"):
        sampler.publish("wide", "wide")
    trainer.remove_adapter("wide")
    with pytest.raises(CheckpointError):
        sampler.load_version("nothing", str(tmp_path))
    before = files(sampler)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 2**20, 1000))
    with pytest.raises(CapacityError, match=r"MiB left for versions.*memory_dir"):
        sampler.publish("large", "a")
    assert files(sampler) == before
    assert "large" not in sampler._scorer.version_ids()


def test_a_version_that_could_not_be_written_can_be_tried_again(
    sampler: "VllmSampler", trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    before = files(sampler)
    with monkeypatch.context() as patch:
        patch.setattr(sampler._files, "write", full)
        with pytest.raises(OSError, match="no space"):
            sampler.publish("again", "a")
        patch.undo()
        patch.setattr(sampler._scorer, "step", full)
        with pytest.raises(OSError, match="no space"):
            sampler.publish("again", "a")
    assert files(sampler) == before
    sampler.publish("again", "a")
    np.testing.assert_array_equal(greedy(sampler, "again"), greedy(sampler, "a"))
    sampler.retire("again")


def test_where_versions_lie(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from twinkle.sampler.vllm.versions import VersionFiles

    with pytest.raises(InvalidInputError, match="memory_dir"):
        VersionFiles(tmp_path / "missing", torch.float32)
    left_behind = tmp_path / f"twinkle-vllm-{2**30}-x"
    left_behind.mkdir()
    files = VersionFiles(tmp_path, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == [files.root.name]
    assert VersionFiles(tmp_path, torch.float32).root != files.root
    assert files.root.exists()


def test_the_layers_of_linear_attention_that_vllm_joins_come_together(tmp_path: Path) -> None:
    """An adapter on one of them gets zeros on the other: without it, vLLM cannot load the adapter."""
    from twinkle.sampler.vllm.versions import AdapterWeights, VersionFiles, partners_of

    trainer = Trainer.from_pretrained("random://qwen3.5-tiny", device="cpu", dtype="fp32")
    partners = partners_of(trainer.architecture.linear)
    sizes = {target.name: target.out_features for target in trainer.architecture.linear}
    assert {name.rpartition(".")[2] for name in partners} == {"in_proj_qkv", "in_proj_z"}
    trainer.create_adapter("whole", LoraSpec(rank=8, seed=1))
    config, tensors = trainer.peft_adapter("whole", torch.float32)
    files = VersionFiles(tmp_path, torch.float32, partners=partners)
    for missing in ("in_proj_q.", "in_proj_z."):  # Twinkle's own form has query, key and value apart
        left_out = ("in_proj_q.", "in_proj_k.", "in_proj_v.") if missing == "in_proj_q." else (missing,)
        part = {name: each for name, each in tensors.items() if not any(one in name for one in left_out)}
        assert len(part) < len(tensors)
        version = files.write(AdapterWeights(config, part), frozenset())
        written = load_file(version.directory / "adapter_model.safetensors")
        for name, partner in partners.items():
            ours, theirs = (written[f"base_model.model.{each}.lora_B.weight"] for each in (name, partner.name))
            assert (len(ours), len(theirs)) == (sizes[name], partner.out_features)
            assert ours.shape[1] == theirs.shape[1]
    with pytest.raises(UnsupportedError, match=r"rank: the adapter has 8, which becomes 24 because vLLM joins"):
        files.write(AdapterWeights(config, tensors), frozenset(), max_rank=16)
    files.close()


@pytest.mark.parametrize("model", ["qwen3.5-tiny", "qwen3.5-moe-tiny", "qwen3-vl-moe-tiny", "gpt-oss-tiny"])
def test_the_trainer_reads_what_the_self_check_writes(tmp_path: Path, model: str) -> None:
    """At the start, vLLM and the trainer compute adapters on modules of one name, which both read from a version."""
    from twinkle.model.adapters.expert_exports import VLLM_FORMS
    from twinkle.sampler.vllm.self_check import EXPERTS, kinds, made_up_adapters
    from twinkle.sampler.vllm.versions import VersionFiles, partners_of

    trainer = Trainer.from_pretrained(f"random://{model}", device="cpu", dtype="fp32")
    architecture = trainer.architecture
    form = VLLM_FORMS.get(architecture.family)
    alternating = any(each.alternating for each in architecture.experts)
    files = VersionFiles(
        tmp_path, torch.float32, form, alternating=alternating, partners=partners_of(architecture.linear)
    )
    for kind in kinds(architecture):
        for adapter in made_up_adapters(architecture, kind):
            version = files.write(adapter, frozenset())
            read = trainer.frozen_from_checkpoint(version.directory)
            found = {target.name for target in read.layout.targets}
            for name in adapter.tensors:
                module = name.removeprefix("base_model.model.").partition(".lora_")[0]
                if kind == EXPERTS:  # vLLM's form has other names for their projections
                    module = module.rpartition(".")[0]
                assert any(f"{each}.".startswith(f"{module}.") for each in found), f"{kind}: {sorted(found)}"
            files.remove(version)
    files.close()


@pytest.mark.parametrize("modules", ["all-linear", None])
def test_modules_that_are_not_listed_are_refused_where_some_must_be_added(tmp_path: Path, modules: str | None) -> None:
    from twinkle.sampler.vllm.versions import AdapterWeights, Partner, VersionFiles

    files = VersionFiles(tmp_path, torch.float32, partners={"a.one": Partner("a.two", 4)})
    tensors = {f"base_model.model.a.one.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    with pytest.raises(UnsupportedError, match="target_modules"):
        files.write(AdapterWeights({"r": 2, "target_modules": modules}, tensors), frozenset())
    written = files.write(AdapterWeights({"r": 2, "target_modules": ["one"]}, tensors), frozenset())
    assert len(load_file(written.directory / "adapter_model.safetensors")) == 4
    assert '"target_modules": ["one", "two"]' in (written.directory / "adapter_config.json").read_text()
    files.close()
