"""requires, exists, find_free_port, find_node_ip, trust_remote_code, check_unsafe, seed_everything."""

import ipaddress
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import twinkle
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.framework_util import seed_everything

SRC = Path(__file__).parents[1] / "src"


def test_requires():
    twinkle.requires("numpy>=1.0")
    assert twinkle.exists("numpy")
    with pytest.raises(ImportError, match=r"numpy .* is installed, wanted: pip install 'numpy<1.0'"):
        twinkle.requires("numpy<1.0")
    with pytest.raises(ImportError, match="'no-such-package' is not installed"):
        twinkle.requires("no-such-package")
    assert not twinkle.exists("no-such-package")
    with pytest.raises(InvalidInputError, match="package: got '!!'"):
        twinkle.exists("!!")


def test_free_port_can_be_bound():
    port = twinkle.find_free_port("127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert twinkle.find_free_port("127.0.0.1", start_port=port) > port
        with pytest.raises(InvalidInputError, match="start_port"):
            twinkle.find_free_port("127.0.0.1", start_port=port, retry=1)


def test_node_ip_is_an_address():
    found = twinkle.find_node_ip()
    assert found is None or ipaddress.ip_address(found)


def test_remote_code_is_off_by_default(monkeypatch):
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    assert twinkle.trust_remote_code() is False
    twinkle.check_unsafe(1, "x", rows=[{"a": (2, {3})}])
    with pytest.raises(UnsupportedError, match="argument 'rows' holds a function or class"):
        twinkle.check_unsafe(1, rows=[{"a": (2, {len})}])
    with pytest.raises(UnsupportedError, match="argument 0"):
        twinkle.check_unsafe({int: 1})
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    assert twinkle.trust_remote_code() is True
    twinkle.check_unsafe(len)


def test_framework_util_needs_no_import_of_its_own():
    code = "import twinkle; twinkle.framework_util.seed_everything"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, check=True)


def test_seed_everything():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first
    with pytest.raises(InvalidInputError, match="seed: got -1"):
        seed_everything(-1)
