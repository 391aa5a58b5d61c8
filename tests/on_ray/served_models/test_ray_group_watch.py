"""What ends a group of ranks, and what is only an error. Ranks are scripted, and time is a number, so nothing waits."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NoReturn

import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

from ray.exceptions import RayError
from torch.distributed import DistBackendError

from twinkle.errors import RankFailedError, TwinkleServerError, UserError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.types import AdapterSnapshot, LoraSpec
from twinkle.server.runtime.ray.actors import group_launch, group_watch, trainer_group
from twinkle.server.runtime.ray.actors.answers import Answer, BrokenGroup, fingerprint
from twinkle.server.runtime.ray.actors.group_launch import GroupLaunch
from twinkle.server.runtime.ray.actors.group_watch import GroupWatch
from twinkle.server.runtime.ray.actors.load_watch import LoadReport, LoadReporter
from twinkle.server.runtime.ray.actors.step_clock import StepClock, Work
from twinkle.server.runtime.ray.actors.trainer_group import TrainerGroup
from twinkle.server.runtime.ray.actors.trainer_rank import RankPlace, TrainerRank
from twinkle.server.runtime.ray.replica import Failure
from twinkle.server.services.training.adapters import AdapterMemory
from twinkle.utils.progress import Progress

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

    def get(self, call: Call, timeout: float = 0.0) -> object:
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


@dataclass
class RecordingRank:
    """Stands for the actor of a rank, which records with what it is called, and answers nothing or a price."""

    called: list[tuple[str, object]] = field(default_factory=list)

    @property
    def call(self) -> "RecordingRank":
        return self

    def remote(self, method: str, args: object, options: dict[str, Any], *, sends: bool, compares: bool) -> Call:
        self.called.append((method, args))
        return Call(Answer(1000 if method == "host_bytes_of" else None, None))


def test_a_snapshot_is_put_into_the_object_store_once_for_all_ranks(watch, scripted, monkeypatch):
    stored: list[object] = []

    def put(value: object) -> str:
        stored.append(value)
        return f"reference {len(stored)}"

    monkeypatch.setattr(scripted, "put", put, raising=False)
    monkeypatch.setattr(trainer_group, "ray", scripted)
    ranks = [RecordingRank() for _ in range(4)]
    group = TrainerGroup(ranks, watch)
    rows = np.zeros(3, np.float32)
    snapshot = AdapterSnapshot(LoraSpec(rank=8), 1, "layout", rows, rows, rows, None)
    group.restore("a", snapshot)
    assert len(stored) == 1
    assert stored[0] == ("a", snapshot)
    assert [rank.called[0] for rank in ranks] == [("restore", "reference 1")] * 4
    assert (group.adapter_ids(), group.host_bytes()) == (["a"], 4000)
    group.zero_grad("a")
    assert [rank.called[-1] for rank in ranks] == [("zero_grad", ("a",))] * 4
    assert len(stored) == 1


def test_the_price_of_a_shape_is_asked_of_the_first_rank_once(watch):
    rank = PricedRank(1000)
    group = TrainerGroup([rank, None, None, None], watch)
    assert [group.host_bytes_of(LoraSpec(rank=8, seed=seed)) for seed in (1, 2)] == [4000, 4000]
    same = {"alpha": 2.0, "alpha_pattern": {"q_proj": 4.0}, "use_rslora": True, "dropout": 0.5, "init_weights": "pissa"}
    assert group.host_bytes_of(LoraSpec(rank=8, **same)) == 4000
    assert [spec.rank for spec in rank.asked] == [8]
    others = [LoraSpec(rank=16), LoraSpec(rank=8, train_mlp=False), LoraSpec(rank=8, rank_pattern={"q_proj": 4})]
    assert [group.host_bytes_of(spec) for spec in others] == [4000] * 3
    assert rank.asked[1:] == others


@pytest.mark.parametrize("train_unembed", [False, True])
def test_the_first_adapter_of_a_shape_is_priced_before_it_is_accepted(watch, train_unembed):
    rank = PricedRank(1000)
    memory = AdapterMemory(TrainerGroup([rank, None, None, None], watch), limit=1_000_000)
    spec = LoraSpec(rank=8, train_unembed=train_unembed)
    assert memory.growth(asyncio.run(memory.size_of(spec))) == 4000
    assert rank.asked == [spec]


@dataclass
class ScriptedBoard:
    """Stands for the actor to which ranks report: a function of the time returns the report of each."""

    clock: ScriptedRay
    script: Sequence[Callable[[float], LoadReport | None]]

    @property
    def reports(self) -> "ScriptedBoard":
        return self

    def remote(self) -> Call:
        said = {rank: report(self.clock.now) for rank, report in enumerate(self.script)}
        return Call({rank: report for rank, report in said.items() if report is not None})


def reads(until: float = inf, *, reports_until: float = inf, waits: bool = False) -> Callable[[float], LoadReport]:
    """Return the reports of a rank that gets further until one time, and reports until another."""

    def report(now: float) -> LoadReport:
        files = int(min(now, until, reports_until))
        return LoadReport(int(min(now, reports_until)), files, f"reading, {files} of 900 files", "weights.py:7", waits)

    return report


@pytest.fixture
def launch(scripted: ScriptedRay) -> GroupLaunch:
    """A launch whose ranks have started. Nothing may stand still for longer than 600 seconds."""
    launch = GroupLaunch("a-model", MESH, 600.0)
    launch.start([Call(RankPlace(f"host-{rank}", 29_500 + rank, None)) for rank in range(4)], lambda: "few CPUs")
    return launch


def test_launch_says_which_ranks_are_up_and_which_one_failed(launch, scripted, caplog):
    board = ScriptedBoard(scripted, [reads()] * 4)

    def load(calls: Sequence[Call]) -> list[Any]:
        return launch.load(calls, "load", board, progress_counts=True)

    assert launch.meeting_place == ("host-0", 29_500)
    loading = [Call("facts", 10.0), Call("facts", 100.0), Call("facts", 5.0), Call("facts", 5.0)]
    assert load(loading) == ["facts"] * 4
    waits = "a-model: waiting since 40 s for ranks to load: rank 1 (dp 0, tp 1); ready: rank 0 (dp 0, tp 0), rank 2"
    assert waits in caplog.text
    assert "rank 1 (dp 0, tp 1) on host-1: reading, 40 of 900 files (at weights.py:7)" in caplog.text
    failed = [Call("facts", inf), Call(FAILED), Call("facts", inf), Call("facts", inf)]
    message = r"^rank 1 \(dp 0, tp 1\) on host-1 of the 4 processes of a-model could not load: UserError: no$"
    with pytest.raises(TwinkleServerError, match=message):
        load(failed)
    lost = [Call(BROKEN), Call(BROKEN, 0.1), Call("facts", inf), Call(RayError("killed\nby the kernel"), 1.0)]
    for call in lost:
        call.at += scripted.now
    with pytest.raises(TwinkleServerError, match=r"^rank 3 .* could not load: RayError: killed by the kernel$"):
        load(lost)
    bug = Failure(RuntimeError("Traceback (most recent call last):\n  File …\nValueError: a bug\n"))
    with pytest.raises(TwinkleServerError, match=r"^rank 0 .* could not load: ValueError: a bug$"):
        load([Call(bug), *failed[2:]])


def test_launch_waits_for_ranks_as_long_as_one_gets_further(launch, scripted):
    board = ScriptedBoard(scripted, [reads(10.0, waits=True), reads(), reads(10.0, waits=True), reads()])
    loading = [Call("facts", 9000.0), Call("facts", 9000.0), Call("facts", 9000.0), Call("facts", 20.0)]
    assert launch.load(loading, "load", board, progress_counts=True) == ["facts"] * 4


def test_a_rank_that_gets_no_further_while_it_loads_is_named_and_not_those_that_wait_for_it(launch, scripted, caplog):
    board = ScriptedBoard(scripted, [reads(10.0, waits=True), reads(70.0), reads(10.0, waits=True), reads()])
    loading = [Call("facts", inf), Call("facts", inf), Call("facts", inf), Call("facts", 20.0)]
    message = (
        r"^rank 1 \(dp 0, tp 1\) on host-1 of the 4 processes of a-model hangs and could not load: it has got no "
        r"further for 600 s, and no other rank has lately; it says: reading, 70 of 900 files \(at weights.py:7\) "
        r"\(group_load_timeout_seconds: 600\)$"
    )
    with pytest.raises(TwinkleServerError, match=message):
        launch.load(loading, "load", board, progress_counts=True)
    assert 670 <= scripted.now <= 680
    assert "rank 0 (dp 0, tp 0) on host-0, while a rank hangs: reading, 10 of 900 files" in caplog.text
    assert "waiting for other ranks)" in caplog.text


def test_a_rank_that_gives_no_sign_of_life_is_found_also_while_files_are_downloaded(launch, scripted):
    board = ScriptedBoard(scripted, [reads(10.0), reads(10.0), reads(reports_until=70.0), lambda _now: None])
    finding = [Call(None, 5000.0), Call(None, 5000.0), Call(None, inf), Call(None, 30.0)]
    message = (
        r"^rank 2 .* on host-2 .* could not find files: it has given no sign of life for 600 s; before, it said: rea"
    )
    with pytest.raises(TwinkleServerError, match=message):
        launch.load(finding, "find files", board, progress_counts=False)
    board = ScriptedBoard(scripted, [reads(10.0)] * 4)
    finding = [Call(None, scripted.now + 5000.0)] * 4
    assert launch.load(finding[:1], "find files", board, progress_counts=False) == [None]
    assert scripted.now > 5000
    silent = ScriptedBoard(scripted, [reads(), reads(), reads(), lambda _now: None])
    with pytest.raises(TwinkleServerError, match=r"^rank 3 .* no sign of life for 600 s \(group_load"):
        launch.load([Call(None, inf) for _ in range(4)], "load", silent, progress_counts=True)


def test_seconds_in_which_the_replica_was_stopped_do_not_count_while_it_loads(launch, scripted):
    def be_stopped_for_an_hour() -> None:
        scripted.at_times.clear()
        scripted.now += 3600.0

    scripted.at_times.append((5.0, be_stopped_for_an_hour))
    board = ScriptedBoard(scripted, [reads(1.0, reports_until=1.0)] * 4)  # stopped, too
    loading = [Call("facts", 4000.0) for _ in range(4)]
    assert launch.load(loading, "load", board, progress_counts=True) == ["facts"] * 4


class CollectingBoard:
    """Stands for the actor to which ranks report, and lets a test wait for reports."""

    def __init__(self) -> None:
        self.put = self
        self.collected: list[LoadReport] = []
        self._came = threading.Semaphore(0)

    def remote(self, rank: int, report: LoadReport) -> None:
        assert rank == 3
        self.collected.append(report)
        self._came.release()

    def wait(self) -> None:
        for _ in range(2):  # the first may have been made before
            assert self._came.acquire(timeout=30)


def test_a_rank_reports_what_it_does_and_where_it_is(monkeypatch):
    modules = len(sys.modules)
    board = CollectingBoard()
    wait_for_others = compile("wait()", "/site-packages/torch/distributed/distributed_c10d.py", "exec")

    def weights() -> Iterator[int]:
        yield 1
        board.wait()  # called by a line of Twinkle's
        monkeypatch.setitem(sys.modules, "a module that was imported", sys)
        board.wait()
        yield 2
        exec(wait_for_others, {"wait": board.wait})

    with LoadReporter(board, 3, seconds=0.01).reporting(), Progress("loading") as progress:
        assert list(progress.count(weights(), "weights", 3)) == [1, 2]
    reports = board.collected
    assert [report.number for report in reports] == list(range(1, len(reports) + 1))
    found = {
        (report.changes - modules, report.doing, report.line.partition(":")[0], report.waits) for report in reports
    }
    assert (2, "loading: 1 of 3 weights", "utils/progress.py", False) in found
    assert (3, "loading: 1 of 3 weights", "utils/progress.py", False) in found
    assert (4, "loading: 2 of 3 weights", "utils/progress.py", True) in found
