"""A program for tests: reserve the GPUs that models name on a running cluster, and print what their processes see."""

import json
import time

import ray

from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.config.demand import demands_of
from twinkle.server.runtime.ray import gpu_reservations
from twinkle.server.runtime.ray.actors.sampler_engine import devices_of
from twinkle.server.runtime.ray.actors.trainer_rank import ranks_of, start_ranks
from twinkle.server.runtime.ray.deployments import _model_options

OWNER = "/data"


def model(name, ranks, **deployment):
    group = {"name": name, "ranks": ranks, "device_type": "cuda"}
    args = {"model_id": f"org/{name}", "backend": "transformers", "device_group": group}
    actor = {"ray_actor_options": {"num_cpus": 0, **deployment}}
    return {"name": name, "import_path": "model", "args": args, "deployments": [actor]}


def configured(*applications):
    return ServerConfig.model_validate({"runtime": "ray", "applications": list(applications)})


def ids_of_task():
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def refusal(config):
    try:
        gpu_reservations.reserve("/other", demands_of(config.applications, True), print)
    except TwinkleServerError as error:
        return str(error)
    return None


def main():
    ray.init("auto", namespace="twinkle_cluster", log_to_driver=False, logging_level="error")
    group = {"name": "s", "ranks": [2], "device_type": "cuda"}
    sampler = {"model_id": "org/a", "sampler_type": "torch", "device_group": group}
    engine = {"ray_actor_options": {"num_cpus": 0, "num_gpus": 0.25}}
    sampling = {"name": "s", "import_path": "sampler", "args": sampler, "deployments": [engine]}
    config = configured(model("a", [5, 3]), model("b", [6], num_gpus=0.5), model("c", [2, 1], num_gpus=0.5), sampling)
    (place,) = gpu_reservations.reserve(OWNER, demands_of(config.applications, True), print)
    seen = {}
    for served in config.served_models:
        processes = ranks_of(config, served, place) if served.model.processes > 1 else []
        seen[served.name] = [each.gpus for each in ray.get([rank.place.remote() for rank in start_ranks(processes)])]
    one = config.applications[1]
    left = ray.available_resources()["GPU"]
    others = ray.get(ray.remote(ids_of_task).options(num_cpus=0, num_gpus=3).remote())
    refused = refusal(configured(model("d", [9])))
    gpu_reservations.release(OWNER)
    deadline = time.monotonic() + 120
    while ray.available_resources().get("GPU") != 8:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    print(
        json.dumps(
            {
                "ranks": seen,
                "replica": [place.variables(one.args.named_gpus), _model_options(one, one.args, True, place)],
                "sampler": devices_of(config, config.served_models[0], place).variables,
                "others": sorted(others, key=int),
                "left": left,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main()
