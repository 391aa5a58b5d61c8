"""One Ray cluster and one program for all tests here, with two CPUs and four GPUs that exist only in Ray's books.

All tests here are skipped if Ray is not installed.
"""

import os

import pytest

import twinkle
from tests.on_ray.ray_components import GROUPS, Rows, Source
from tests.support.paths import ROOT, SOURCE

# Clusters of tests, and of the servers that they start, use the loopback address: see running.py.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@pytest.fixture(scope="session")
def cluster():
    """A running Ray cluster."""
    if not twinkle.exists("ray"):
        pytest.skip("Ray is not installed; `make test-ray` does that")
    import ray

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SOURCE)])  # workers import the tests' components
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TWINKLE_CPU_PG_CPUS_PER_PROC"] = "0.25"
    ray.init(
        num_cpus=2,
        num_gpus=4,
        resources={"sampling": 1},
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def program(cluster):
    """The cluster, with Twinkle initialized on it and the groups of ray_components.py."""
    twinkle.initialize("ray", groups=GROUPS, seed=7, name="tests")
    yield
    twinkle.shutdown()


@pytest.fixture(scope="session")
def rows(program):
    """A Rows component on the two workers of group "work"."""
    return Rows(remote_group="work")


@pytest.fixture(scope="session")
def source(program):
    """A Source component on one worker of group "data"."""
    return Source([[1, 2, 3], [4, 5]], remote_group="data", instance_id="the source")
