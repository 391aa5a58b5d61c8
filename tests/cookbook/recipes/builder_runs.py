"""Run tinker-cookbook's download and builders, unmodified, in its own environment.

One process runs all jobs of a test file, because importing the cookbook takes longer than a tiny model.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import environment

PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"
BUILDERS = ("build_hf_model", "build_lora_adapter")

_PROGRAM = """
import json, sys
from tinker_cookbook import weights

said = {}
for name, (function, options) in json.load(sys.stdin).items():
    try:
        getattr(weights, function)(**options)
        said[name] = ""
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Job:
    """A call of a function of ``tinker_cookbook.weights`` with these named arguments."""

    function: str
    options: Mapping[str, str]


def download(path: str, folder: Path) -> Job:
    return Job("download", {"tinker_path": path, "output_dir": str(folder)})


def build(builder: str, base: Path, adapter: Path, output: Path) -> Job:
    options = {"base_model": str(base), "adapter_path": str(adapter), "output_path": str(output)}
    return Job(builder, options)


def require_cookbook() -> None:
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")


def run_in_cookbook(program: str, given: object, folder: Path | None = None, **settings: str) -> str:
    """Run a program with JSON as its input, offline, in a folder; return the last line that it prints."""
    require_cookbook()
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", program],
        input=json.dumps(given),
        cwd=folder,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def run_jobs(jobs: Mapping[str, Job], **settings: str) -> dict[str, str]:
    """Run the jobs in this order; return for each "" or its error. ``settings``: environment variables."""
    given = {name: (job.function, dict(job.options)) for name, job in jobs.items()}
    said: dict[str, str] = json.loads(run_in_cookbook(_PROGRAM, given, **settings))
    return said
