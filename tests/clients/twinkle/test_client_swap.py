"""The names of the library: the client has each, or says at import why not. Those that run here give its numbers."""

import importlib
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

import twinkle_client
from twinkle_client import DeviceGroup, DeviceMesh, InvalidRequestError, Platform, is_master
from twinkle_client.advantage import GRPOAdvantage, RLOOAdvantage
from twinkle_client.compatibility import PATHS, Absent
from twinkle_client.data_format import pack_value, user_data_get
from twinkle_client.preprocessor import Preprocessor
from twinkle_client.reward import Reward

# The library's modules that scripts import names from.
MODULES = [
    *("advantage", "cli", "data_format", "dataloader", "dataset", "framework_util", "hub", "infra", "kernel", "loss"),
    *("metric", "model", "module", "notifier", "patch", "preprocessor", "processor", "reward", "sampler", "template"),
    "torch_util",
]
ABSENT = {path: entry for path, entry in PATHS.items() if isinstance(entry, Absent)}
ABSENT_MODULES = {path.partition(".")[2] for path in ABSENT if ":" not in path}
ABSENT_NAMES = [path for path in ABSENT if ":" in path]


def library(name: str) -> ModuleType:
    return importlib.import_module("twinkle" if not name else f"twinkle.{name}")


# --- every name is there, or says why not -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *MODULES])
def test_every_name_of_the_library_is_there_or_says_why_not(name):
    if name in ABSENT_MODULES:
        with pytest.raises(ModuleNotFoundError, match=rf"^twinkle_client\.{name}: \w"):
            importlib.import_module(f"twinkle_client.{name}")
        return
    ours = importlib.import_module("twinkle_client" if not name else f"twinkle_client.{name}")
    for public in library(name).__all__:
        entry = ABSENT.get(f"{ours.__name__}:{public}")
        assert (entry is not None) != (public in ours.__all__), public
        if entry is not None:
            with pytest.raises(ImportError) as caught:
                getattr(ours, public)
            assert str(caught.value) == f"{ours.__name__}.{public}: {entry.why}"


def test_the_table_lists_only_names_of_the_library():
    for path in ABSENT_NAMES:
        module, _, name = path.partition(":")
        assert name in library(module.partition(".")[2]).__all__, path
    assert set(MODULES) >= set(ABSENT_MODULES)


def test_the_reason_comes_at_import():
    code = "from twinkle_client import torch_util"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "twinkle_client.torch_util: it works on torch's tensors" in done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = twinkle_client.infra.nothing


# --- descriptions of devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_size": 1},
        {"dp_size": 4, "fsdp_size": 2, "tp_size": 2},
        {"fsdp_size": 8, "dp_size": 1, "ulysses_size": 2},
        {"dp_size": 2, "ep_size": 2, "pp_size": 2},
    ],
    ids=str,
)
def test_meshes_are_the_librarys(sizes):
    ours, theirs = DeviceMesh.from_sizes(**sizes), library("").DeviceMesh.from_sizes(**sizes)
    assert np.array_equal(ours.mesh, theirs.mesh)
    for name in (
        "mesh_dim_names",
        "world_size",
        "data_world_size",
        "data_rank",
        "device_type",
        "ep_fsdp_size",
        "order",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for kind in ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp"):
        assert getattr(ours, f"{kind}_world_size") == getattr(theirs, f"{kind}_world_size")
    assert [ours.get_slice(7), ours.get_slice(7, 0)] == [theirs.get_slice(7), theirs.get_slice(7, 0)]


def test_mistakes_in_meshes_and_groups():
    for mistake in ({"dp_size": -1}, {"dp_size": 2, "world_size": 3}, {"dp_size": 2, "ep_size": 4}):
        with pytest.raises(InvalidRequestError):
            DeviceMesh.from_sizes(**mistake)
    with pytest.raises(InvalidRequestError, match="one process"):
        DeviceMesh.from_sizes(dp_size=2).to_torch_device_mesh()
    with pytest.raises(InvalidRequestError, match="mesh_dim_names"):
        DeviceMesh(np.arange(2), ("rows",))
    assert DeviceGroup("model", 2, "cuda").platform.name == "GPU"
    for mistake in ((0, "cpu"), ([-1], "cuda"), (1, "tpu")):
        with pytest.raises(InvalidRequestError):
            DeviceGroup("model", *mistake)


def test_the_client_is_one_process():
    theirs = library("").Platform
    for method in ("get_rank", "get_world_size", "get_nnodes", "is_master", "is_last_rank", "device_prefix"):
        assert getattr(Platform, method)() == getattr(theirs, method)(), method
    assert is_master()
    assert Platform.get_peer_index(5, 1, 2) == theirs.get_peer_index(5, 1, 2)
    assert Platform.get_local_device(1, platform="GPU") == "cuda:1"
    assert Platform.device_backend("npu") == "hccl"


# --- what runs here ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ours", [GRPOAdvantage, RLOOAdvantage])
def test_advantages_are_the_librarys(ours, scale):
    rewards = np.random.default_rng(0).normal(size=(12, 2)).tolist()
    theirs = getattr(library("advantage"), ours.__name__)
    for given in (rewards, [a for a, _ in rewards], [1.0] * 12):
        found, expected = ours()(given, 4, scale), theirs()(given, 4, scale)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    if ours is GRPOAdvantage:
        assert ours()([1.0, 3.0], scale=scale).tolist() == theirs()([1.0, 3.0], scale=scale).tolist()


def test_mistakes_in_rewards():
    for given in ((["a"], 1), ([1.0, 2.0, 3.0], 2), ([float("nan")], 1), ([[[1.0]]], 1), ([1.0], 1, "some")):
        with pytest.raises(InvalidRequestError):
            GRPOAdvantage()(*given)
    with pytest.raises(InvalidRequestError, match="2 or more"):
        RLOOAdvantage()([1.0], 1)


def test_user_data_is_the_librarys():
    theirs = library("data_format")
    for value in (5, "5", {"a": [1]}, None, "ü"):
        assert pack_value(value) == theirs.pack_value(value)
        items = [("other", "1"), ("key", pack_value(value))]
        assert user_data_get(items, "key") == theirs.user_data_get(items, "key") == value
    assert user_data_get([("key", "no json")], "key") == "no json"
    assert user_data_get(None, "key", 3) == 3


def test_own_rewards_and_preprocessors_run_here():
    class Long(Reward):
        def __init__(self, least: int) -> None:
            self.least = least

        def __call__(self, trajectories, ground_truths=None):
            return [float(len(each["messages"]) >= self.least) for each in trajectories]

    class Upper(Preprocessor):
        def __call__(self, columns):
            return self.map_row_to_col([{"text": row["text"].upper()} for row in self.map_col_to_row(columns)])

    assert Long(2)([{"messages": [1]}, {"messages": [1, 2]}]) == [0.0, 1.0]  # without a client
    assert Upper()({"text": ["a", "b"]}) == {"text": ["A", "B"]}
