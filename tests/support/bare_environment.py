"""An environment with only what `pip install twinkle-posttrain` installs, made of links to installed packages."""

import importlib.metadata as metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.paths import ROOT, SOURCE

OWN = {"twinkle-posttrain", "twinkle-posttrain-client"}


def dependencies_of(*projects: Path) -> list[str]:
    """Return the names in ``dependencies`` of these pyproject.toml files, without our own distributions."""
    lists = [tomllib.loads(file.read_text())["project"]["dependencies"] for file in projects]
    return sorted({Requirement(text).name for texts in lists for text in texts} - OWN)


def link_packages(folder: Path, names: Iterable[str] | None = None) -> Path:
    """Fill ``folder`` with links to the named distributions and all that they require; by default our core ones."""
    core = dependencies_of(ROOT / "pyproject.toml", ROOT / "client" / "pyproject.toml")
    for found in _with_requirements(core if names is None else names):
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}:
            if not (folder / top).exists() and top != "__pycache__":
                (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def run_bare(packages: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python with our source and the linked packages only: ``-S`` leaves out those of the test environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(packages)])}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, env=environment, cwd=packages, capture_output=True, text=True, timeout=timeout)


def _with_requirements(names: Iterable[str]) -> Iterator[metadata.Distribution]:
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        yield found
        for text in found.requires or []:
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                waiting.append(required.name)
