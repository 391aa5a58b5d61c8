"""GRPO of all parameters with a Megatron trainer on the workers of a Ray cluster, and a torch sampler.

Rows, rewards and updates are repeated by a model of Transformers in one process. tests/dropin has GRPO with adapters.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import twinkle
from tests.model.megatron import stage_programs
from tests.support.paths import SOURCE
from tests.support.servers.running import PATIENT_RAY
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.infra import DeviceGroup, DeviceMesh
from twinkle.model import MegatronModel, TransformersModel
from twinkle.sampler import LocalSampler

pytestmark = pytest.mark.megatron

PROMPTS = [{"input_ids": tokens, "labels": [-100] * len(tokens)} for tokens in ([5, 17, 40], [9, 60])]
GENERATIONS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    stage_programs.make_model("qwen3").save_pretrained(made)
    return made


@pytest.fixture
def program() -> Iterator[None]:
    """A Ray cluster with a group of two CPU workers."""
    if not twinkle.exists("ray"):
        pytest.skip("Ray is not installed; `make test-megatron` does that")
    import ray

    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25"}
    os.environ |= {**PATIENT_RAY, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on the loopback address
    ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    twinkle.initialize("ray", groups=[DeviceGroup("model", 2, "CPU")], seed=7, name="tests")
    yield
    twinkle.shutdown()
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def prepared(model: Any) -> Any:
    model.set_optimizer("AdamW", lr=1e-3, eps=1e-5)
    model.set_loss("GRPOLoss", epsilon=0.2)
    return model


def result(value: Any) -> Any:
    return value() if callable(value) else value


def update(model: Any, rows: list[Any], old: list[list[float]], advantages: list[float]) -> float:
    outputs = result(model.forward_backward(inputs=rows, old_logps=old, advantages=advantages))
    result(model.clip_grad_and_step(max_grad_norm=1.0))
    return float(outputs["loss"])


def test_all_parameters(program: None, folder: Path) -> None:
    """Each batch is sampled with the weights of the update before, and both models learn the same from it."""
    options: Any = {"model_id": str(folder), "mixed_precision": "no"}
    mesh = DeviceMesh.from_sizes(device_type="cpu", pp_size=2)
    remote = prepared(MegatronModel(**options, device="cpu", device_mesh=mesh, remote_group="model"))
    local = prepared(TransformersModel(**options))
    sampler = LocalSampler(str(folder), kv_budget_bytes=1 << 20, dtype="fp32")
    manager = CheckpointEngineManager(remote, sampler, bucket_size_mb=0.05)
    rewarded = []
    for step in range(3):
        assert manager.sync_weights() == f"sync-{step + 1}"
        params = SamplingParams(max_tokens=5, num_samples=GENERATIONS, seed=100 * step, logprobs=1)
        sequences = [sequence for response in sampler.sample(PROMPTS, params) for sequence in response.sequences]
        rows = [sequence.new_input_feature for sequence in sequences]
        old = [[pairs[0][1] for pairs in sequence.logprobs] for sequence in sequences]
        scored = local.forward_only(inputs=rows)["logps"]
        for row, drawn, logps in zip(rows, old, scored, strict=True):
            kept = logps[: len(row["labels"])][torch.tensor(row["labels"]) != -100]
            torch.testing.assert_close(kept.float(), torch.tensor(drawn), rtol=1e-4, atol=1e-4)
        rewards = [sum(token % 2 for token in sequence.tokens) / 5 for sequence in sequences]  # odd tokens
        advantages = GRPOAdvantage()(rewards, num_generations=GENERATIONS, scale="group").tolist()
        assert any(advantages)
        rewarded.append(update(remote, rows, old, advantages))
        assert rewarded[-1] == pytest.approx(update(local, rows, old, advantages), abs=1e-5)
    found, wanted = result(remote.get_state_dict()), local.get_state_dict()
    assert found.keys() == wanted.keys()
    assert all((found[name] - wanted[name]).norm() <= 1e-4 * wanted[name].norm() for name in wanted)
