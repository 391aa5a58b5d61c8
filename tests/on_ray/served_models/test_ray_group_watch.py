"""What ends a group of ranks, and what is only an error. Ranks are scripted, and time is a number, so nothing waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NoReturn

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

from ray.exceptions import RayError
from torch.distributed import DistBackendError

from twinkle.errors import RankFailedError, TwinkleServerError, UserError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.types import LoraSpec
from twinkle.server.runtime.ray.actors import group_launch, group_watch
from twinkle.server.runtime.ray.actors.answers import Answer, BrokenGroup, fingerprint
from twinkle.server.runtime.ray.actors.group_launch import GroupLaunch
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch
from twinkle.server.runtime.ray.actors.step_clock import StepClock, Work
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import TrainerRank
from twinkle.server.runtime.ray.replica import Failure

pytestmark = pytest.mark.ray

MESH = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
FAILED = Failure(UserError("no"))
BROKEN = BrokenGroup(RuntimeError("Connection closed by peer"))


class Ended(BaseException):
    """Stands for the end of the process."""


@dataclass(eq=False)
class Call:
    """A call that a rank answers at a time."""

    answer: object
    at: float = 0.0


@dataclass
class ScriptedRay:
    """Stands for the functions of Ray and of the clock that wait for calls."""

    now: float = 0.0
    at_times: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # what happens meanwhile

    def wait(self, calls: Sequence[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        times = sorted(call.at for call in calls)
        self.now = min(self.now + timeout, max(self.now, times[num_returns - 1]))
        for at, happen in self.at_times:
            if at <= self.now:
                happen()
        done = [call for call in calls if call.at <= self.now][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call: Call) -> object:
        if isinstance(call.answer, RayError):
            raise call.answer
        return call.answer

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def monotonic(self) -> float:
        return self.now


@dataclass
class PricedRank:
    """Stands for the actor of a rank, which answers how much memory an adapter takes in it."""

    price: int
    asked: list[LoraSpec] = field(default_factory=list)

    @property
    def call(self) -> "PricedRank":
        return self

    def remote(self, method: str, args: tuple[LoraSpec], options: dict[str, Any], **flags: bool) -> Call:
        assert (method, options, flags) == ("host_bytes_of", {}, {"sends": True, "compares": False})
        self.asked += args
        return Call(Answer(self.price, None))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    ray = ScriptedRay()

    def end(why: str) -> NoReturn:
        raise Ended(why)

    monkeypatch.setattr(group_watch, "end_process", end)
    for module in (group_watch, group_launch):
        monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(module, "time", ray)
    return ray


@pytest.fixture
def watch(scripted: ScriptedRay) -> GroupWatch:
    """A watch over two copies of a model, each of two ranks. A step may take 60 seconds, the first ones 600."""
    return GroupWatch(MESH, StepClock(10.0, 60.0))


def calls(scripted: ScriptedRay, script: Sequence[object]) -> list[Call]:
    """Return calls with these answers, each an answer or (answer, seconds)."""
    pairs = [each if isinstance(each, tuple) else (each, 0.0) for each in script]
    failures = Failure | RayError
    answers = [(each if isinstance(each, failures) else Answer(each, fingerprint(each)), at) for each, at in pairs]
    return [Call(answer, scripted.now + at) for answer, at in answers]


@pytest.fixture
def asked(scripted: ScriptedRay, watch: GroupWatch) -> Callable[..., list[Any]]:
    """Returns the results of a call whose ranks give these answers."""

    def ask(*script: object, kind: str = "step", by_copy: bool = False) -> list[Any]:
        return watch.results(Work(kind), calls(scripted, script), by_copy=by_copy)

    return ask


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("no"), Failure),
        (ValueError("a bug"), Failure),
        (RankFailedError("rank 1: out of memory"), BrokenGroup),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"), BrokenGroup),
        (DistBackendError("NCCL communicator was aborted"), BrokenGroup),
    ],
)
def test_a_rank_knows_after_which_errors_it_cannot_go_on_with_the_others(error: Exception, kind: type[Failure]) -> None:
    class Trainer:
        def zero_grad(self, adapter_id: str) -> None:
            raise error

    rank = TrainerRank({})
    rank._trainer = Trainer()
    answer = rank.call("zero_grad", ("a",), {}, sends=True, compares=True)
    assert type(answer) is kind
    assert str(error).splitlines()[0] in str(answer.error)


def test_an_error_of_all_ranks_is_raised(asked):
    assert asked("a", "a", ("a", 9.0), "a") == ["a", "a", "a", "a"]
    with pytest.raises(UserError, match=r"^no$"):
        asked(FAILED, (FAILED, 5.0), FAILED, FAILED)


def test_an_error_of_some_ranks_ends_the_group_and_others_do_not_wait_for_their_own_timeout(asked, scripted):
    others = r"rank 0 \(dp 0, tp 0\), rank 2 \(dp 1, tp 0\), rank 3 \(dp 1, tp 1\)"
    with pytest.raises(Ended, match=rf"^rank 1 \(dp 0, tp 1\) failed in step, and {others} did not: no$"):
        asked("a", FAILED, "a", ("a", 3.0))
    before = scripted.now
    with pytest.raises(Ended, match=r"^rank 0 .* failed in step, and rank 1 .*, rank 3 .* did not: no$"):
        asked(FAILED, ("a", inf), FAILED, "a")
    assert scripted.now - before < 70


def test_a_rank_that_died_is_named_and_not_those_that_lost_it(asked):
    died = RayError("SIGKILL")
    with pytest.raises(Ended, match=r"^rank 2 \(dp 1, tp 0\) died during step: SIGKILL$"):
        asked((BROKEN, 0.1), ("a", inf), (died, 1.0), (BROKEN, 0.2))
    with pytest.raises(Ended, match=r"^rank 0 .* failed in step, and the ranks lost each other: Connection closed"):
        asked(BROKEN, BROKEN, BROKEN, BROKEN)  # no process died, but their connections are gone
    with pytest.raises(Ended, match=r"^rank 1 .* failed in step, and the ranks lost each other: no$"):
        asked(BROKEN, (FAILED, 0.1), BROKEN, BROKEN)


def test_a_rank_that_hangs_is_found_by_the_times_of_earlier_calls(asked, scripted, caplog):
    hung = r"^no answer to step from rank 3 \(dp 1, tp 1\) for {} s, so a rank hangs: "
    with pytest.raises(Ended, match=hung.format(601)):
        asked("a", "a", "a", ("a", inf))  # a first call
    for _ in range(3):
        asked("a", "a", "a", ("a", 2.0))
    with pytest.raises(Ended, match=hung.format(61)):
        asked("a", "a", "a", ("a", inf))
    assert "no answer from rank 3 (dp 1, tp 1) for 31 s; after 60 s the group ends" in caplog.text
    for _ in range(9):
        asked("a", "a", "a", ("a", 20.0))
    assert asked("a", "a", "a", ("a", 190.0)) == ["a"] * 4
    with pytest.raises(Ended, match=hung.format(201)):
        asked("a", "a", "a", ("a", inf))


def test_time_in_which_this_process_did_not_run_does_not_count(asked, scripted, watch):
    for _ in range(3):
        asked("a", "a", "a", "a")
    start = scripted.now

    def be_stopped_for_an_hour() -> None:
        scripted.at_times.clear()
        scripted.now += 3600.0

    scripted.at_times.append((start + 5.0, be_stopped_for_an_hour))
    assert asked("a", "a", "a", ("a", 3640.0)) == ["a"] * 4


def test_a_rank_that_answers_something_else_ends_the_group(asked):
    differs = (
        r"^rank 3 \(dp 1, tp 1\) answered step differently from rank 0 \(dp 0, tp 0\): digest .*, numbers 0.5; rank 0"
    )
    with pytest.raises(Ended, match=differs):
        asked({"norm": 1.0}, {"norm": 1.0}, {"norm": 1.0}, {"norm": 0.5})
    assert asked("a", "a", "b", "b", by_copy=True) == ["a", "a", "b", "b"]
    with pytest.raises(Ended, match=r"^rank 3 .* differently from rank 2"):
        asked("a", "a", "b", "a", by_copy=True)


def test_a_call_of_the_first_rank_may_wait_for_the_call_before_it(watch, scripted):
    watch._in_call.set()  # a step that takes long
    scripted.at_times.append((5000.0, watch._in_call.clear))
    (check,) = calls(scripted, [("fine", 5001.0)])
    assert watch.result_of_first(Work("check_adapter"), check) == "fine"
    (hung,) = calls(scripted, [("fine", inf)])
    with pytest.raises(Ended, match=r"no answer to check_adapter from rank 0 .* for 601 s"):
        watch.result_of_first(Work("check_adapter"), hung)


def test_the_price_of_a_shape_is_asked_of_the_first_rank_once(watch):
    rank = PricedRank(1000)
    group = TrainerGroup([rank, None, None, None], watch)
    assert [group.host_bytes_of(LoraSpec(rank=8, seed=seed)) for seed in (1, 2)] == [4000, 4000]
    assert group.host_bytes_of(LoraSpec(rank=16)) == 4000
    assert [spec.rank for spec in rank.asked] == [8, 16]


def test_launch_says_which_ranks_are_up_and_which_one_failed(scripted, caplog):
    launch = GroupLaunch("a-model", MESH)
    loading = [Call("facts", 10.0), Call("facts", 100.0), Call("facts", 5.0), Call("facts", 5.0)]
    assert launch.wait(loading, "load", lambda: "they read") == ["facts"] * 4
    waits = "a-model: waiting since 40 s for ranks to load: rank 1 (dp 0, tp 1); ready: rank 0 (dp 0, tp 0), rank 2"
    assert waits in caplog.text
    failed = [Call("facts", inf), Call(FAILED), Call("facts", inf), Call("facts", inf)]
    message = r"^rank 1 \(dp 0, tp 1\) of the 4 processes of a-model could not load: UserError: no$"
    with pytest.raises(TwinkleServerError, match=message):
        launch.wait(failed, "load", lambda: "they read")
    lost = [Call(BROKEN), Call(BROKEN, 0.1), Call("facts", inf), Call(RayError("killed\nby the kernel"), 1.0)]
    for call in lost:
        call.at += scripted.now
    with pytest.raises(TwinkleServerError, match=r"^rank 3 .* could not load: RayError: killed by the kernel$"):
        launch.wait(lost, "load", lambda: "they read")
    bug = Failure(RuntimeError("Traceback (most recent call last):\n  File …\nValueError: a bug\n"))
    with pytest.raises(TwinkleServerError, match=r"^rank 0 .* could not load: ValueError: a bug$"):
        launch.wait([Call(bug), *failed[2:]], "load", lambda: "they read")
