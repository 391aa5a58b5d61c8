"""Valid device meshes and options for them. One process is enough to check refusals."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.model.parallel.lora_programs import llama
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import MultiLoraTransformersModel, Trainer, TransformersModel, adopt_model, parallel
from twinkle.model.parallel import ALONE

MODEL = "random://llama-tiny"
SHARDED = DeviceMesh.from_sizes(dp_size=1, fsdp_size=2, device_type="cpu")

REPLICATED = DeviceMesh.from_sizes(dp_size=2, device_type="cpu")


@pytest.mark.parametrize("model", [TransformersModel, MultiLoraTransformersModel, Trainer.from_pretrained])
@pytest.mark.parametrize("size", ["tp_size", "pp_size", "cp_size", "ep_size"])
def test_other_kinds_of_parallelism_are_refused(model: Any, size: str) -> None:
    mesh = DeviceMesh.from_sizes(**{"dp_size": 2, size: 2}, device_type="cpu")
    with pytest.raises(UnsupportedError, match=f"{size}=2.*dp_size and fsdp_size"):
        model(model_id=MODEL, device="cpu", device_mesh=mesh)


def test_a_mesh_without_names_does_not_say_who_shares_the_data() -> None:
    mesh = DeviceMesh(np.arange(2), device_type="cpu")
    with pytest.raises(InvalidInputError, match="mesh_dim_names"):
        Trainer.from_pretrained(MODEL, device="cpu", device_mesh=mesh)


@pytest.mark.parametrize("model", [TransformersModel, MultiLoraTransformersModel])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"fsdp_config": {"cpu_offload": True}},
            UnknownNameError,
            "known: expert_parallel, manual_prefetch, reshard_after_forward",
        ),
        ({"device_mesh": SHARDED, "fsdp_config": {"cpu_offload": True}}, UnknownNameError, "cpu_offload"),
        ({"device_mesh": SHARDED, "fsdp_config": {"reshard_after_forward": 2}}, InvalidInputError, "True or False"),
        ({"fsdp_config": {"expert_parallel": True}}, InvalidInputError, "expert_parallel: got True.*a mapping"),
        ({"fsdp_config": {"expert_parallel": {"size": 2}}}, UnknownNameError, "expert_parallel entry 'size'"),
        ({"fsdp_config": {"expert_parallel": {"ep_size": 0}}}, InvalidInputError, "ep_size: got 0"),
        ({"fsdp_config": {"expert_parallel": {"router_dtype": "fp8"}}}, InvalidInputError, "router_dtype: got 'fp8'"),
        (
            {"fsdp_config": {"expert_parallel": {"ignore_shared_experts": True}}},
            UnsupportedError,
            "ignore_shared_experts: shared experts are a part",
        ),
        (
            {"device_mesh": REPLICATED, "fsdp_config": {"expert_parallel": {}}},
            UnsupportedError,
            "expert_parallel: experts are divided over processes by fsdp_size",
        ),
        (
            {"device_mesh": SHARDED, "fsdp_config": {"expert_parallel": {"ep_size": 3}}},
            InvalidInputError,
            "ep_size: got 3, allowed: a divisor of 2",
        ),
        ({"ddp_config": {"bucket_cap": 1}}, UnknownNameError, "ddp_config entry 'bucket_cap'; known: .*bucket_cap_mb"),
        ({"ddp_config": {"comm_hook": "fp16"}}, UnsupportedError, "without compression"),
        ({"strategy": "zero"}, UnknownNameError, "native_fsdp"),
    ],
)
def test_unknown_options_are_refused(model: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        model(model_id=MODEL, device="cpu", **options)


@pytest.mark.parametrize("model", [TransformersModel, MultiLoraTransformersModel])
def test_options_for_several_processes_change_nothing_in_one(model: Any) -> None:
    made = model(
        model_id=MODEL,
        device="cpu",
        mixed_precision="fp32",
        strategy="native_fsdp",
        ddp_config={"find_unused_parameters": True, "comm_hook": "no"},
        fsdp_config={"reshard_after_forward": False, "manual_prefetch": True, "expert_parallel": {"enabled": True}},
        grad_scaler_config={"init_scale": 2.0},
        memory_efficient_init=True,
        attn_implementation="flash_attention_2",  # which is not installed here
        torch_dtype=torch.float32,
        trust_remote_code=False,
    )
    plain = model(model_id=MODEL, device="cpu", mixed_precision="fp32")
    losses = []
    for each in (made, plain):
        each.add_adapter_to_model("own", {"r": 2, "target_modules": ["q_proj"]}, seed=1)
        row = {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}
        losses.append(each.forward_backward(inputs=[row], adapter_name="own")["loss"])
    assert losses[0] == losses[1]


def test_a_mesh_of_one_process_is_none() -> None:
    trainer = Trainer(adopt_model(llama("toy")), model_id="test", device_mesh=DeviceMesh.from_sizes(device_type="cpu"))
    assert trainer.ranks is ALONE


def test_processes_wait_for_each_other_as_long_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda backend, **options: told.update(options))
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(parallel.atexit, "register", lambda function: None)
    for value, seconds in (("", 7200), ("12.5", 12.5)):
        monkeypatch.setenv("TWINKLE_DIST_TIMEOUT_SECONDS", value)
        parallel.join_processes(torch.device("cpu"), 2)
        assert told["timeout"].total_seconds() == seconds
