"""Settings that can be configured but not launched yet: the file is valid, a note says so, and a launch is refused."""

import pytest

from twinkle.errors import ConfigError
from twinkle.server.cli.launch import run_server
from twinkle.server.config import ServerConfig, default_config
from twinkle.server.config.rules import launch_notes, refuse_what_is_not_yet

SPREAD = {
    "runtime": "ray",
    "applications": [
        {
            "name": "model",
            "import_path": "model",
            "args": {
                "model_id": "org/large",
                "backend": "megatron",
                "device_group": {"name": "model", "ranks": 4, "device_type": "cuda"},
                "device_mesh": {"pp_size": 2, "dp_size": 2},
            },
        },
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": "org/large", "sampler_type": "vllm"}},
    ],
}


def test_several_devices_and_megatron_are_configured():
    config = ServerConfig.model_validate(SPREAD)
    assert config.served_models[0].model.backend == "megatron"
    (note,) = launch_notes(config.applications)
    assert note.startswith("applications[0].args.backend: megatron is valid")
    assert "cannot be launched yet: the Megatron backend comes later" in note


def test_a_launch_names_it():
    with pytest.raises(ConfigError) as refused:
        run_server(ServerConfig.model_validate(SPREAD))
    assert "applications[0].args.backend: got megatron, allowed: transformers or mock" in str(refused.value)


def test_nothing_stands_in_the_way_of_the_default():
    assert launch_notes(default_config().applications) == []
    refuse_what_is_not_yet(default_config().applications)


def test_the_trainers_own_sampler_is_not_for_megatron():
    torch = {"name": "sampler", "import_path": "sampler", "args": {"model_id": "org/large", "sampler_type": "torch"}}
    with pytest.raises(ValueError, match="vllm, as the model's backend is megatron"):
        ServerConfig.model_validate({**SPREAD, "applications": [SPREAD["applications"][0], torch]})
