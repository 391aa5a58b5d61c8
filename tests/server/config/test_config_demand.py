"""What a configuration asks of a Ray cluster, and what check-config says and refuses about it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from twinkle.server.cli import command_line as cli
from twinkle.server.cli import config_commands
from twinkle.server.config import ServerConfig, load_config
from twinkle.server.config.demand import (
    Demand,
    Machine,
    claimed_gpus,
    demands_of,
    machine_notes,
    total_cpus,
    total_gpus,
)
from twinkle.server.config.server_config import find_problems
from twinkle.server.runtime.ray.layout import ServeAddress, deployment_names, layout_of

DOCUMENTED = ROOT / "tests/documented/yaml"


def model(name: str = "m", deployment: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    trained = {"model_id": f"org/{name}", "backend": "transformers", **args}
    return {"name": name, "import_path": "model", "args": trained, "deployments": [deployment or {}]}


def group(ranks: Any, device_type: str = "cuda", **keys: Any) -> dict[str, Any]:
    return {"name": "g", "ranks": ranks, "device_type": device_type, **keys}


def problems(*applications: dict[str, Any]) -> dict[str, str]:
    found = find_problems({"runtime": "ray", "applications": list(applications)})
    return {one.field.removeprefix("applications[0]."): one.allowed for one in found}


def demands(*applications: dict[str, Any]) -> list[Demand]:
    config = ServerConfig.model_validate({"runtime": "ray", "applications": list(applications)})
    return demands_of(config.applications, has_gpus=True)


# --- what a launch would refuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"device_mesh": {"mesh": [0, 1], "mesh_dim_names": ["tp"]}}, "args.device_mesh.mesh_dim_names"),
        ({"device_mesh": {"mesh": [0, 1], "mesh_dim_names": ["pp"]}}, "args.device_mesh.mesh_dim_names"),
        (
            {"device_mesh": {"mesh": [[0, 1], [2, 3]], "mesh_dim_names": ["dp", "cp"]}},
            "args.device_mesh.mesh_dim_names",
        ),
        ({"device_mesh": {"mesh": [[0, 1], [2]], "mesh_dim_names": ["dp", "fsdp"]}}, "args.device_mesh"),
        ({"device_mesh": {"mesh": [[0, 1], [2, 3]], "mesh_dim_names": ["dp", "dp"]}}, "args.device_mesh"),
        ({"device_mesh": {"mesh": [2, 3], "mesh_dim_names": ["dp"]}}, "args.device_mesh"),
        ({"device_mesh": {"mesh": [0, 0], "mesh_dim_names": ["dp"]}}, "args.device_mesh"),
        ({"device_mesh": {"world_size": 4, "dp_size": 2}}, "args.device_mesh.world_size"),
        ({"device_mesh": {"world_size": 2}}, "args.device_mesh.world_size"),
        ({"device_mesh": {"ulysses_size": 2}}, "args.device_mesh.ulysses_size"),
        ({"nproc_per_node": 4, "device_mesh": {"dp_size": 2}}, "args.device_mesh"),
        ({"device_group": group([0, 0])}, "args.device_group.ranks"),
        ({"device_group": group(2, visible_devices="0,1,2")}, "args.device_group.visible_devices"),
        ({"device_group": group(1, visible_devices="GPU-1")}, "args.device_group.visible_devices"),
        ({"device_group": group(1, "npu")}, "args.device_group.device_type"),
    ],
)
def test_divisions_that_a_launch_would_refuse(args: dict[str, Any], field: str) -> None:
    assert list(problems(model(**args))) == [field]


def test_an_npu_is_refused_with_what_is_allowed() -> None:
    (allowed,) = problems(model(device_group=group(1, "npu"))).values()
    assert allowed == "cpu, cuda or gpu (the server does not run on NPUs)"


@pytest.mark.parametrize("mesh", [{"mesh": [0, 1], "mesh_dim_names": ["dp"]}, {"world_size": 2, "fsdp_size": 2}])
def test_divisions_that_a_launch_takes(mesh: dict[str, Any]) -> None:
    assert problems(model(nproc_per_node=2, device_mesh=mesh, device_group=group([4, 7]))) == {}


@pytest.mark.parametrize(("ranks", "gpus"), [([0, 1], 0), ([0, 1], 2), ([3], 2), (1, 0), (1, 1.5)])
def test_numbers_of_gpus_that_cannot_be(ranks: Any, gpus: float) -> None:
    options = {"ray_actor_options": {"num_gpus": gpus}}
    assert list(problems(model(deployment=options, device_group=group(ranks)))) == [
        "deployments[0].ray_actor_options.num_gpus"
    ]


# --- what the processes ask for ---------------------------------------------------------------------------------------


def test_each_process_of_a_group_takes_what_the_file_says() -> None:
    options = {"ray_actor_options": {"num_cpus": 0.25, "num_gpus": 0.5}}
    gateway, replica, ranks = demands(model(deployment=options, device_group=group(4)))
    assert gateway == Demand("server", "replica", 1, 0.1)
    assert replica == Demand("m", "replica", 1, 0.25)
    assert ranks == Demand("m", "rank process", 4, 0.25, 0.5)
    _, replica, ranks = demands(model(device_group=group(2, "cpu")))
    assert (replica.cpus, ranks.cpus, ranks.gpus) == (1.0, 1.0, 0.0)


def test_named_gpus() -> None:
    sampled = {"model_id": "org/a", "sampler_type": "torch", "device_group": {**group([3]), "name": "s"}}
    options = [{"ray_actor_options": {"num_gpus": 0.25}}]
    asked = demands(
        model("a", device_group=group([2, 1]), deployment={"num_replicas": 2, "ray_actor_options": {"num_gpus": 0.5}}),
        model("b", device="cuda:2"),
        model("c", device_group=group(1, visible_devices="0")),
        model("d", device_group=group(3)),
        {"name": "s", "import_path": "sampler", "args": sampled, "deployments": options},
    )
    # replica 1 of model a, and its sampler, use the GPUs of another machine; GPU 2 is shared by a and b
    assert claimed_gpus(asked) == [{1: 0.5, 2: 1.0, 0: 1.0, 3: 0.25}, {1: 0.5, 2: 0.5, 3: 0.25}]
    assert total_gpus(asked) == 2.75 + 1.25 + 3


# --- what check-config says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpus", "said"), [(2, True), (4, False)])
def test_too_few_cpus(cpus: int, said: bool) -> None:
    config = ServerConfig.model_validate({"runtime": "ray", "applications": [model(device_group=group(2, "cpu"))]})
    notes = machine_notes(config.applications, "ray", Machine(cpus, 0, has_ray=True))
    expected = (
        "applications: need 3.1 CPUs (1 replica of 1 (m), 2 rank processes of 1 (m), 0.1 for 1 other process); this "
        "machine has 2. A launch on this machine alone is refused, on a larger Ray cluster it is not"
    )
    assert notes == ([expected] if said else [])


def test_the_documented_twinkle_file_needs_half_a_cpu() -> None:
    config, _ = load_config(DOCUMENTED / "twinkle.yaml")
    asked = demands_of(config.applications, has_gpus=True)
    assert total_cpus(asked) == 0.5
    assert claimed_gpus(asked) == [{0: 1.0, 1: 1.0}]
    (gpus, named) = machine_notes(config.applications, "ray", Machine(2, 0, has_ray=True))
    assert gpus.startswith(
        "applications: need 2 GPUs (2 rank processes of 1 (models-Qwen2.5-7B-Instruct)); this machine"
    )
    assert named == "applications: name GPU 0, 1 of a machine; this machine has 0 GPUs"
    assert machine_notes(config.applications, "ray", Machine(2, 2, has_ray=True)) == []


def test_the_documented_tinker_file_shares_a_gpu() -> None:
    config, _ = load_config(DOCUMENTED / "tinker.yaml")
    assert total_gpus(demands_of(config.applications, has_gpus=True)) == 2
    (shared,) = machine_notes(config.applications, "ray", Machine(2, 2, has_ray=True))
    assert "models-Qwen2.5-0.5B-Instruct and sampler-Qwen2.5-0.5B-Instruct name GPU 0, and share it" in shared


def test_autoscaling_of_models_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(config_commands, "this_machine", lambda: Machine(2, 2, has_ray=False))
    assert cli.main(["check-config", str(DOCUMENTED / "twinkle.yaml")]) == 0
    said = capsys.readouterr().err
    assert "applications[1].deployments[0].autoscaling_config: means 1 replica from the start (max_replicas)" in said
    assert "runtime: ray needs the package 'ray[serve]' (our extra 'ray'): pip install 'twinkle-posttrain[ray]'" in said


def test_a_gpu_that_an_embedded_server_would_not_find() -> None:
    config = ServerConfig.model_validate({"runtime": "embedded", "applications": [model(device="cuda:1")]})
    (note,) = machine_notes(config.applications, "embedded", Machine(2, 1, has_ray=False))
    assert note == "applications[0].args: uses cuda:1; this machine has 1 GPU"
    assert machine_notes(config.applications, "embedded", Machine(2, 2, has_ray=False)) == []


# --- names of deployments ---------------------------------------------------------------------------------------------


def test_deployments_have_the_names_of_the_file() -> None:
    named = {"name": "ModelManagement"}
    data = [model("a", {**named, "num_replicas": 2}), model("b", named), model("c")]
    config = ServerConfig.model_validate({"runtime": "ray", "applications": data})
    names = [deployment_names(one) for one in config.applications]
    assert names == [("ModelManagement-0", "ModelManagement-1"), ("ModelManagement",), ("c-0",)]
    assert layout_of(config).addresses == {
        "a-0": ServeAddress("a", "ModelManagement-0"),
        "a-1": ServeAddress("a", "ModelManagement-1"),
        "b-0": ServeAddress("b", "ModelManagement"),
        "c-0": ServeAddress("c", "c-0"),
    }
    assert list(problems(model(deployment={"name": "a#b"}))) == ["deployments[0].name"]
