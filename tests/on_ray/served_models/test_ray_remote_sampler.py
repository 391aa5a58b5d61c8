"""A sampler whose engine is an actor: what it keeps for the next engine, and when it gives up."""

import contextlib
import time

import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

import ray
from ray.exceptions import RayActorError

from tests.on_ray.scripted_engine import DEADLY, ScriptedEngine
from tests.support.paths import ROOT
from twinkle.errors import CheckpointError, TwinkleServerError
from twinkle.sampler.types import Finished, Progress, SampleFailure, SampleRequest, SamplingParams
from twinkle.server.config import ServerConfig
from twinkle.server.config.demand import demands_of, total_gpus
from twinkle.server.runtime.ray.actors.remote_sampler import RemoteSampler
from twinkle.server.runtime.ray.actors.sampler_engine import EngineDevices, devices_of, start_engine

pytestmark = pytest.mark.ray

TINY = "random://llama-tiny"


class Weights:
    """The part of a trainer that the sampler uses."""

    def peft_config(self, adapter_id):
        return {"r": 8}

    def weights(self, adapter_id):
        return {"a": np.ones(3, np.float32)}


@pytest.fixture
def engines(cluster, tmp_path):
    """All engines that were started; the current one is the last."""
    read = tmp_path / "read"
    read.write_text("")
    started = []

    def start():
        started.append(ray.remote(ScriptedEngine).options(num_cpus=0).remote(read))
        return started[-1]

    yield start, started
    for one in started:
        ray.kill(one)


def request(name="r", *, first=1, version=None, seed=None, tokens=6, stream=False):
    params = SamplingParams(max_tokens=tokens, seed=seed)
    return SampleRequest(name, version, np.array([first, 2]), params, stream=stream)


def kill(engine):
    with contextlib.suppress(RayActorError):
        ray.get(engine.die.remote())


def finished(sampler):
    """Run the sampler until it is idle, and return the outcomes."""
    found = {}
    while sampler.busy:
        for event in sampler.step():
            if isinstance(event, Finished):
                found[event.request_id] = event.outcome
    return found


def test_the_next_engine_has_what_the_last_one_had(engines):
    start, started = engines
    sampler = RemoteSampler(start(), start, Weights())
    for version in ("kept", "retired"):
        sampler.publish(version, "adapter")
    sampler.retire("retired")
    assert sampler.version_ids() == ["kept"]
    sampler.submit(request("streamed", version="kept", stream=True))
    sampler.submit(request("plain", seed=3))
    sampler.submit(request("cancelled"))
    sampler.cancel("cancelled")
    heard = [event for _ in range(2) for event in sampler.step()]
    kill(started[0])
    while sampler.busy:
        heard += sampler.step()
    assert len(started) == 2
    assert ray.get(started[1].versions.remote()) == ["kept"]
    outcomes = {event.request_id: event.outcome for event in heard if isinstance(event, Finished)}
    assert outcomes.keys() == {"streamed", "plain"}
    assert outcomes["plain"].sequences[0].tokens.tolist() == [3, 4, 5, 6, 7, 8]
    pieces = [event for event in heard if isinstance(event, Progress)]
    tokens = np.concatenate([event.tokens for event in pieces])
    assert tokens.tolist() == outcomes["streamed"].sequences[0].tokens.tolist()  # no token twice, and the same seed
    assert [event.stop_reason for event in pieces if event.stop_reason] == ["length"]


def test_versions_are_published_while_an_engine_is_dead(engines):
    start, started = engines
    sampler = RemoteSampler(start(), start, Weights())
    kill(started[0])
    sampler.publish("new", "adapter")
    assert ray.get(started[1].versions.remote()) == ["new"]


def test_a_request_that_kills_every_engine_fails_and_others_do_not(engines):
    start, started = engines
    sampler = RemoteSampler(start(), start, Weights())
    sampler.submit(request("deadly", first=DEADLY))
    outcomes = finished(sampler)
    assert isinstance(outcomes["deadly"], SampleFailure)
    assert isinstance(outcomes["deadly"].error, TwinkleServerError)
    assert len(started) == 5
    sampler.submit(request("good"))
    assert not isinstance(finished(sampler)["good"], SampleFailure)


def test_a_version_whose_files_are_gone_is_lost_with_its_requests_only(engines):
    start, started = engines
    sampler = RemoteSampler(start(), start, Weights())
    sampler.load_version("gone", "/somewhere")
    with pytest.raises(CheckpointError, match="/somewhere is gone"):
        sampler.load_version("again", "/somewhere")
    sampler.submit(request("lost", version="gone"))
    sampler.submit(request("good"))
    kill(started[0])
    outcomes = finished(sampler)
    assert isinstance(outcomes["lost"], SampleFailure)
    assert not isinstance(outcomes["good"], SampleFailure)
    assert sampler.version_ids() == []


def config(options=None, **sampled):
    model = {"model_id": TINY, "backend": "transformers", "device": "cpu"}
    sampler = {"name": "s", "import_path": "sampler", "args": {"model_id": TINY, "sampler_type": "torch", **sampled}}
    applications = [{"name": "m", "import_path": "model", "args": model}, sampler]
    if options is not None:
        sampler["deployments"] = [{"ray_actor_options": options}]
    return ServerConfig.model_validate({"runtime": "ray", "applications": applications})


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        (config(), None),
        (config({"num_cpus": 2}), None),
        (config(device_group={"name": "s", "device_type": "cuda"}), EngineDevices("cuda", 1, 1, 1, {}, {})),
        (config(device_group={"name": "s", "device_type": "cpu"}), EngineDevices("cpu", 1, 0, 0, {}, {})),
        (
            config({"num_gpus": 0.5, "num_cpus": 2, "resources": {"fast": 1}, "runtime_env": {"env_vars": {"A": "1"}}}),
            EngineDevices("cuda", 2, 0.5, 0, {"fast": 1}, {"A": "1"}),
        ),
    ],
)
def test_what_an_application_asks_for(given, devices):
    assert devices_of(given, given.served_models[0]) == devices


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (config({"num_gpus": 1, "num_cpus": 4, "resources": {"fast": 1}}), {"num_cpus": 0.1}),
        (config({"num_gpus": 0, "num_cpus": 4}), {"num_cpus": 4}),  # no other actor needs them
        (config(), {"num_cpus": 0.1}),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of Serve itself, on import
def test_the_front_door_takes_no_gpu(given, taken):
    from twinkle.server.runtime.ray.deployments import door_options

    assert door_options(given, given.applications[1])["ray_actor_options"] == {**taken, "num_gpus": 0}


def gpus_wanted(given, has_gpus):
    return total_gpus(demands_of(given.applications, has_gpus))


def test_how_many_gpus_a_cluster_needs():
    cookbook = ROOT / "cookbook/client/server"
    assert gpus_wanted(ServerConfig.from_yaml(cookbook / "transformer/server_config_ray.yaml"), has_gpus=True) == 4
    assert gpus_wanted(ServerConfig.from_yaml(cookbook / "mock/server_config_ray.yaml"), has_gpus=True) == 0
    assert gpus_wanted(config(), has_gpus=True) == 0
    assert gpus_wanted(config({"num_gpus": 0.5}), has_gpus=False) == 0.5
    group = {"device_group": {"name": "m", "ranks": 4, "device_type": "cuda"}, "device_mesh": {"fsdp_size": 4}}
    model, sampler = config().model_dump()["applications"]
    spread = {**model, "args": {"model_id": TINY, "backend": "transformers", **group}}
    together = ServerConfig.model_validate({"runtime": "ray", "applications": [spread, sampler]})
    assert gpus_wanted(together, has_gpus=True) == 5


def test_an_engine_takes_what_it_is_given_and_says_what_is_wrong(cluster):
    served = config(device_group={"name": "s", "device_type": "cpu"}).served_models[0]
    engine, memory = start_engine(served, EngineDevices("cpu", 0, 0, 0, {"sampling": 1}, {})).ready()
    assert "sampler: cache" in memory
    deadline = time.monotonic() + 120  # Ray updates its resources with a delay
    while "sampling" in ray.available_resources():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    answer = ray.get(engine.load_version.remote("v", "/nowhere"))
    assert isinstance(answer.error, CheckpointError)
    ray.kill(engine)
