"""requires, exists, find_free_port, find_node_ip, trust_remote_code, check_unsafe, framework_util, twinkle.utils."""

import importlib
import ipaddress
import os
import random
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

import twinkle
from tests.support.paths import SOURCE
from twinkle import framework_util
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.framework_util import seed_everything
from twinkle.infra import DeviceMesh

SRC = SOURCE


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
    code = "import twinkle; twinkle.framework_util.seed_everything is twinkle.torch_util.seed_everything or exit(1)"
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


# --- torch devices ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_there_is_the_cpu():
    assert framework_util.is_torch_available()
    assert not framework_util.is_gpu_available()
    assert not framework_util.is_npu_available()
    assert (framework_util.get_device(3), framework_util.get_current_device()) == ("cpu", "cpu")
    for call in (framework_util.set_device, framework_util.synchronize, framework_util.empty_cache):
        assert call() is None
    assert framework_util.ipc_collect() is None


def test_devices_by_their_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert (framework_util.get_device(3), framework_util.get_current_device()) == ("cuda:3", "cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    framework_util.set_device()
    framework_util.set_device(5)
    assert chosen == [2, 5]


def test_contains_nan():
    fine, wrong = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert not framework_util.contains_nan(fine, [fine, {"a": (fine, "nan")}], more=fine, count=3)
    for values in ((wrong,), ([fine, {"a": (wrong,)}],)):
        assert framework_util.contains_nan(*values)
    assert framework_util.contains_nan(loss=wrong)


def test_objects_of_one_process_are_its_own():
    assert framework_util.gather_object([1, None, 2]) == [1, 2]
    assert framework_util.gather_object({"a": 1}, DeviceMesh.from_sizes(dp_size=1, device_type="cpu")) == [{"a": 1}]
    assert framework_util.gather_object(None) == []


def test_objects_of_all_processes_are_gathered(monkeypatch):
    def gather(held, obj, group):
        assert group == "group"
        held[:] = [obj, (3, None), 4]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    mesh = DeviceMesh.from_sizes(dp_size=3, device_type="cpu")
    assert framework_util.gather_object([1, 2], mesh, "group") == [1, 2, 3, 4]


def test_a_plain_tensor_is_local():
    tensor = torch.ones(2)
    assert framework_util.to_local_tensor(tensor) is tensor


# --- other import paths of the same names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["find_node_ip", "DeviceMesh", "Plugin", "get_logger", "is_master", "requires"])
def test_utils_is_another_path(name):
    assert getattr(importlib.import_module("twinkle.utils"), name) is getattr(twinkle, name)


def test_release_date_and_version():
    from datetime import datetime

    assert datetime.fromisoformat(twinkle.__release_datetime__).year >= 2026
