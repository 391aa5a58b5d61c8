"""The library's models of Megatron on the workers of a Ray cluster: the numbers of one process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import twinkle
from tests.model.megatron import library_programs, stage_programs
from tests.support.paths import SOURCE
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import UnsupportedError
from twinkle.infra import DeviceGroup, DeviceMesh
from twinkle.model import MultiLoraMegatronModel, MultiLoraTransformersModel
from twinkle.sampler import LocalSampler

pytestmark = pytest.mark.megatron

A = "tenant"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    stage_programs.make_model("qwen3").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def program(folder: Path) -> Iterator[None]:
    """A Ray cluster with two groups of CPU workers."""
    if not twinkle.exists("ray"):
        pytest.skip("Ray is not installed; `make test-megatron` does that")
    import ray

    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25"}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on the loopback address
    ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    groups = [DeviceGroup("two", 2, "CPU"), DeviceGroup("pairs", 2, "CPU")]
    twinkle.initialize("ray", groups=groups, seed=7, name="tests")
    yield
    twinkle.shutdown()
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def prepared(model: Any) -> Any:
    model.add_adapter_to_model(A, LORA)
    model.set_optimizer("AdamW", lr=5e-3, eps=1e-5, adapter_name=A)
    return model


def result(value: Any) -> Any:
    return value() if callable(value) else value


def trained(model: Any) -> dict[str, Any]:
    """Train on three batches, and return what was computed."""
    losses, norms = [], []
    for number in range(3):
        outputs = result(model.forward_backward(inputs=library_programs.rows(number), adapter_name=A))
        norms.append(result(model.clip_grad_and_step(max_grad_norm=0.3, adapter_name=A)))
        losses.append(outputs["loss"] / outputs["num_tokens"])
        told = model.calculate_metric(is_training=True, adapter_name=A)
        assert float(told["loss"]) == pytest.approx(losses[-1], abs=1e-4)
    scores = result(model.forward_only(inputs=library_programs.rows(80), adapter_name=A))["logps"]
    return {"losses": losses, "norms": norms, "scores": scores}


@pytest.mark.parametrize(("group", "sizes"), [("two", {"tp_size": 2}), ("pairs", {"pp_size": 2})], ids=str)
def test_workers_learn_what_one_process_learns(
    program: None, folder: Path, group: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    options: Any = {"model_id": str(folder), "mixed_precision": "no", "device": "cpu"}
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    remote = prepared(MultiLoraMegatronModel(**options, device_mesh=mesh, remote_group=group, instance_id=group))
    local = prepared(MultiLoraTransformersModel(**options))
    found, wanted = trained(remote), trained(local)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=3e-5)
    assert found["scores"].shape == wanted["scores"].shape, "rows come from one rank of each data rank"
    for index, row in enumerate(library_programs.rows(80)):
        length = len(row["input_ids"])
        ours, theirs = found["scores"][index, :length], wanted["scores"][index, :length]
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
    ours, theirs = result(remote.get_state_dict(adapter_name=A)), local.get_state_dict(adapter_name=A)
    assert all((ours[name] - theirs[name]).norm() <= 3e-5 * theirs[name].norm() for name in theirs)
    assert f"{group}: {next(iter(sizes)).removesuffix('_size')} 2" in twinkle.get_device_placement()
    with pytest.raises(UnsupportedError, match="disable_lora: got True"):
        result(remote.forward_backward(inputs=library_programs.rows(1), adapter_name=A, disable_lora=True))

    merged = remote.save("merged", str(tmp_path), adapter_name=A, merge_lora=True)
    row = library_programs.rows(80)[0]
    with torch.no_grad():
        logprobs = (
            AutoModelForCausalLM.from_pretrained(merged)(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        )
    labels = torch.tensor(row["labels"])
    kept = labels != -100
    torch.testing.assert_close(
        logprobs[kept, labels[kept]], wanted["scores"][0, : len(labels)][kept], rtol=1e-4, atol=1e-4
    )

    sampler = LocalSampler(str(folder), kv_budget_bytes=1 << 20, dtype="fp32")
    for merge in (False, True):
        CheckpointEngineManager(remote, sampler, bucket_size_mb=0.05).sync_weights(merge, adapter_name=A)
        prompt = {"input_ids": [5, 17, 40], "labels": [-100] * 3}
        (response,) = sampler.sample([prompt], SamplingParams(max_tokens=4, seed=1, logprobs=1))
        sequence = response.sequences[0]
        scored = local.forward_only(inputs=[sequence.new_input_feature], adapter_name=A)["logps"][0]
        drawn = torch.tensor([pairs[0][1] for pairs in sequence.logprobs])
        torch.testing.assert_close(scored[2 : 2 + len(drawn)], drawn, rtol=1e-4, atol=1e-4)
