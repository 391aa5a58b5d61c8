"""What operators do while a server runs: usage, eviction, backups; and what Tinker's command line shows."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import (
    MODEL,
    Server,
    Tenant,
    environment,
    key_for,
    mock_config,
    sample_body,
    training_request,
)
from twinkle.server.cli import command_line
from twinkle.server.wire import tinker_pb2 as pb


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs maintenance all the time."""
    server = Server(tmp_path_factory.mktemp("watched"), housekeeping=0.1, snapshot=0.05, **{"pass": 0.005}).start()
    yield server
    server.close()


@pytest.fixture
def user(watched: Server, request: pytest.FixtureRequest) -> Tenant:
    return Tenant(watched.url, key_for(request.node.nodeid))


def command(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked([*arguments, "-c", str(server.directory / "config.yaml")], environment())


def told_by(capsys: pytest.CaptureFixture[str], server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do the same as :func:`command` in this process, which is faster."""
    code = command_line.main([*arguments, "-c", str(server.directory / "config.yaml")])
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())


def owner(tenant: Tenant, model: str) -> str:
    return str(tenant.get(f"training_runs/{model}").json()["model_owner"])


def train(tenant: Tenant, model: str, first: int, steps: int) -> list[float]:
    """Train this many steps of two sequence numbers each, and return the losses."""
    losses = []
    for seq in range(first, first + 2 * steps, 2):
        losses.append(tenant.loss(tenant.forward_backward(model, seq)))
        tenant.json(tenant.optim_step(model, seq + 1))
    return losses


# --- usage ------------------------------------------------------------------------------------------------------------


def used(server: Server, tenant_id: str) -> dict[str, int]:
    listed = command(server, "usage", "--tenant", tenant_id, "--json")
    assert listed.returncode == 0, listed
    rows = json.loads(listed.stdout)
    assert len(rows) <= 1
    return rows[0] if rows else {}


def test_usage_counts_what_ended_well(watched: Server, user: Tenant) -> None:
    model = user.model()
    train(user, model, 1, 3)  # five tokens each
    assert "nonsense" in user.error(user.forward_backward(model, 7, loss="nonsense"))
    sampler = user.json(user.publish(model, 8))["sampling_session_id"]
    body = sample_body(sampler, 0, num_samples=2)
    sampled = pb.SampleResponse.FromString(user.result(user.submit("asample", body)))
    tokens = sum(len(sequence.tokens) // 4 for sequence in sampled.sequences)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    told = user.http.post("chat/completions", json=chat).json()["usage"]
    expected = {
        "trained_tokens": 15,
        "sampled_tokens": tokens + told["completion_tokens"],
        "prompt_tokens": 3 + told["prompt_tokens"],
        "optim_steps": 3,
        "requests": 1 + 6 + 1 + 1 + 1,
    }
    deadline = time.monotonic() + 60
    while {name: number for name, number in used(watched, owner(user, model)).items() if name in expected} != expected:
        assert time.monotonic() < deadline, used(watched, owner(user, model))
    table = command(watched, "usage", "--by-day").stdout.splitlines()
    assert table[0].split()[:2] == ["day", "tenant"]
    assert any(owner(user, model) in line for line in table[1:])
    (today,) = json.loads(command(watched, "usage", "--by-day", "--tenant", owner(user, model), "--json").stdout)
    assert {name: today[name] for name in expected} == expected
    assert command(watched, "usage", "--until", "2001-01-01").stdout == "no usage from 2000-12-02 to 2001-01-01\n"
    assert "a day such as" in command(watched, "usage", "--since", "yesterday").stderr


def tinker_cli(server: Server, tenant: Tenant, *arguments: str) -> str:
    environ = {**environment(), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": tenant.key, "COLUMNS": "300"}
    run = [str(Path(sys.executable).with_name("tinker")), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done
    return done.stdout


def test_tinkers_command_line_shows_usage_and_storage(watched: Server, user: Tenant) -> None:
    model = user.model()
    train(user, model, 1, 2)
    user.json(user.save(model, 5, "kept"))
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    window = [(today + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ") for days in (-1, 2)]
    usage = user.get("billing/usage/events", starting_on=window[0], ending_before=window[1]).json()
    trained = [each for each in usage["data"] if each["event_info"]["type"] == "training"]
    assert sum(each["event_info"]["token_count"] for each in trained) == 10
    table = tinker_cli(watched, user, "billing", "usage", *window)
    assert "training" in table
    assert " 10 " in table
    stored = json.loads(tinker_cli(watched, user, "-f", "json", "billing", "checkpoint-storage"))
    (kept,) = user.get("checkpoints").json()["checkpoints"]
    assert [(each["checkpoint_count"], each["size_bytes"]) for each in stored["data"]] == [(1, kept["size_bytes"])]


def test_a_window_must_be_one(user: Tenant) -> None:
    for query in (
        {"starting_on": "2026-01-02T00:00:00Z", "ending_before": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-02T00:00:00Z", "ending_before": "2036-01-01T00:00:00Z"},
        {"starting_on": "soon", "ending_before": "2036-01-01T00:00:00Z"},
        {"starting_on": "0001-01-01T00:00:00+23:00", "ending_before": "0001-01-01T00:00:00Z"},
    ):
        answer = user.get("billing/usage/events", **query)
        assert answer.status_code == 400, answer.text
        assert "allowed" in answer.json()["detail"]


# --- evict ------------------------------------------------------------------------------------------------------------


def test_an_evicted_adapter_goes_on_from_its_checkpoint(watched: Server, user: Tenant) -> None:
    model, same = user.model(), user.model()
    train(user, model, 1, 3)
    undisturbed = train(user, same, 1, 5)[3:]
    evicted = command(watched, "evict", model)
    assert evicted.returncode == 0, evicted
    assert "was evicted by the operator" in evicted.stdout
    assert "weights/parked" in user.error(user.forward_backward(model, 7))
    again = user.model()
    user.json(user.load(again, 1, f"tinker://{model}/weights/parked"))
    # The rows of a step depend on its number, so these are the same rows again.
    losses = []
    for seq in (7, 9):
        request = user.submit("forward_backward", _renumbered(again, seq, seq - 5))
        losses.append(user.loss(request))
        user.json(user.optim_step(again, seq - 4))
    assert losses == undisturbed
    twice = command(watched, "evict", model)
    assert twice.returncode == 1
    assert "unknown model that is live here" in twice.stderr
    both = command(watched, "evict", "--tenant", owner(user, same))
    assert both.returncode == 0, both
    assert same in both.stdout
    assert again in both.stdout
    again = command(watched, "evict", "--tenant", owner(user, same))
    assert (again.returncode, again.stdout) == (1, "")
    assert "has no live run" in again.stderr


# --- names ------------------------------------------------------------------------------------------------------------


def test_tenants_and_runs_are_known_by_their_names(
    watched: Server, user: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands take the name of a tenant or a run where they take its id, and show both."""
    model = user.model(user_metadata={"name": "first try"})
    train(user, model, 1, 2)
    unnamed, tenant_id = user.model(), owner(user, model)
    assert told_by(capsys, watched, "rename-tenant", tenant_id, "team a").returncode == 0
    (run, other) = json.loads(told_by(capsys, watched, "runs", "--tenant", "team a", "--json").stdout)
    assert {run["run_id"]: run["name"], other["run_id"]: other["name"]} == {model: "first try", unnamed: ""}
    assert {run["tenant"], other["tenant"]} == {"team a"}
    assert {run["state"], other["state"]} == {"live"}
    table = told_by(capsys, watched, "runs", "--tenant", tenant_id).stdout.splitlines()
    assert table[0].split() == ["run", "name", "tenant", "base", "model", "rank", "state", "last", "request"]
    assert any(line.split()[:5] == [model, "first", "try", "team", "a"] for line in table)
    deadline = time.monotonic() + 60
    while not (rows := json.loads(told_by(capsys, watched, "usage", "--tenant", "team a", "--json").stdout)):
        assert time.monotonic() < deadline
    assert (rows[0]["tenant"], rows[0]["tenant_id"]) == ("team a", tenant_id)
    (about,) = json.loads(told_by(capsys, watched, "tenants", "team a", "--json").stdout)
    assert (about["tenant_id"], about["adapters"], about["keys"]) == (tenant_id, 2, 0)
    assert "team a" in told_by(capsys, watched, "tenants").stdout
    evicted = told_by(capsys, watched, "evict", "first try", "--tenant", "team a", "--json")
    assert [(each["run_id"], each["evicted"]) for each in json.loads(evicted.stdout)] == [(model, True)]
    (parked,) = json.loads(told_by(capsys, watched, "runs", "--tenant", "team a", "--state", "parked", "--json").stdout)
    assert parked["run_id"] == model
    one = told_by(capsys, watched, "runs", "--tenant", "team a", "--limit", "1", "--json")
    assert len(json.loads(one.stdout)) == 1
    assert "1 more runs" in one.stderr


def test_unknown_names_are_refused(watched: Server, user: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    tenant_id = owner(user, user.model(user_metadata={"name": "twice"}))
    assert told_by(capsys, watched, "rename-tenant", tenant_id, "charlotte").returncode == 0
    for arguments in (
        ("usage", "--tenant", "charlote"),
        ("runs", "--tenant", "charlote"),
        ("tenants", "charlote"),
        ("evict", "--tenant", "charlote"),
        ("keys", "create", "--tenant", "charlote"),
        ("keys", "list", "--tenant", "charlote"),
        ("keys", "revoke", "--tenant", "charlote"),
        ("rename-tenant", "charlote", "carla"),
    ):
        refused = told_by(capsys, watched, *arguments)
        assert (refused.returncode, refused.stdout) == (1, ""), arguments
        assert "unknown tenant 'charlote'; known: charlotte" in refused.stderr, arguments
    user.model(user_metadata={"name": "twice"})
    for name, told in (
        ("twice", "one of the 2 live runs of this name: "),
        ("twicd", "unknown live run 'twicd'; known:"),
    ):
        refused = told_by(capsys, watched, "evict", name, "--tenant", "charlotte")
        assert refused.returncode == 1
        assert told in refused.stderr
    assert told_by(capsys, watched, "evict").returncode == 2


def test_a_name_cannot_control_the_terminal_of_the_operator(
    watched: Server, user: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant_id = owner(user, user.model(user_metadata={"name": "a\x1b[2Jb\nc\u202e" + "d" * 500}))
    table = told_by(capsys, watched, "runs", "--tenant", tenant_id).stdout
    assert len(table.splitlines()) == 2
    assert "a?[2Jb?c?dddd" in table
    assert "d" * 100 not in table
    refused = told_by(capsys, watched, "evict", "a", "--tenant", tenant_id)
    assert "\x1b" not in refused.stderr
    assert "unknown live run 'a'; known: a?[2Jb?c?d" in refused.stderr


@pytest.mark.parametrize("arguments", [["usage"], ["runs"], ["tenants"], ["keys", "list"], ["evict", "r"]])
def test_a_mistyped_directory_is_no_idle_server(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([*arguments, "--data-dir", str(tmp_path / "typo")]) == 1
    assert f"no server has kept its state in {tmp_path / 'typo'}" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def _renumbered(model: str, rows_of: int, seq: int) -> bytes:
    request = training_request(model, rows_of)
    request.seq_id = seq
    return request.SerializeToString()


# --- backup and restore -----------------------------------------------------------------------------------------------


def test_a_backup_of_a_server_at_work_goes_on_elsewhere(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """Training continues while the copy is made. The copy continues with the same ids and gets the same numbers."""
    server = own_server(housekeeping=0.1, snapshot=0.05, **{"pass": 0.005})
    user = Tenant(server.url, "tml-user")
    model = user.model()
    sampler = user.json(user.publish(model, 1))["sampling_session_id"]
    before = user.tokens(user.sample(sampler))
    saved = user.json(user.save(model, 2, "kept"))["path"]
    losses: dict[int, float] = {}
    done = threading.Event()

    def work() -> None:
        tenant = Tenant(server.url, "tml-user")
        for seq in range(3, 10_000, 2):
            (losses[seq],) = train(tenant, model, seq, 1)
            if done.is_set():
                return

    worker = threading.Thread(target=work)
    worker.start()
    try:
        while len(losses) < 5:
            time.sleep(0.01)
        backups = [tmp_path / f"backup{number}" for number in range(4)]
        for backup in backups:  # at different moments between snapshots, pruning and steps
            made = command(server, "backup", str(backup))
            assert made.returncode == 0, made
            assert "files" in made.stdout
    finally:
        done.set()
        worker.join()
    assert not list(server.data_dir.glob(".backup-*"))
    refused = command(server, "backup", str(backups[3]))
    assert refused.returncode == 1
    assert "is not empty" in refused.stderr
    server.stop()

    assert "is not empty" in command(server, "restore", str(backups[0])).stderr
    for backup in (backups[1], backups[3]):
        copy = Server(_directory(tmp_path / f"of {backup.name}"), housekeeping=0.1, snapshot=0.05)
        try:
            assert command(copy, "restore", str(backup)).returncode == 0
            copy.start()
            _goes_on(Tenant(copy.url, "tml-user"), model, losses)
            again = Tenant(copy.url, "tml-user")
            assert again.tokens(again.sample(sampler, 1)) == before
            assert again.json(again.load(again.model(), 1, saved))
        finally:
            copy.close()


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _goes_on(user: Tenant, model: str, losses: dict[int, float]) -> None:
    """Check that everything acknowledged before the copy is there, and that the rest gives the same results."""
    last = max(losses)
    assert len(losses) >= 5
    for seq in range(3, last + 1, 2):  # finished ops answer as before, later ones run now
        assert user.loss(user.forward_backward(model, seq)) == losses[seq]
        user.json(user.optim_step(model, seq + 1))


def test_what_is_no_backup_is_not_restored(tmp_path: Path) -> None:
    server = Server(_directory(tmp_path / "server"))
    nothing = command(server, "backup", str(tmp_path / "b"))
    assert nothing.returncode == 1
    assert "no server has kept its state" in nothing.stderr
    unfinished = command(server, "restore", str(_directory(tmp_path / "unfinished")))
    assert unfinished.returncode == 1
    assert "no backup.json" in unfinished.stderr


@pytest.mark.parametrize("installed", [False, True])
def test_a_backup_of_a_database_that_does_not_answer(tmp_path: Path, installed: bool) -> None:
    if installed and shutil.which("pg_dump") is None:
        pytest.skip("needs pg_dump, of Debian's package postgresql-client")
    url = "postgresql://me:hush@127.0.0.1:9/db"  # nothing listens there
    server = Server(tmp_path, mock_config(persistence={"url": url}))
    variables = environment() if installed else {**environment(), "PATH": ""}
    refused = run_forked(["backup", str(tmp_path / "b"), "-c", str(server.directory / "config.yaml")], variables)
    assert refused.returncode == 1
    assert ("127.0.0.1" if installed else "pg_dump is not installed") in refused.stderr
    assert "hush" not in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "b").exists()
