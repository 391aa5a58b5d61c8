"""Platforms, and the environment variables of launchers."""

import shutil

import pytest
import torch

import twinkle
from twinkle.errors import InvalidInputError
from twinkle.infra import CPU, GPU, MPS, NPU, Platform
from twinkle.infra.platform import ensure_hccl_socket_env


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tools(monkeypatch):
    """The set of driver tools that are found on this machine; a test adds names to it."""
    found = set()
    monkeypatch.setattr(shutil, "which", lambda tool: tool if tool in found else None)
    monkeypatch.setattr("sys.platform", "linux")
    return found


def test_a_machine_without_devices_is_a_cpu(tools):
    assert Platform.get_platform() is CPU
    assert (Platform.device_prefix(), Platform.device_backend(), Platform.get_local_device()) == ("cpu", "gloo", "cpu")
    assert Platform.visible_device_env() is None


def test_devices_are_found_by_their_tool(tools, monkeypatch):
    tools.add("nvidia-smi")
    assert Platform.get_platform() is GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Platform.get_platform() is CPU
    tools.add("npu-smi")
    assert Platform.get_platform() is NPU
    tools.clear()
    monkeypatch.setattr("sys.platform", "darwin")
    assert Platform.get_platform() is MPS


def test_names():
    assert [Platform.get_platform(name) for name in ("cuda", "GPU", "Npu", "mps", "cpu")] == [GPU, GPU, NPU, MPS, CPU]
    assert Platform.visible_device_env("GPU") == "CUDA_VISIBLE_DEVICES"
    assert Platform.get_platform_names() == ["GPU", "NPU", "MPS", "CPU"]
    with pytest.raises(InvalidInputError, match="platform: got 'tpu', allowed: GPU, CUDA, NPU, MPS, CPU"):
        Platform.get_platform("tpu")


def test_alone():
    assert (Platform.get_rank(), Platform.get_local_rank(), Platform.get_world_size()) == (-1, -1, 1)
    assert (Platform.get_local_world_size(), Platform.get_nnodes(), Platform.get_node_rank()) == (1, 1, 0)
    assert Platform.is_master()
    assert twinkle.is_master()
    assert Platform.is_local_master()
    assert Platform.is_last_rank()
    assert Platform.get_local_device(platform="GPU") == "cuda:0"


def test_launched(monkeypatch):
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "NODE_RANK": 1, "NNODES": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert (Platform.get_rank(), Platform.get_world_size(), Platform.get_node_rank()) == (5, 8, 1)
    assert not Platform.is_master()
    assert not Platform.is_last_rank()
    assert Platform.get_local_device(platform="cuda") == "cuda:1"
    assert Platform.get_local_device(3, platform="cuda") == "cuda:3"


@pytest.mark.parametrize(("size", "world"), [(8, 4), (7, 3), (4, 4)])
def test_peers_are_a_partition(size, world):
    parts = [range(size)[Platform.get_peer_index(size, rank, world)] for rank in range(world)]
    assert [item for part in parts for item in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_peers_share_when_there_are_few():
    assert [Platform.get_peer_index(2, rank, 5).start for rank in range(5)] == [0, 1, 0, 1, 0]


def test_random_numbers_of_a_device_can_be_put_back():
    state = Platform.get_device_rng_state("cpu")
    first = torch.rand(3)
    Platform.set_device_rng_state(state, platform="cpu")
    assert torch.equal(torch.rand(3), first)
    Platform.set_device_rng_state(None, platform="cpu")
    if not torch.cuda.is_available():
        assert Platform.get_device_rng_state("cuda") is None


def test_hccl_ports_follow_from_the_master_port(monkeypatch):
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "1")
    monkeypatch.delenv("HCCL_HOST_SOCKET_PORT_RANGE", raising=False)
    monkeypatch.delenv("HCCL_NPU_SOCKET_PORT_RANGE", raising=False)
    ensure_hccl_socket_env(29500)
    import os

    names = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
    assert [os.environ[name] for name in names] == ["1", "45500-46011", "55500-56011"]
    for name in names[1:]:
        monkeypatch.delenv(name)
