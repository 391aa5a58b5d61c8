"""The deployment settings of a configuration reach Serve."""

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

from twinkle.server.config import ServerConfig
from twinkle.server.runtime.ray import deployments

pytestmark = pytest.mark.ray

OPTIONS = {
    "max_ongoing_requests": 50,
    "max_queued_requests": 10,
    "health_check_period_s": 3.0,
    "health_check_timeout_s": 4.0,
    "graceful_shutdown_wait_loop_s": 5.0,
    "graceful_shutdown_timeout_s": 6.0,
}
SCALING = {
    "min_replicas": 1,
    "initial_replicas": 2,
    "max_replicas": 4,
    "upscale_delay_s": 7.0,
    "downscale_delay_s": 8.0,
}
ACTOR = {
    "num_cpus": 2.0,
    "memory": 1e9,
    "resources": {"special": 1.0},
    "accelerator_type": "H200",
    "runtime_env": {"env_vars": {"A": "1"}, "working_dir": "https://example.org/w.zip", "pip": ["numpy"]},
}


def test_options_are_passed_on() -> None:
    deployment = {**OPTIONS, "autoscaling_config": SCALING, "ray_actor_options": ACTOR}
    data = {"applications": [{"name": "s", "import_path": "server", "deployments": [deployment]}]}
    config = ServerConfig.model_validate({"runtime": "ray", **data})
    (one,) = config.applications
    assert deployments._options(one, num_cpus=0.1) == {**OPTIONS, "ray_actor_options": {**ACTOR, "num_gpus": 0.0}}
    assert deployments._scale(one) == {"autoscaling_config": SCALING}
    deployments.application_for(config, one, has_gpus=False)  # Serve checks its arguments


def test_what_is_not_said_is_ours() -> None:
    config = ServerConfig.model_validate({"runtime": "ray", "applications": [{"name": "s", "import_path": "server"}]})
    assert deployments._options(config.applications[0], num_cpus=0.1) == {
        "max_ongoing_requests": 4096,
        "graceful_shutdown_timeout_s": 300.0,
        "ray_actor_options": {"num_cpus": 0.1, "num_gpus": 0.0},
    }
