"""The built wheels in empty environments: a server starts there and trains, and what is missing is named.

``make test-wheels`` builds the wheels, installs them with the extra ``server`` and the tinker SDK into .venv-wheels,
and runs this file. The environments import nothing from the repository.
"""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import free_port

pytestmark = pytest.mark.wheels

FULL = ROOT / ".venv-wheels" / "bin"
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = [block for block in BLOCKS if "127.0.0.1:8000" in block]


def environment() -> dict[str, str]:
    """Return the variables of this process without those that lead to the repository or to a user's settings."""
    kept = {name: value for name, value in os.environ.items() if not re.match(r"TWINKLE_|TINKER_|PYTHONPATH$", name)}
    return {**kept, "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost"}


def run(folder: Path, *command: str | Path, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


# --- with the extra `server` ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that `twinkle-server launch` started without a file, in a folder outside the repository."""
    if not FULL.exists():
        pytest.skip("the wheels are not installed; `make test-wheels` does that")
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    log = (folder / "log").open("w+")
    command = [FULL / "twinkle-server", "launch", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout
    listening = any("listening on" in line for line in server.stdout)
    assert listening, (folder / "log").read_text()
    yield port
    server.terminate()
    assert server.wait(120) == 0, (folder / "log").read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.split()[1])
def test_the_programs_of_the_readme_train(port: int, tmp_path: Path, program: str) -> None:
    done = run(tmp_path, FULL / "python", "-c", program.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    assert done.returncode == 0, done.stderr
    assert "twinkle://" in done.stdout or "save(" not in program


def test_nothing_comes_from_the_repository(tmp_path: Path) -> None:
    program = "import sys, {0}; print(sys.modules['{0}'].__file__)"
    for package in ("twinkle", "twinkle_agentic", "twinkle_client"):
        done = run(tmp_path, FULL / "python", "-W", "error", "-c", program.format(package))
        assert ".venv-wheels" in done.stdout, done.stderr


# --- without extras, and beside twinkle-kit ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with both wheels and no extra."""
    folder = tmp_path_factory.mktemp("bare")
    assert run(folder, sys.executable, "-m", "venv", folder / "env").returncode == 0
    install(folder / "env" / "bin", *WHEELS)
    return folder / "env" / "bin"


def install(programs: Path, *arguments: str | Path) -> None:
    done = run(programs, programs / "python", "-m", "pip", "install", "-qq", *arguments)
    assert done.returncode == 0, done.stderr


def test_the_command_names_the_extra(bare: Path) -> None:
    done = run(bare, bare / "twinkle-server", "--help")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("pip install 'twinkle-posttrain[server]'")
    assert "Traceback" not in done.stderr


def test_the_client_alone_works_without_the_library(bare: Path) -> None:
    program = "import twinkle_client, twinkle_client.model; from twinkle import Trainer"
    done = run(bare, bare / "python", "-c", program)
    assert done.stderr.splitlines()[-1].endswith("pip install 'twinkle-posttrain[transformers]'")


def fake_kit(folder: Path) -> Path:
    """Write a wheel named twinkle-kit with one file of each of its packages."""
    path, about = folder / "twinkle_kit-9.9-py3-none-any.whl", "twinkle_kit-9.9.dist-info"
    files = {f"{package}/__init__.py": "kit = True\n" for package in ("twinkle", "twinkle_agentic", "twinkle_client")}
    files[f"{about}/METADATA"] = "Metadata-Version: 2.1\nName: twinkle-kit\nVersion: 9.9\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]))
    return path


def test_the_last_installed_of_two_wins_and_the_advice_repairs(bare: Path, tmp_path: Path) -> None:
    reinstall = ["--force-reinstall", "--no-deps"]
    install(bare, "--no-deps", fake_kit(tmp_path))
    assert "kit" in run(bare, bare / "python", "-c", "import twinkle; print(vars(twinkle).keys() & {'kit'})").stdout
    install(bare, *reinstall, *WHEELS)
    said = run(bare, bare / "python", "-c", "import twinkle; print(twinkle.__version__)")
    assert "twinkle-kit 9.9 and twinkle-posttrain are installed in the same environment" in said.stderr
    names = re.findall(r"pip uninstall ([a-z -]+?),", said.stderr)[0].split()
    assert run(bare, bare / "python", "-m", "pip", "uninstall", "-qq", "-y", *names).returncode == 0
    install(bare, "--no-deps", *WHEELS)
    after = run(bare, bare / "python", "-c", "import twinkle; print(twinkle.__version__)")
    assert (after.stdout, after.stderr) == (said.stdout, "")
