"""Where samplers run on Ray, and which resources their applications may request there."""

import pytest

from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import has_own_process
from twinkle.server.config.server_config import find_problems
from twinkle.server.config.without_effect import without_effect

GROUP = {"name": "s", "ranks": 1, "device_type": "cuda"}
WIDE = {**GROUP, "ranks": 2, "gpus_per_worker": 2}
TWO = {"device_group": {"name": "m", "ranks": 2, "device_type": "cuda"}, "device_mesh": {"fsdp_size": 2}}


def applications(trained=None, options=None, kind="torch", **sampled):
    backend = "mock" if kind == "mock" else "transformers"
    return [
        {"name": "m", "import_path": "model", "args": {"model_id": "org/m", "backend": backend, **(trained or {})}},
        {
            "name": "s",
            "import_path": "sampler",
            "args": {"model_id": "org/m", "sampler_type": kind, **sampled},
            "deployments": [{"ray_actor_options": options}] if options else [],
        },
    ]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (applications(), False),
        (applications(device_group=GROUP), True),
        (applications(device_group={**GROUP, "device_type": "cpu"}), True),
        (applications({"device_group": GROUP}, device_group=GROUP), False),  # the model's group
        (applications(options={"num_gpus": 0.5}), True),
        (applications(options={"num_gpus": 0, "num_cpus": 2}), False),
        (applications(TWO), True),
        (applications({"device": "cpu"}, device_group=GROUP), True),  # a different device than the model's is allowed
        (applications(device_group=WIDE, device_mesh={"tp_size": 2}, kind="vllm"), True),
        (applications(kind="mock", device_group=GROUP), False),
    ],
)
def test_which_samplers_have_a_process_of_their_own(given, own):
    config = ServerConfig.model_validate({"runtime": "ray", "applications": given})
    assert has_own_process(config.applications[1], config.served_models[0].model) is own


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        (
            applications(device_group={**GROUP, "ranks": 2}),
            "device_group.ranks",
            "1, as gpus_per_worker: a sampler has",
        ),
        (applications(device_group=WIDE), "device_group.gpus_per_worker", "1 (more are for vLLM"),
        (applications(nproc_per_node=2), "nproc_per_node", "1: a sampler has one engine for each replica"),
        (applications(device_group=GROUP, device_mesh={"dp_size": 2}), "device_mesh.dp_size", "1: a sampler has one"),
        (applications(device_group=WIDE, device_mesh={"tp_size": 4}, kind="vllm"), "device_mesh.tp_size", "2, as gpus"),
        (applications(TWO, device_group={**GROUP, "name": "m"}), "device_group.name", "not the model's, whose"),
        (
            applications({"device": "cpu", "device_group": {**GROUP, "device_type": "cpu"}}, device_group=GROUP),
            "device_group",
            "the device of the model: cpu",
        ),
    ],
)
def test_what_is_refused(given, field, allowed):
    (problem,) = find_problems({"runtime": "ray", "applications": given})
    assert problem.field == f"applications[1].args.{field}"
    assert allowed in problem.allowed


def test_one_process_is_all_that_the_embedded_runtime_has():
    (problem,) = find_problems({"applications": applications({"device": "cpu"}, device_group=GROUP)})
    assert (problem.field, problem.allowed) == ("applications[1].args.device_group", "the device of the model: cpu")
    assert "device_group" in str(find_problems({"applications": applications(TWO)})[0].field)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.04, 0.96, -0.5, 2, "half", None])
def test_a_share_that_would_starve_one_side_is_refused(share):
    (problem,) = find_problems({"runtime": "embedded", "applications": applications(sampling_share=share)})
    assert problem.field == "applications[1].args.sampling_share"
    assert problem.allowed == "a number from 0.05 to 0.95"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_shares_of_sampling(share):
    config = ServerConfig.model_validate({"runtime": "embedded", "applications": applications(sampling_share=share)})
    assert config.served_models[0].sampler.sampling_share == share
    assert without_effect(config) == []
    default = ServerConfig.model_validate({"runtime": "embedded", "applications": applications()})
    assert default.served_models[0].sampler.sampling_share == 0.4


@pytest.mark.parametrize(
    ("runtime", "given", "why"),
    [
        ("embedded", applications(kind="vllm", sampling_share=0.5), "vLLM samples in processes of its own"),
        ("ray", applications(device_group=GROUP, sampling_share=0.5), "this sampler has its own process"),
        ("ray", applications(sampling_share=0.5), None),
        ("ray", applications(device_group=GROUP), None),
    ],
)
def test_a_share_without_effect(runtime, given, why):
    config = ServerConfig.model_validate({"runtime": runtime, "applications": given})
    notes = [note for note in without_effect(config) if "sampling_share" in note]
    assert notes == ([] if why is None else [f"applications[1].args.sampling_share: has no effect, {why}"])
