"""What a launch on Ray says while it waits: what an application needs, what Serve says, and what its replicas do."""

import os
from pathlib import Path

import pytest

from twinkle.server.config import ServerConfig
from twinkle.server.config.demand import Demand, demands_of
from twinkle.server.runtime.ray.waiting import Waiting, last_log_lines, reason_in, shortages

ARGS = {"model_id": "random://llama-tiny", "backend": "transformers", "device": "cuda"}
GPUS = {"name": "m", "import_path": "model", "args": ARGS}


@pytest.fixture
def demands() -> tuple[Demand, ...]:
    applications = [{**GPUS, "deployments": [{"num_replicas": 4}]}]
    config = ServerConfig.model_validate({"runtime": "ray", "applications": applications})
    return tuple(demands_of(config.applications, True))


def test_missing_gpus_are_counted(demands: tuple[Demand, ...]) -> None:
    (line,) = shortages(demands, {"CPU": 16.0}, {"m"})
    assert line.startswith("4 GPUs: the cluster has 0 (needed by application m;")


def test_an_application_without_a_process_says_what_it_needs(demands: tuple[Demand, ...]) -> None:
    line = Waiting("m", {"m-0": {"STARTING": 1}, "m-1": {}}, None, {}).line(demands, {"CPU": 2.0})
    assert line == (
        "m does not run yet. m-0: 1 starting; m-1: no replica; it needs 4 CPUs and 4 GPUs, and 2 CPUs and 0 GPUs of "
        "the cluster are free"
    )
    assert "Serve has not begun with it" in Waiting("m", {}, None, {}).line(demands, {})


def test_a_replica_that_loads_is_quoted(demands: tuple[Demand, ...]) -> None:
    logged = {"m-0": "INFO loading Qwen: reading the weights (20 s so far)"}
    line = Waiting("m", {"m-0": {"STARTING": 1}}, "a message of Serve", logged).line(demands, {})
    assert "m-0 logged last: INFO loading Qwen: reading the weights (20 s so far)" in line
    assert "Serve says: a message of Serve" in line
    assert "needs" not in line, "it has its resources"


def test_the_last_error_is_the_reason() -> None:
    assert reason_in(["", "starting\nValueError: no\n  more about it\n"]) == "ValueError: no"
    assert reason_in(["one", "two\n"]) == "two"
    assert reason_in(["", " \n"]) is None


def test_last_lines_are_those_of_this_launch(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, text in {"m-0": "first\nsecond\n", "m-1": "", "m-2": "of an earlier launch\n"}.items():
        (tmp_path / "logs" / f"{name}.log").write_text(text)
    os.utime(tmp_path / "logs" / "m-2.log", (1000, 1000))
    assert last_log_lines(tmp_path, ["m-0", "m-1", "m-2", "m-3"], since=2000.0) == {"m-0": "second"}
