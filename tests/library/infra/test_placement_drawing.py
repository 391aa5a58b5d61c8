"""The drawing of device groups and meshes."""

import pytest

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement
from twinkle.infra import initialization
from twinkle.infra.components import forget_components, name_component, record_component


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(initialization, "_settings", initialization.Settings())
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    forget_components()
    yield
    forget_components()


def drawn(*args):
    text = get_device_placement(*args)
    assert text.startswith("\n┌")
    lines = text.strip().splitlines()
    assert {len(line) for line in lines} == {80}
    return [line.strip("│ ").rstrip() for line in lines]


def test_one_process():
    assert "group default: 1 worker on CPU, rank 0" in "\n".join(drawn(DeviceGroup("default", 1, "CPU")))
    twinkle.initialize(groups=[DeviceGroup("mine", 1, "CPU")])
    assert "group mine: 1 worker on CPU, rank 0" in drawn()


def test_two_dimensions_are_a_grid():
    record_component("Model", None, "model", DeviceMesh.from_sizes(fsdp_size=2, dp_size=3, tp_size=1))
    record_component("Other", None, "other", DeviceMesh.from_sizes(dp_size=3))
    lines = drawn(DeviceGroup("model", 6, "GPU"))
    assert lines[3:8] == [
        "group model: 6 workers on GPU, ranks 0–5",
        "Model: fsdp 2 × dp 3",
        "dp 0 dp 1 dp 2",
        "fsdp 0     0    1    2",
        "fsdp 1     3    4    5",
    ]
    assert not any("Other" in line for line in lines)


def test_more_dimensions_are_several_grids():
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2, ep_size=2, sequence_parallel=True)
    record_component("Model", "big", "model", mesh)
    lines = drawn([DeviceGroup("model", 8, "GPU", gpus_per_worker=2)])
    assert "group model: 4 workers on GPU, 2 devices each, ranks 0–7" in lines
    assert "big: pp 2 × dp 2 × tp 2, ep 2, sequence parallel" in lines
    second = lines.index("pp 1")
    assert lines[second + 2 : second + 4] == ["dp 0     4    5", "dp 1     6    7"]


def test_large_ones_are_cut():
    record_component("Model", None, "model", DeviceMesh.from_sizes(fsdp_size=16, dp_size=16))
    lines = drawn(DeviceGroup("model", list(range(0, 512, 2)), "GPU"))
    assert any(line.startswith("group model: 256 workers on GPU, 256 ranks 0, 2, 4") for line in lines)
    assert "… and 10 more rows" in lines
    assert any(line.startswith("fsdp 5") and line.endswith("…") for line in lines)


def test_names_are_counted_by_class():
    assert [name_component(name, None) for name in ("DataLoader", "Rows", "DataLoader")] == [
        "data_loader-0",
        "rows-0",
        "data_loader-1",
    ]
    assert name_component("Rows", "mine") == "mine"
