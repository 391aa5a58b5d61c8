"""On Ray too, a note reports each key without effect, and the number of processes is a number of replicas."""

import json

import pytest

from twinkle.server.config import ServerConfig, load_config
from twinkle.server.config.placement import DeploymentOptions
from twinkle.server.config.server_config import find_problems
from twinkle.server.config.timings import Timings
from twinkle.server.config.without_effect import without_effect
from twinkle.server.runtime.ray.layout import on_own_gpu, replica_names


def configured(*applications):
    return ServerConfig.model_validate({"runtime": "ray", "applications": list(applications)})


def model(backend="transformers", **args):
    return {"name": "m", "import_path": "model", "args": {"model_id": "org/m", "backend": backend, **args}}


def processor(deployments=(), **args):
    return {"name": "p", "import_path": "processor", "args": args, "deployments": list(deployments)}


def group(**keys):
    return {"name": "g", "device_type": "cuda", **keys}


def idle(application):
    """Return the keys that the notes name."""
    return [note.partition(":")[0].removeprefix("applications[0].") for note in without_effect(configured(application))]


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        ({"device_group": group(ranks=1)}, []),
        ({"device_group": group(ranks=[0])}, []),
        ({"device_group": group(ranks=[1])}, []),
        ({"device_group": group(visible_devices=1)}, []),
        ({"device_group": group(gpus_per_worker=2)}, ["args.device_group.gpus_per_worker"]),
        ({"device": "cuda"}, []),
        ({"device": "cuda:1"}, []),
        ({"device": "cuda", "nproc_per_node": 2}, ["args.device"]),
        ({"device_mesh": {"dp_size": 1, "sequence_parallel": True}}, ["args.device_mesh.sequence_parallel"]),
    ],
)
def test_of_a_model(args, keys):
    assert idle(model(**args)) == keys


@pytest.mark.parametrize("kind", ["torch", "mock", "vllm"])
def test_options_of_vllm(kind):
    """A file for vLLM stays valid if only its sampler_type is changed."""
    args = {"model_id": "org/m", "sampler_type": kind, "engine_args": {"max_model_len": 9}, "memory_dir": "/dev/shm"}
    sampler = {"name": "s", "import_path": "sampler", "args": args}
    notes = without_effect(configured(model("mock" if kind == "mock" else "transformers"), sampler))
    why = f"has no effect with sampler_type: {kind}, it is for vllm"
    wanted = [f"applications[1].args.{key}: {why}" for key in ("engine_args", "memory_dir")]
    assert notes == ([] if kind == "vllm" else wanted)


@pytest.mark.parametrize(
    ("application", "keys", "replicas"),
    [
        (processor(), [], 1),
        (processor(ncpu_proc_per_node=3), [], 3),
        (processor(nproc_per_node=2), [], 2),
        (processor(ncpu_proc_per_node=2, device_group=group(ranks=2, device_type="cpu")), [], 2),
        (processor(device_group=group(ranks=2)), ["args.device_group"], 2),
        (processor(device_mesh={"dp_size": 2}), ["args.device_mesh"], 1),
        (processor([{"max_ongoing_requests": 9}], ncpu_proc_per_node=2), [], 2),
        (processor([{"num_replicas": 4}], ncpu_proc_per_node=2), ["args.ncpu_proc_per_node"], 4),
        (
            processor([{"autoscaling_config": {"max_replicas": 5}}], nproc_per_node=2),
            ["args.nproc_per_node", "deployments[0].autoscaling_config"],
            5,
        ),
    ],
)
def test_of_processors(application, keys, replicas):
    assert idle(application) == keys
    assert len(replica_names(configured(application).applications[0])) == replicas


def test_of_a_deployment():
    server = {"name": "s", "import_path": "server", "deployments": [{"num_replicas": 2, "autoscaling_config": {}}]}
    assert idle(server) == ["deployments[0].num_replicas"]


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ({"device_group": group(ranks=[1])}, "cuda"),
        ({"device_group": group(visible_devices="3")}, "cuda"),
        ({"device": "cuda:1"}, "cuda"),
        ({"device": "cpu"}, "cpu"),
        ({}, None),
    ],
)
def test_a_replica_computes_on_the_gpu_that_it_sees(args, device):
    (served,) = configured(model(**args)).served_models
    assert on_own_gpu(served).model.compute_device == device


@pytest.mark.parametrize(
    "options",
    [
        {"max_queued_requests": 0},
        {"max_queued_requests": -2},
        {"health_check_period_s": 0},
        {"graceful_shutdown_timeout_s": -1},
        {"autoscaling_config": {"upscale_delay_s": -1}},
        {"ray_actor_options": {"memory": -1}},
        {"ray_actor_options": {"accelerator_type": ""}},
        {"ray_actor_options": {"runtime_env": {"pip": "numpy"}}},
        {"user_config": {}},
    ],
)
def test_options_of_serve_are_checked(options):
    data = {"runtime": "ray", "applications": [{"name": "s", "import_path": "server", "deployments": [options]}]}
    (found,) = find_problems(data)
    assert found.field.startswith("applications[0].deployments[0].")


def test_proxies_on_all_machines_need_a_database_that_all_can_use(tmp_path):
    """SQLite works on one machine only; one machine may have several proxies, so this is a note and no error."""
    file = tmp_path / "server.yaml"
    cluster = {"runtime": "ray", "proxy_location": "EveryNode", "data_dir": str(tmp_path)}
    for more, count in (
        ({}, 1),
        ({"proxy_location": "HeadOnly"}, 0),
        ({"persistence": {"url": "postgresql://u@h/d"}}, 0),
        ({"persistence": {"url": f"sqlite:///{tmp_path}/other.db"}}, 1),
    ):
        file.write_text(json.dumps(cluster | more))
        _, notes = load_config(file)
        assert sum("EveryNode is for a cluster of several machines" in note for note in notes) == count, more


def test_no_limit_on_what_waits():
    assert DeploymentOptions(max_queued_requests=-1).max_queued_requests == -1


def test_limits_of_connections() -> None:
    limits = {"max_connections_per_address": 5, "max_header_bytes": 20_000, "max_adapters_per_tenant": 3}
    on_ray = ServerConfig.model_validate({"runtime": "ray", "limits": limits})
    named = [note.partition(":")[0] for note in without_effect(on_ray)]
    assert named == ["limits.max_connections_per_address", "limits.max_header_bytes"]
    assert without_effect(ServerConfig.model_validate({"runtime": "embedded", "limits": limits})) == []


def test_other_timings_leave_the_configuration_as_it_was() -> None:
    config = ServerConfig()
    assert config.with_timings(Timings(snapshot=1.0)).timings.snapshot == 1.0
    assert config.timings == Timings()
