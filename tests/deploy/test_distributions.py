"""The two distributions: what their wheels hold and require, that source archives build, and their names in texts."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import twinkle
from tests.support.paths import ROOT, SOURCE

PROJECTS = {"twinkle-posttrain": ROOT, "twinkle-posttrain-client": ROOT / "client"}
FOLDERS = {"twinkle-posttrain": {"twinkle", "twinkle_agentic"}, "twinkle-posttrain-client": {"twinkle_client"}}


@dataclass(frozen=True)
class Built:
    """A source archive of a project, and the wheel that was built from the unpacked archive."""

    sources: frozenset[str]
    files: frozenset[str]
    metadata: Message


def hatch(project: Path, target: str, folder: Path) -> Path:
    """Build with the hatchling of this environment, without network, and return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def build(name: str, folder: Path) -> Built:
    (folder / "unpacked").mkdir(parents=True)
    with tarfile.open(hatch(PROJECTS[name], "sdist", folder)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder / "unpacked")
        sources = frozenset(archive.getnames())
    (unpacked,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(hatch(unpacked, "wheel", folder)) as wheel:
        files = frozenset(wheel.namelist())
        (about,) = [file for file in files if file.endswith(".dist-info/METADATA")]
        return Built(sources, files, Parser().parsestr(wheel.read(about).decode()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    folder = tmp_path_factory.mktemp("distributions")
    return {name: build(name, folder / name) for name in PROJECTS}


def modules_of(built: Built) -> set[str]:
    return {file for file in built.files if ".dist-info/" not in file}


def requirements(metadata: Message, extra: str = "") -> dict[str, Requirement]:
    """Return the requirements of an extra, or those of the distribution alone."""
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    extras = [re.search(r"extra == .(\w+)", str(each.marker)) for each in found]
    return {each.name: each for each, named in zip(found, extras, strict=True) if (named[1] if named else "") == extra}


def test_the_wheels_share_no_file(built: dict[str, Built]) -> None:
    main, client = built.values()
    assert main.files & client.files == set()
    for name, one in built.items():
        assert {file.partition("/")[0] for file in modules_of(one)} == FOLDERS[name]


def test_the_wheels_hold_the_whole_source(built: dict[str, Built]) -> None:
    expected = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert set().union(*map(modules_of, built.values())) == expected


def test_names_and_versions(built: dict[str, Built]) -> None:
    for name, one in built.items():
        assert (one.metadata["Name"], one.metadata["Version"]) == (name, twinkle.__version__)
        assert one.metadata["License-Expression"] == "Apache-2.0"
        assert one.metadata["Description-Content-Type"] == "text/markdown"


def test_the_library_requires_the_client_of_its_own_version(built: dict[str, Built]) -> None:
    metadata = built["twinkle-posttrain"].metadata
    assert str(requirements(metadata)["twinkle-posttrain-client"].specifier) == f"=={twinkle.__version__}"
    assert {"torch", "transformers", "uvicorn"} <= requirements(metadata, "server").keys()
    assert requirements(metadata).keys().isdisjoint({"torch", "transformers"})


def test_the_client_requires_no_torch_and_not_the_library(built: dict[str, Built]) -> None:
    metadata = built["twinkle-posttrain-client"].metadata
    assert requirements(metadata).keys() == {"httpx", "numpy", "pydantic"}
    assert metadata.get_all("Provides-Extra") is None


def test_each_distribution_has_its_command(built: dict[str, Built]) -> None:
    assert all(any(file.endswith("entry_points.txt") for file in one.files) for one in built.values())
    projects = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in PROJECTS.items()}
    commands = {name: list(project["project"]["scripts"]) for name, project in projects.items()}
    assert commands == {"twinkle-posttrain": ["twinkle-server"], "twinkle-posttrain-client": ["twinkle-auto"]}


def test_licenses_are_the_same_and_shipped(built: dict[str, Built]) -> None:
    assert (ROOT / "client" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert all(any(file.endswith("/licenses/LICENSE") for file in one.files) for one in built.values())


def test_source_archives_hold_no_environment_and_no_second_copy(built: dict[str, Built]) -> None:
    for one in built.values():
        inside = {name.partition("/")[2] for name in one.sources}
        assert not [name for name in inside if name.startswith((".venv", ".git/", "build/", "dist/", "client/src"))]
    assert "src/twinkle_client/__init__.py" in inside
    assert not [name for name in inside if name.startswith("src/twinkle/")]


# --- names in texts ---------------------------------------------------------------------------------------------------

# The registry's `twinkle` belongs to somebody else. Names that only begin like it are ours or twinkle-kit.
STRANGER = re.compile(r"""pip3? install[^\n|;&`]*[ '"]twinkle(?=[\s'"\[=<>~!`]|$)|\btwinkle\[""")


def texts() -> Iterator[Path]:
    """Yield the files that users and developers read or run; not this one."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        path = ROOT / name
        kinds = {"", ".cfg", ".html", ".ini", ".js", ".md", ".py", ".service", ".sh", ".toml", ".txt", ".yaml", ".yml"}
        if path.suffix in kinds and path.is_file() and path != Path(__file__):
            yield path


@pytest.mark.parametrize(
    "text", ["pip install twinkle", "pip install 'twinkle[client]'", "pip install -q twinkle==1", "needs twinkle[ray]"]
)
def test_the_pattern_finds_the_strangers_package(text: str) -> None:
    assert STRANGER.search(text)


@pytest.mark.parametrize(
    "text", ["pip install 'twinkle-posttrain[server]'", "pip install twinkle-kit", "pip install x; import twinkle"]
)
def test_the_pattern_leaves_our_names_alone(text: str) -> None:
    assert not STRANGER.search(text)


def test_no_text_names_the_strangers_package() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's list of files")
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path in texts() for hit in STRANGER.finditer(path.read_text())]
    assert found == []


# --- twinkle-kit in the same environment ------------------------------------------------------------------------------


def imported_beside(folder: Path, package: str) -> str:
    """Return what importing a package prints, in a process whose path has this folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(folder)])}
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", ["twinkle", "twinkle_client"])
def test_the_first_import_says_that_twinkle_kit_is_there_too(tmp_path: Path, package: str) -> None:
    (tmp_path / "twinkle_kit-0.5.1.dist-info").mkdir()
    said = imported_beside(tmp_path, package)
    assert said.count("UserWarning: twinkle-kit 0.5.1 and twinkle-posttrain are installed in the same environment") == 1
    assert "pip uninstall twinkle-kit twinkle-posttrain twinkle-posttrain-client" in said


def test_nothing_is_said_without_twinkle_kit(tmp_path: Path) -> None:
    (tmp_path / "twinkle_kitchen-1.dist-info").mkdir()
    (tmp_path / "a.zip").write_bytes(b"")
    assert imported_beside(tmp_path, "twinkle, twinkle_client") == ""


# --- make setup -------------------------------------------------------------------------------------------------------

# stands for the Python of an environment: notes its arguments and answers like pip
FAKE_PYTHON = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
*'m.version("twinkle")'*) exit $LEFTOVER ;;
*"pip install"*)
    echo 'Requirement already satisfied: numpy in ./lib'
    echo 'Collecting transformers>=5'
    echo '  Downloading transformers-5.23.0-py3-none-any.whl.metadata (29 kB)'
    echo '  Downloading https://files.example/a/b/transformers-5.23.0-py3-none-any.whl (13.3 MB)'
    echo 'Installing collected packages: tokenizers, transformers, twinkle-posttrain'
    exit $PIP ;;
esac
"""


def set_up(folder: Path, leftover: int, pip: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the Makefile's installation of Twinkle with a fake Python; return its output and the calls of Python."""
    python, calls = folder / "env" / "bin" / "python", folder / "calls"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    makefile = folder / "probe.mk"
    makefile.write_text(f"include Makefile\nprobe:\n\t@$(call install_twinkle,{folder / 'env'},)\n")
    environment = {**os.environ, "CALLS": str(calls), "LEFTOVER": str(leftover), "PIP": str(pip)}
    command = ["make", "-s", "-f", str(makefile), "probe"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, calls.read_text().splitlines()


def test_setup_shows_what_it_downloads_and_how_long_it_took(tmp_path: Path) -> None:
    done, calls = set_up(tmp_path, leftover=1, pip=0)
    assert done.returncode == 0, done.stderr
    first, *middle, last = done.stdout.splitlines()
    assert first.startswith("installing into ")
    assert "-e ./client -e .[server,demo,dev]" in first
    assert middle == ["  Downloading transformers-5.23.0-py3-none-any.whl (13.3 MB)", "  unpacking 3 packages"]
    assert re.fullmatch(r"  done in \d+ s", last)
    assert not [call for call in calls if "uninstall" in call]


def test_setup_removes_an_installation_under_the_earlier_name(tmp_path: Path) -> None:
    done, calls = set_up(tmp_path, leftover=0, pip=0)
    assert done.stdout.startswith("removing the distribution twinkle from ")
    kinds = [call.partition("pip ")[2].split()[0] for call in calls if "pip " in call]
    assert kinds == ["uninstall", "install"]  # in this order: both have the script twinkle-server


def test_setup_fails_if_pip_does(tmp_path: Path) -> None:
    done, _ = set_up(tmp_path, leftover=1, pip=1)
    assert done.returncode != 0
    assert "done in" not in done.stdout
