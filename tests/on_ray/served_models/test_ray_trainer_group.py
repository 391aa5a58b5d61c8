"""A model whose trainer is a group of processes: the numbers of a single process, and what ends the group."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import ray
import tinker
from tinker import types

from tests.on_ray.ray_processes import descendants
from tests.support.servers.running import Server
from tests.support.servers.serving import key_of, logprobs_of, sequences, tinker_data, trainer_data
from twinkle.errors import UserError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.server.runtime.ray.actors import group_watch
from twinkle.server.runtime.ray.actors.answers import Answer, BrokenGroup, fingerprint
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch
from twinkle.server.runtime.ray.actors.step_clock import StepClock, Work
from twinkle.server.runtime.ray.replica import Failure

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
ADAM = {"learning_rate": 5e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "model_id": MODEL,
        "backend": "transformers",
        "dtype": "fp32",
        "device_group": {"name": "model", "ranks": 2, "device_type": "cpu"},
        "device_mesh": {"dp_size": 2},
    }
    light = [{"ray_actor_options": {"num_cpus": 0}}]
    applications = [
        {"name": "server", "import_path": "server", "deployments": light},
        {"name": "model", "import_path": "model", "args": args, "deployments": light},
    ]
    running = Server(tmp_path_factory.mktemp("group"), {"runtime": "ray", "applications": applications}).start()
    yield running
    assert running.stop() == 0


def test_two_processes_train_as_one_and_come_back_when_one_dies(server):
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of("group"))
    client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    trainer = Trainer.from_pretrained(MODEL, device="cpu", dtype="fp32")
    trainer.create_adapter("mine", LoraSpec(8, seed=3, train_unembed=True))
    for step in range(4):
        rows = sequences(step, count=3 if step else 1)  # the first request leaves one process without data
        theirs = client.forward_backward(tinker_data(rows), "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        (mine,) = trainer.forward_backward([TrainItem("mine", trainer_data(rows))])
        trainer.optim_step("mine", AdamParams(**ADAM))
        assert isinstance(mine, TrainResult)
        for ours, found in zip(mine.logprobs, logprobs_of(theirs.result()), strict=True):
            np.testing.assert_allclose(found, ours, atol=1e-5)
        if step == 1:
            (one, _) = descendants(server, "ray::TrainerRank")
            os.kill(one, signal.SIGKILL)
    path = client.save_state("last").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    before = client.forward(tinker_data(sequences(9)), "cross_entropy").result()
    after = again.forward(tinker_data(sequences(9)), "cross_entropy").result()
    for ours, found in zip(logprobs_of(before), logprobs_of(after), strict=True):
        np.testing.assert_allclose(found, ours, atol=1e-5)


class Scripted:
    """A rank that gives a scripted answer."""

    def call(self, answer: object, seconds: float) -> object:
        time.sleep(seconds)
        if answer == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(answer, Failure):
            return answer
        return Answer(answer, fingerprint(answer))


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def watch(cluster, monkeypatch) -> GroupWatch:
    """A watch over two copies of a model, each of two ranks. Calls may take two seconds, the first ones twenty."""

    def end(why: str) -> NoReturn:
        raise Ended(why)

    monkeypatch.setattr(group_watch, "end_process", end)
    monkeypatch.setattr(group_watch, "_GRACE_SECONDS", 1.0)
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
    return GroupWatch(mesh, StepClock(2.0, 2.0))


@pytest.fixture
def asked(watch):
    """Returns the results of a call whose ranks give these answers, each an answer or (answer, seconds)."""

    def ask(*script: object, kind: str = "step", by_copy: bool = False) -> object:
        ranks = [ray.remote(Scripted).options(num_cpus=0).remote() for _ in script]
        pairs = [each if isinstance(each, tuple) else (each, 0.0) for each in script]
        calls = [rank.call.remote(*pair) for rank, pair in zip(ranks, pairs, strict=True)]
        try:
            return watch.results(Work(kind), calls, by_copy=by_copy)
        finally:
            for rank in ranks:
                ray.kill(rank)

    return ask


def test_an_error_of_all_is_raised_and_one_of_some_ends_the_group(asked):
    failed, broken = Failure(UserError("no")), BrokenGroup(RuntimeError("Connection closed by peer"))
    assert asked("a", "a", ("a", 0.2), "a") == ["a", "a", "a", "a"]
    with pytest.raises(UserError, match="no"):
        asked(failed, failed, (failed, 0.1), failed)
    with pytest.raises(
        Ended, match=r"^rank 1 \(tp 1\) failed in step, and rank 0, rank 2 .dp 1., rank 3 .dp 1, tp 1. did not: no$"
    ):
        asked("a", failed, "a", "a")
    with pytest.raises(Ended, match=r"^rank 0 failed in step, and rank 1 .*, rank 3 .* did not: no$"):
        asked(failed, ("a", 600.0), failed, "a")
    with pytest.raises(Ended, match=r"^rank 2 \(dp 1\) died during step"):
        asked(("a", 600.0), broken, "dies", ("a", 600.0))
    with pytest.raises(Ended, match="cannot go on with the others: Connection closed by peer"):
        asked(broken, broken, broken, broken)


def test_a_rank_that_hangs_is_found_by_the_times_of_earlier_calls(asked):
    for _ in range(3):
        asked("a", "a", "a", "a")
    with pytest.raises(Ended, match=r"^no answer to step from rank 3 \(dp 1, tp 1\) for [23] s: it hangs$"):
        asked("a", "a", "a", ("a", 600.0))
    assert asked("a", ("a", 4.0), "a", "a", kind="another") == ["a"] * 4  # nothing is known about this kind


def test_a_rank_that_answers_something_else_ends_the_group(asked):
    with pytest.raises(
        Ended, match=r"^rank 3 \(dp 1, tp 1\) answered step differently from rank 0: digest .*numbers 0.5; rank 0: dig"
    ):
        asked({"norm": 1.0}, {"norm": 1.0}, {"norm": 1.0}, {"norm": 0.5})
    assert asked("a", "a", "b", "b", by_copy=True) == ["a", "a", "b", "b"]
    with pytest.raises(Ended, match=r"^rank 3 .* differently from rank 2 \(dp 1\)"):
        asked("a", "a", "b", "a", by_copy=True)


def test_a_call_of_the_first_rank_may_wait_for_the_call_before_it(watch):
    for _ in range(3):
        watch._clock.measure(Work("check"), 0.1)  # so that it may take two seconds
    rank = ray.remote(Scripted).options(num_cpus=0).remote()
    long, check = rank.call.remote("a", 5.0), rank.call.remote("b", 0.0)
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(watch.results, Work("long"), [long])
        assert watch.result_of_first(Work("check"), check) == "b"
        assert results.result() == ["a"]
    with pytest.raises(Ended, match="no answer to check from rank 0"):
        watch.result_of_first(Work("check"), rank.call.remote("b", 60.0))
