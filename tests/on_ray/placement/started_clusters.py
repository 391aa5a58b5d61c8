"""A Ray cluster of `ray start --head`, as an operator starts one, and servers that join it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT, SOURCE
from tests.support.servers.running import free_port

_START_SECONDS = 240.0


@contextmanager
def ray_start(directory: Path, *options: str, **variables: str) -> Iterator[dict[str, str]]:
    """Start a cluster whose files and token are in ``directory``; give the variables for programs that join it."""
    home, port = directory / "home", free_port()
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "HOME": str(home),
        "TWINKLE_CACHE_DIR": os.environ.get("TWINKLE_CACHE_DIR", str(Path("~/.cache/twinkle").expanduser())),
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SOURCE)]),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
    command += ["--include-dashboard=false", "--object-store-memory=100000000", *options]
    with (directory / "ray.log").open("wb") as log:
        cluster = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, **variables})
    try:
        deadline = time.monotonic() + _START_SECONDS
        while "block forever" not in (directory / "ray.log").read_text(errors="replace"):
            assert cluster.poll() is None, (directory / "ray.log").read_text(errors="replace")
            assert time.monotonic() < deadline, "Ray did not start"
            time.sleep(0.2)
        yield environment
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(60)
