"""Device groups, their ranks, and the placement of their workers."""

import pytest

from twinkle import DeviceGroup
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra.device_group import find_group, plan_groups


def places(plan):
    return [(worker.node, *worker.devices) for worker in plan.workers]


def test_numbers_follow_the_group_before():
    model, sampler, data = plan_groups(
        [DeviceGroup("model", 4, "cuda"), DeviceGroup("sampler", 2, "GPU"), DeviceGroup("data", 3, "CPU")], 4, 2
    )
    assert model.ranks == (0, 1, 2, 3)
    assert sampler.ranks == (4, 5)
    assert places(sampler) == [(1, 0), (1, 1)]
    assert data.ranks == (0, 1, 2)
    assert places(data) == [(0,), (0,), (1,)]


def test_lists_name_devices():
    (first, second) = plan_groups([DeviceGroup("a", [6, 7], "GPU"), DeviceGroup("b", 1, "GPU")], 8, 8)
    assert places(first) == [(0, 6), (0, 7)]
    assert second.ranks == (8,)


def test_workers_with_several_devices():
    (plan,) = plan_groups([DeviceGroup("sampler", 4, "GPU", gpus_per_worker=2)], 8, 8)
    assert places(plan) == [(0, 0, 1), (0, 2, 3)]
    with pytest.raises(InvalidInputError, match=r"ranks \[2, 3, 4, 5\] are on machines \[0, 1\]"):
        plan_groups([DeviceGroup("a", 2, "GPU"), DeviceGroup("b", 4, "GPU", gpus_per_worker=4)], 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("g", 0, "GPU"), "ranks of group 'g': got 0"),
        (("g", [], "GPU"), r"ranks of group 'g': got \[\]"),
        (("g", [-1], "GPU"), "ranks of group 'g'"),
        (("g", 3, "GPU", 2), "gpus_per_worker of group 'g': got 2, allowed: a number that divides the group's 3 ranks"),
        (("g", 2, "CPU", 2), "gpus_per_worker of group 'g': got 2, allowed: 1 for CPU"),
        (("g", 2, "TPU"), "platform: got 'TPU'"),
    ],
)
def test_groups_that_cannot_be(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        DeviceGroup(*arguments)


def test_devices_are_chosen_by_rank():
    groups = [DeviceGroup("g", 1, "GPU", visible_devices="3"), DeviceGroup("h", [2], "GPU", 1, [0, 1])]
    plans = plan_groups(groups, nproc_per_node=4, ncpu_proc_per_node=1)
    assert [worker.devices for plan in plans for worker in plan.workers] == [(0,), (2,)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([DeviceGroup("a", [0, 1], "GPU"), DeviceGroup("b", [1], "GPU")], "1 belongs to group 'a'"),
        ([DeviceGroup("a", 1, "GPU"), DeviceGroup("a", 1, "GPU")], "groups with different names"),
        ([DeviceGroup("a", 1, "GPU"), DeviceGroup("b", 1, "NPU")], "one kind of accelerator"),
        ([DeviceGroup("a", [0, 1], "CPU")], "a number, for CPU processes"),
        ([], "one or more groups"),
    ],
)
def test_groups_that_contradict(groups, message):
    with pytest.raises(InvalidInputError, match=message):
        plan_groups(groups, 8, 8)


def test_unknown_groups():
    plans = plan_groups([DeviceGroup("model", 1, "CPU")], 8, 8)
    assert find_group(plans, "model") is plans[0]
    with pytest.raises(UnknownNameError, match="unknown remote_group 'modle'; known: model"):
        find_group(plans, "modle")
    with pytest.raises(InvalidInputError, match="nproc_per_node: got 0"):
        plan_groups([DeviceGroup("model", 1, "CPU")], 0, 8)
