"""``train_mode: full`` in a configuration: keys of adapters are named as without effect, vLLM is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import ConfigError
from twinkle.server.config import ServerConfig, load_config

FULL = "it has no effect with train_mode: full, which has no adapters"


def write(folder: Path, sampler: str = "torch", sampling: Any = None, limits: Any = None, **args: Any) -> Path:
    """Write a configuration with one model, to which ``args`` belong, and its sampler."""
    backend = "mock" if sampler == "mock" else "transformers"
    model = {"model_id": "org/m", "backend": backend, **args}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {
            "name": "sampler",
            "import_path": "sampler",
            "args": {"model_id": "org/m", "sampler_type": sampler, **(sampling or {})},
        },
    ]
    file = folder / "server.yaml"
    file.write_text(json.dumps({"runtime": "embedded", "limits": limits or {}, "applications": applications}))
    return file


def test_the_mode_is_lora_unless_the_file_says_full(tmp_path: Path) -> None:
    config, notes = load_config(write(tmp_path))
    assert config.served_models[0].model.train_mode == "lora"
    config, notes = load_config(write(tmp_path, train_mode="full"))
    args = config.served_models[0].model
    assert (args.train_mode, args.max_replayed_steps) == ("full", 200)
    assert notes == []


@pytest.mark.parametrize(
    ("key", "value"), [("max_loras", 4), ("max_r", 8), ("target_modules", "all-linear"), ("lora_config", {"r": 8})]
)
def test_options_of_adapters_are_named_as_without_effect(key: str, value: Any, tmp_path: Path) -> None:
    config, notes = load_config(write(tmp_path, train_mode="full", **{key: value}))
    assert notes == [f"applications[1].args.{key}: dropped, {FULL}"]
    assert config.limits == ServerConfig().limits


@pytest.mark.parametrize(
    ("sections", "note"),
    [
        ({"train_mode": "full", "merge": False}, "applications[1].args.merge: has no effect with train_mode: full"),
        ({"max_replayed_steps": 9}, "applications[1].args.max_replayed_steps: has no effect with train_mode: lora"),
        ({"sampling": {"max_weight_sets": 2}}, "applications[2].args.max_weight_sets: has no effect with train_mode"),
        (
            {"sampler": "mock", "train_mode": "full", "sampling": {"max_weight_sets": 2}},
            "applications[2].args.max_weight_sets: has no effect, a mock has no weights",
        ),
        ({"train_mode": "full", "limits": {"max_rank": 8}}, "limits.max_rank: has no effect, no model of this server"),
    ],
)
def test_keys_of_the_other_mode_are_named(sections: dict[str, Any], note: str, tmp_path: Path) -> None:
    _, notes = load_config(write(tmp_path, **sections))
    assert len(notes) == 1
    assert notes[0].startswith(note)


def test_vllm_is_refused_because_its_versions_are_adapters(tmp_path: Path) -> None:
    load_config(write(tmp_path, "vllm"))
    with pytest.raises(ConfigError, match=r"sampler_type: got 'vllm', allowed: torch with train_mode: full: a version"):
        load_config(write(tmp_path, "vllm", train_mode="full"))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("train_mode", "Full", "lora or full"),
        ("train_mode", True, "lora or full"),
        ("train_mode", None, "lora or full"),
        ("max_replayed_steps", 0, "an integer ≥ 1"),
        ("max_replayed_steps", None, "an integer ≥ 1"),
        ("max_replayed_steps", 2.5, "an integer ≥ 1"),
    ],
)
def test_other_values_are_refused(key: str, value: Any, allowed: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"args\.{key}: got .*, allowed: {allowed}"):
        load_config(write(tmp_path, **{"train_mode": "full", key: value}))


def test_replicas_serve_several_tenants_at_once(tmp_path: Path) -> None:
    """The existing Twinkle refuses more than one replica with this mode."""
    file = write(tmp_path, train_mode="full")
    content = json.loads(file.read_text())
    content["runtime"] = "ray"
    content["applications"][1]["deployments"] = [{"num_replicas": 3}]
    file.write_text(json.dumps(content))
    load_config(file)
