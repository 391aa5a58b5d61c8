"""Fixtures of the hub's tests: a cache of one's own, a package index of one's own."""

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
    """An empty cache for tests about the cache itself; all others share the user's."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(path))
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes wheels from, instead of from the network."""
    path = tmp_path / "index"
    path.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    return path


@pytest.fixture
def start_python() -> Callable[[str], subprocess.Popen[str]]:
    """Starts another Python process, with this test's environment, on a piece of code."""

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
