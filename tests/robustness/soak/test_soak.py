"""Hours of mixed load in minutes: many sessions, expiries, saves, deletes and kills. Nothing leaks, nothing is lost.

A real server with a tiny model serves tenants of all protocols that come and go. Its times are shortened: a session
expires after 25 s of silence instead of half an hour, a parked adapter after 15 s instead of a week. In the first part
the server is killed again and again. In the second it is left alone, so that the memory of one process can be observed.
Then all tenants leave, everything expires, and the server must be back at its initial state.

``SOAK_MINUTES`` is the time during which tenants come (20), ``SOAK_SEED`` chooses other lives. The measurements go to
build/soak.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.robustness.soak.crowd import Crowd, Trained, directory_of, distance, report_of, start_client, step_count
from tests.robustness.soak.curves import draw
from tests.robustness.soak.measuring import Measurements, Row, slope, write_csv
from tests.robustness.soak.soak_tenants import MODEL, Heartbeats, Life, Report
from tests.support.paths import ROOT
from tests.support.servers.running import Server, environment, torch_config

MINUTES = float(os.environ.get("SOAK_MINUTES") or 20)
SEED = int(os.environ.get("SOAK_SEED") or time.time())
OUTPUT = ROOT / "build" / "soak"
DISTURBED = 0.4  # share of the time
RAW, PROCESSES = 6, 2
LIMITS = {
    "session_timeout_seconds": 25.0,
    "parked_adapter_seconds": 15.0,
    "result_retention_seconds": 10.0,
    "unfetched_result_seconds": 60.0,
    "sampler_version_retention_seconds": 10.0,
}
AT_REST = 200.0  # seconds in which everything must expire after the last tenant has left
# These counts must then be zero. Threads, files and memory are compared with a fresh server.
NOTHING = (
    "adapters",
    "trainer_adapters",
    "resident_adapters",
    "pool_versions",
    "slots",
    "scheduled_adapters",
    "native_adapters",
    "runner_tasks",
    "snapshots_changed",
    "training_promises",
    "versions",
    "version_pins",
    "sampling_promises",
    "sampling_jobs",
    "sampling_numbers",
    "completion_streams",
    "sampling_sessions_cached",
    "sampling_clients",
    "tenants_unfetched",
    "heartbeats",
    "processor_sessions",
    "processor_workers",
    "children",
    "snapshots_files",
    "checkpoints_files",
    "samplers_files",
    "processors_files",
    "checkpoints_directories",
    "samplers_directories",
    "snapshots_directories",
)
JOURNAL_MIB = 0.2  # the two open segments of 64 KiB, and a blob that no longer fits
DATABASE_KIB_PER_LIFE = 4.0  # records of sessions and runs stay
DATABASE_LOG_MIB = 65.0  # SQLite restarts its log at 16384 pages of 4 KiB
MORE_FILES = 12  # beyond those of a server without requests: kept connections, the database's files
MEMORY_SHARE = 0.05  # share of its memory by which a server may grow in the last third of the load
TOLERANCE = 1e-5

pytestmark = pytest.mark.soak


class WatchedServer(Server):
    """A server whose process writes its internal counts to ``probe``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.probe = directory / "probe.json"
        super().__init__(directory, {"runtime": "embedded", **torch_config(MODEL), "limits": LIMITS})

    def command(self, *arguments: str) -> list[str]:
        launcher = Path(__file__).with_name("watched_launch.py")
        return [sys.executable, str(launcher), str(self.probe), "--", *arguments]

    def pid(self) -> int | None:
        return None if self.process is None or self.process.poll() is not None else self.process.pid


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, environment()[name])


def test_soak(tmp_path: Path) -> None:
    print(f"\n{MINUTES:g} minutes of tenants on {MODEL}, seed {SEED}", flush=True)
    chance = random.Random(SEED)
    server = WatchedServer(tmp_path / "soak")
    server.start()
    measured = Measurements(server.data_dir, server.probe, server.pid)
    measured.start()
    crowd = Crowd(server.url, server.data_dir, raw=RAW, processes=PROCESSES, seed=SEED % 10**6 * 1000)
    try:
        fresh = when(measured.now, server)
        crowd.start()
        started = time.monotonic()
        kills = disturb(server, crowd, chance, measured, until=started + 60 * MINUTES * DISTURBED)
        measured.phase = 1
        undisturbed = measured.rows[-1]["seconds"]
        last_start = time.monotonic()
        while time.monotonic() < started + 60 * MINUTES and not crowd.errors:
            assert server.pid() is not None, server.log()
            time.sleep(0.5)
        crowd.finish()
        raise_first(crowd.errors)
        measured.phase = 2
        leaving = measured.rows[-1]["seconds"]
        print(f"  lives: {dict(crowd.lives)}; {crowd.requests} plain requests, {crowd.steps} steps, {len(kills)} kills")
        rest = wait_for_rest(measured)
        print(f"  at rest after {time.monotonic() - last_start:.0f} s of one process", flush=True)
        rows = list(measured.rows)
        assert server.stop() == 0
    finally:
        measured.end()
        server.close()
        if measured.rows:
            write_csv(measured.rows, OUTPUT / "soak.csv")
    draw(rows, kills, [(0, "kills"), (undisturbed, "no kills"), (leaving, "all leave")], OUTPUT / "soak.svg")
    check_rest(rest, fresh, sum(crowd.lives.values()))
    check_memory([row for row in rows if row["phase"] == 1])
    assert "Traceback" not in server.log(), server.log()
    compare_with_quiet_server(tmp_path / "quiet", crowd.trained)


# --- the phases -------------------------------------------------------------------------------------------------------


def disturb(
    server: WatchedServer, crowd: Crowd, chance: random.Random, measured: Measurements, until: float
) -> list[float]:
    """Kill the server, mostly without warning; return the times of the kills."""
    kills = []
    while True:
        pause = time.monotonic() + chance.uniform(5, 30)
        while time.monotonic() < min(pause, until) and not crowd.errors:
            time.sleep(0.2)
        if time.monotonic() >= until or crowd.errors:
            return kills
        if chance.random() < 0.75:
            server.kill()
        else:
            assert server.stop() == 0, server.log()
        kills.append(time.monotonic() - measured.began)
        server.start()


def when(condition: Callable[[], Row | None], server: Server, seconds: float = 60.0) -> Row:
    deadline = time.monotonic() + seconds
    while (found := condition()) is None:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
    return found


def wait_for_rest(measured: Measurements) -> Row:
    """Return the first measurement with nothing left, or the last one."""
    deadline = time.monotonic() + AT_REST
    while time.monotonic() < deadline:
        row = measured.now()
        if row is not None and not left_over(row) and row["journal_mib"] <= JOURNAL_MIB:
            break
        time.sleep(1.0)
    time.sleep(2.0)
    return measured.rows[-1]


def raise_first(errors: list[BaseException]) -> None:
    if errors:
        raise AssertionError("a tenant saw what it must not see") from errors[0]


# --- the checks -------------------------------------------------------------------------------------------------------


def left_over(row: Row) -> dict[str, float]:
    return {name: row[name] for name in NOTHING if row[name]}


def check_rest(rest: Row, fresh: Row, lives: int) -> None:
    shown = ("open_files", "threads", "rss_mib", "python_blocks", "journal_mib", "database_mib", "disk_mib")
    print("  fresh  ", {name: round(fresh[name], 2) for name in shown})
    print("  at rest", {name: round(rest[name], 2) for name in shown})
    assert left_over(rest) == {}
    assert rest["journal_mib"] <= JOURNAL_MIB
    assert rest["database_mib"] <= 1 + fresh["database_mib"] + lives * DATABASE_KIB_PER_LIFE / 1024
    assert rest["database_log_mib"] <= DATABASE_LOG_MIB
    assert rest["open_files"] <= fresh["open_files"] + MORE_FILES


def check_memory(rows: list[Row]) -> None:
    """Check the growth of the undisturbed process in the last third of the load. By then all shapes have occurred."""
    last = rows[len(rows) * 2 // 3 :]
    for name in ("rss_mib", "python_blocks", "open_files", "threads", "disk_mib"):
        growth = slope(last, name)
        print(f"  {name}: {last[0][name]:.1f} → {last[-1][name]:.1f} in the last third, {growth:+.2f} a minute")
    minutes = (last[-1]["seconds"] - last[0]["seconds"]) / 60
    assert slope(last, "rss_mib") * minutes <= MEMORY_SHARE * last[0]["rss_mib"]


def compare_with_quiet_server(directory: Path, trained: list[Trained]) -> None:
    """Run each life again, alone: it must have the same steps and the same weights."""
    quiet = WatchedServer(directory)
    quiet.start()
    try:
        for one in trained:
            again = live_again(one.report, quiet.url)
            assert again.final is not None
            saved = directory_of(quiet.data_dir, again.final)
            assert step_count(saved) == one.report.steps
            apart = distance(one.weights, load_file(saved / "adapter_model.safetensors"))
            print(f"  {one.report.how} {one.report.number}: {one.report.steps} steps, {apart:.1e} apart")
            assert apart <= TOLERANCE
    finally:
        quiet.close()
    assert {one.report.how for one in trained} == {"raw", "sdk", "native"}


def live_again(report: Report, url: str) -> Report:
    if report.how == "raw":
        beats = Heartbeats(url)
        beats.start()
        again = Life(report.number, url, beats).run()
        beats.end()
        return again
    process = start_client(report.how, report.number, url)
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    return report_of(said)
