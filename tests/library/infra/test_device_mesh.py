"""The layout of ranks, the shares of a batch, and ranks with a role."""

import pickle

import numpy as np
import pytest

from twinkle import DeviceMesh
from twinkle.errors import InvalidInputError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def as_rank(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_dimensions_come_in_a_fixed_order():
    mesh = DeviceMesh.from_sizes(tp_size=2, cp_size=3, dp_size=2, pp_size=2, fsdp_size=2, device_type="cpu")
    assert mesh.mesh_dim_names == ("fsdp", "pp", "dp", "cp", "tp")
    assert mesh.mesh.shape == (2, 2, 2, 3, 2)
    assert mesh.mesh.flatten().tolist() == list(range(48))
    assert (mesh.world_size, mesh.order) == (48, "tp-cp-ep-dp-pp")
    assert (mesh.tp_world_size, mesh.ep_world_size, mesh.get_dim_size("cp")) == (2, 0, 3)


def test_sizes_not_given_are_absent_but_for_dp():
    assert DeviceMesh.from_sizes(tp_size=2).mesh_dim_names == ("dp", "tp")
    assert DeviceMesh.from_sizes(dp_size=None, fsdp_size=4).mesh.shape == (4, 1)
    assert DeviceMesh.from_sizes(dp_size=2, etp_size=None, tp_size=2).etp_world_size == 2
    mesh = DeviceMesh.from_sizes(dp_size=8, ep_size=4)
    assert (mesh.mesh.ndim, mesh.ep_size, mesh.ep_fsdp_size) == (1, 4, 2)
    assert not mesh.has_dim("ep")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "dp_size": 2, "tp_size": 2}, "world_size: got 8, allowed: 4, which is dp 2 × tp 2"),
        ({"dp_size": -1}, "dp_size: got -1"),
        ({"tp_size": 0}, "tp_size: got 0"),
        ({"dp_size": 4, "ep_size": 3}, "ep_size: got 3, allowed: a divisor of the world size 4"),
        ({"dp_size": 2, "ulysses_size": 4}, "ulysses_size: got 4, allowed: a divisor of dp × fsdp, which is 2"),
    ],
)
def test_sizes_that_contradict(sizes, message):
    with pytest.raises(InvalidInputError, match=message):
        DeviceMesh.from_sizes(**sizes)


def test_names_are_checked():
    assert DeviceMesh([[0, 1], [2, 3]], ("dp", "tp")).world_size == 4
    for names in (("dp",), ("dp", "dp"), ("dp", "xp")):
        with pytest.raises(InvalidInputError, match="mesh_dim_names"):
            DeviceMesh(np.arange(4).reshape(2, 2), names)
    with pytest.raises(InvalidInputError, match="dimension: got 'pp', allowed: dp"):
        DeviceMesh.from_sizes(dp_size=2).get_dim_size("pp")


def test_a_process_that_was_not_launched_has_no_coordinates():
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    assert (mesh.dp_rank, mesh.tp_rank, mesh.data_rank) == (None, None, 0)
    assert DeviceMesh.from_sizes().is_single_process
    assert not mesh.is_single_process


def test_coordinates_of_this_process(monkeypatch):
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, tp_size=2)
    as_rank(monkeypatch, 6, 8)  # fsdp 1, dp 1, tp 0
    assert (mesh.fsdp_rank, mesh.dp_rank, mesh.tp_rank, mesh.pp_rank) == (1, 1, 0, None)
    assert mesh.get_tp_ranks() == [6, 7]
    assert not mesh.is_tp_last_rank()
    assert mesh.is_tp_last_rank(7)
    assert mesh.is_pp_last_rank()


def test_every_part_of_a_batch_belongs_to_one_data_rank():
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, tp_size=2)
    assert mesh.data_world_size == 4
    # fsdp 0 dp 0, fsdp 0 dp 1, fsdp 1 dp 0, fsdp 1 dp 1: fsdp varies fastest
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert mesh.get_data_rank_from_global_rank(99) == 0
    rows = list(range(10))
    assert [rows[mesh.get_slice(10, rank)] for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert rows[DeviceMesh.from_sizes(tp_size=2).get_slice(10)] == rows


def test_ulysses_ranks_share_their_rows(monkeypatch):
    mesh = DeviceMesh.from_sizes(dp_size=4, ulysses_size=2)
    assert mesh.data_world_size == 2
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    as_rank(monkeypatch, 3, 4)
    assert (mesh.data_rank, mesh.get_slice(5)) == (1, slice(3, 5))
    assert mesh.get_sequence_groups() == [[0, 1], [2, 3]]
    assert mesh.get_collect_ranks() == [0, 2]


def test_sequence_groups_are_neighbours_along_fsdp_first():
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=2, ulysses_size=2)
    assert mesh.get_sequence_groups() == [[0, 2], [1, 3]]  # rank = 2 · fsdp + dp
    assert DeviceMesh.from_sizes(dp_size=2, fsdp_size=4, ulysses_size=8).get_sequence_groups() == [list(range(8))]
    assert DeviceMesh.from_sizes(dp_size=2).get_sequence_groups() == [[0], [1]]


def test_a_process_with_several_devices_stands_for_their_ranks(monkeypatch):
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    as_rank(monkeypatch, 1, 2)  # two processes for a mesh of four
    assert (mesh.dp_rank, mesh.tp_rank, mesh.data_rank) == (1, 0, 1)


def test_ranks_with_a_role():
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=2, tp_size=2)
    assert mesh.get_pp_first_ranks() == mesh.get_pp_stage_ranks(0) == [0, 1, 2, 3]
    assert mesh.get_pp_last_ranks() == [4, 5, 6, 7]
    assert mesh.get_tp_last_ranks() == [1, 3, 5, 7]
    assert mesh.get_collect_ranks() == [4, 6]
    assert mesh.is_pp_first_rank(2)
    assert not mesh.is_pp_first_rank(4)
    with pytest.raises(InvalidInputError, match="stage: got 2, allowed: 0 to 1"):
        mesh.get_pp_stage_ranks(2)
    assert DeviceMesh.from_sizes(dp_size=2).get_pp_last_ranks() == [0, 1]


def test_ranks_along_dimensions():
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, tp_size=2)
    assert mesh.ranks_along(["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.ranks_along(["dp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.ranks_along(["dp", "fsdp"]) == [[0, 4, 2, 6], [1, 5, 3, 7]]


def test_a_mesh_can_be_sent():
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, ulysses_size=2)
    copy = pickle.loads(pickle.dumps(mesh))
    assert (copy.mesh.tolist(), copy.mesh_dim_names, copy.ulysses_size) == ([[0, 1], [2, 3]], ("dp", "tp"), 2)
