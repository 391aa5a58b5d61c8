"""Separate programs: one that finds a running cluster, and one that starts its own. The scripts define the classes."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

SCRIPT = """
import twinkle
from twinkle import DeviceGroup, remote_class, remote_function

class Counter:
    def __init__(self, start):
        self.value = start

    @remote_function(dispatch="all", collect="sum")
    def add(self, amount):
        self.value += amount
        return self.value

@remote_class()
class Twice(Counter):
    def add(self, amount):
        return super().add(2 * amount)

if __name__ == "__main__":
    twinkle.initialize("ray", groups=[DeviceGroup("counters", 2, "CPU")])
    counter = Twice(1, remote_group="counters")
    counter.add(1)
    print("total", counter.add(2)())
    twinkle.shutdown()
    import ray
    print("connected", ray.is_initialized())
"""


@pytest.mark.parametrize("where", ["running", "local"])
def test_a_script(cluster, tmp_path, where):
    import ray

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    address = ray.get_runtime_context().gcs_address if where == "running" else "local"
    environment = {**os.environ, "RAY_ADDRESS": address, "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["total", "14", "connected", "False"]
    known = "Connecting to existing Ray cluster" if where == "running" else "Started a local Ray instance"
    assert known in done.stderr
