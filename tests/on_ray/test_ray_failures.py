"""Errors that the driver gets when something fails on workers."""

import traceback

import pytest

import twinkle
from tests.on_ray.ray_components import RefusalError, Rows
from twinkle import DeviceGroup, ResourcesError, WorkerDiedError, WorkerTimeoutError
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra import initialization

pytestmark = pytest.mark.ray


@pytest.fixture
def resources(program):
    """Ray resources, as if nothing had been reserved yet."""
    from twinkle.infra import ray_resources

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_resources, "_cluster", None)
        patch.setattr(initialization, "_settings", initialization.Settings())
        yield ray_resources


def twice(call):
    """Call twice: the first call returns after earlier calls on the same workers, the second reports their failure."""
    call()
    call()


def test_exceptions_keep_their_type_and_their_traceback(rows):
    with pytest.raises(RefusalError) as caught:
        rows.refuse(1, 5)
    assert type(caught.value) is RefusalError
    assert (caught.value.args, caught.value.code) == (("no", 5), 5)
    text = "".join(traceback.format_exception(caught.value))
    assert "'rows-0'.refuse on rank 1 of group 'work'" in text
    assert 'raise RefusalError("no", code)' in text
    assert "\x1b" not in text


def test_a_failure_that_nobody_collected_is_raised_by_a_later_call(rows):
    rows.refuse_later(3)
    with pytest.raises(InvalidInputError, match="value: got 3") as caught:
        twice(rows.total)
    assert "'rows-0'.refuse_later on rank" in caught.value.__notes__[0]
    assert rows.total() == 3


def test_a_failure_that_was_collected_is_not_raised_again(rows):
    with pytest.raises(InvalidInputError):
        rows.refuse_later(3)()
    assert rows.total() == rows.total() == 3


def test_a_failed_promise_fails_the_call_it_is_given_to(rows, source):
    with pytest.raises(InvalidInputError, match="value: got 4"):
        source.opened(rows.refuse_later(4), 0)()
    with pytest.raises(InvalidInputError, match="value: got 4"):
        twice(rows.total)


def test_a_constructor_that_fails(program):
    with pytest.raises(InvalidInputError, match="start: got -1"):
        Rows(-1, remote_group="data")
    with pytest.raises(TypeError, match="'unknown'"):
        Rows(unknown=1, remote_group="data")
    with pytest.raises(UnknownNameError, match="remote_group 'nowhere'; known: cards, data, work"):
        Rows(remote_group="nowhere")


def test_timeouts_name_the_ranks(program):
    slow = Rows(remote_group="data", instance_id="slow")
    with pytest.raises(WorkerTimeoutError, match=r"no answer from rank 0 of group 'data' to 'slow'.hang in 0.5 s"):
        slow.hang()
    slow._workers.end()


def test_a_dead_worker_is_named_while_others_wait_for_it(program):
    doomed = Rows(remote_group="work", instance_id="doomed")
    with pytest.raises(WorkerDiedError, match=r"rank 1 of group 'work' died during 'doomed'.die") as caught:
        doomed.die(1)
    assert (caught.value.group, caught.value.rank) == ("work", 1)
    with pytest.raises(WorkerDiedError):
        doomed.mean()
    doomed._workers.end()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            DeviceGroup("big", 8, "GPU"),
            r"need 1 machine with 8 GPU; the cluster has 1 machine with 4 GPU. nproc_per_node",
        ),
        (DeviceGroup("wide", [0, 8], "GPU"), r"need 2 machines with 1, 1 GPU; the cluster has 1 machine with 4 GPU"),
        (DeviceGroup("npu", 1, "NPU"), "need 1 machine with 1 NPU; the cluster has 1 machine with 0 NPU"),
        (DeviceGroup("cpu", 8, "CPU"), r"need 1 machine with 8 CPU; .*TWINKLE_CPU_PG_CPUS_PER_PROC .*\(now 1\)"),
    ],
)
def test_resources_that_are_not_there(resources, monkeypatch, group, message):
    monkeypatch.delenv("TWINKLE_CPU_PG_CPUS_PER_PROC")
    with pytest.raises(ResourcesError, match=message):
        twinkle.initialize("ray", groups=[group])


def test_resources_that_are_in_use(resources, monkeypatch):
    monkeypatch.setattr(resources, "_SECONDS_TO_WAIT", 0.1)
    with pytest.raises(ResourcesError, match=r"0 of these are free"):
        twinkle.initialize("ray", groups=[DeviceGroup("cards", 4, "GPU")])


def test_groups_are_needed(program):
    with pytest.raises(InvalidInputError, match="groups: got None"):
        twinkle.initialize("ray")


def test_shutdown_ends_workers_and_gives_resources_back(resources):
    import ray

    twinkle.initialize("ray", groups=[DeviceGroup("more", 2, "CPU")])
    proxy = Rows(remote_group="more")
    assert proxy.total() == 3
    twinkle.shutdown()
    with pytest.raises(WorkerDiedError):
        proxy.total()
    assert ray.is_initialized()  # another program started the cluster
