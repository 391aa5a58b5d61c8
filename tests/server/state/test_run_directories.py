"""Every run has its own directories, whatever its id looks like; those of earlier versions are still found."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.postgres_cluster import cluster_url
from tests.support.servers.running import MODEL, Server, Tenant, datum
from tests.support.servers.state_samples import change_rows
from twinkle.server.ids import directory_name, native_run_id, run_id, sampling_session_id
from twinkle.server.state.files.data_dir import DataDir

ROW = [datum(range(8))]
BEARER = {"Authorization": "Bearer tml-upgraded"}
SESSION = "session_" + "0" * 32


def test_runs_of_both_protocols_have_names_of_their_own() -> None:
    assert directory_name(run_id(SESSION, 0)) != directory_name(native_run_id(SESSION, "train-0"))
    assert directory_name("s-1:train:0") == "s-1-train-0"  # unchanged, because it is unambiguous
    assert directory_name(native_run_id(SESSION, "a")) == f"{SESSION}-a"


_sessions = st.sampled_from([SESSION, f"s-{'0' * 32}", f"s-{'0' * 31}1", "s", "s-train", "s-train-1", "s-sample-1"])
_numbers = st.integers(0, 12)
_ids = st.one_of(
    st.builds(run_id, _sessions, _numbers),
    st.builds(sampling_session_id, _sessions, _numbers),
    st.builds(native_run_id, st.just(SESSION), st.sampled_from(["a", "train-0", "train-1", "sample-1", "a.b"])),
)


@settings(deadline=None)
@given(_ids, _ids)
def test_no_two_ids_share_a_directory(one: str, other: str) -> None:
    assert (directory_name(one) == directory_name(other)) == (one == other)
    assert one == other or directory_name(one) != other.replace(":", "-")  # the name in earlier versions
    assert "/" not in directory_name(one)


def test_snapshots_of_one_run_leave_those_of_another_alone(tmp_path: Path) -> None:
    files = DataDir(tmp_path)
    mine, other = files.snapshot(run_id(SESSION, 0), 1), files.snapshot(native_run_id(SESSION, "train-0"), 1)
    old = tmp_path / "snapshots" / f"{SESSION}-train-0" / "1-abcd"
    another_old = old.with_name("2-abcd")  # of the other run, in the directory that both shared
    for directory in (mine, other, old, another_old):
        directory.mkdir(parents=True)
    files.remove_older_snapshots(mine, files.relative(old))
    assert [each.exists() for each in (mine, other, old, another_old)] == [True, True, False, True]
    files.remove_snapshots(native_run_id(SESSION, "train-0"), files.relative(another_old))
    assert [each.exists() for each in (mine, other, old.parent)] == [True, False, False]


def test_two_runs_whose_names_are_alike_survive_a_restart(own_server: Callable[..., Server]) -> None:
    server = own_server(snapshot=0.1)
    native, tenant = NativeTenant(server.url, "tml-both", MODEL), Tenant(server.url, "tml-both")
    native.add_adapter("train-0", seed=1)
    native.verb("set_optimizer", adapter_name="train-0", optimizer_cls="AdamW", lr=0.05)
    model = tenant.model(native.session_id, 0, rank=16)
    for seq in (1, 3):
        tenant.forward_backward(model, seq)
        tenant.json(tenant.optim_step(model, seq + 1))
        native.verb("forward_backward", adapter_name="train-0", inputs=[{"input_ids": [1, 2, 3], "labels": [2, 3, 4]}])
        native.verb("clip_grad_and_step", adapter_name="train-0")
    state = native.verb("get_state_dict", adapter_name="train-0")
    loss = tenant.loss(tenant.forward_backward(model, 5, ROW, forward_only=True))
    assert server.stop() == 0  # writes a snapshot of each run
    server.start()
    assert native.verb("get_state_dict", adapter_name="train-0") == state
    assert tenant.loss(tenant.forward_backward(model, 6, ROW, forward_only=True)) == loss


@pytest.mark.skipif(cluster_url() is not None, reason="the records are changed by hand, in SQLite's file")
def test_directories_of_an_earlier_version_are_found(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant = Tenant(server.url, "tml-upgraded")
    native = httpx.post(f"{server.url}/api/v1/twinkle/create_session", json={}, headers=BEARER, trust_env=False)
    model = tenant.model(native.json()["session_id"])
    tenant.forward_backward(model, 1)
    tenant.optim_step(model, 2)
    path = tenant.json(tenant.save(model, 3, "ck"))["path"]
    loss = tenant.loss(tenant.forward_backward(model, 4, ROW, forward_only=True))
    assert server.stop() == 0
    new, old = directory_name(model), model.replace(":", "-")
    for place in ("snapshots", "checkpoints"):
        (server.data_dir / place / new).rename(server.data_dir / place / old)
        change = f"UPDATE {place} SET directory = replace(directory, ?, ?)"
        change_rows(server.data_dir / "state.db", place, change, (new, old))
    server.start()
    assert tenant.loss(tenant.forward_backward(model, 5, ROW, forward_only=True)) == loss
    other = tenant.model()
    tenant.json(tenant.load(other, 1, path))
    assert tenant.loss(tenant.forward_backward(other, 2, ROW, forward_only=True)) == loss
    tenant.forward_backward(model, 6)
    tenant.json(tenant.optim_step(model, 7))
    run, _, name = path.removeprefix("tinker://").partition("/")
    assert tenant.http.delete(f"training_runs/{run}/checkpoints/{name}").status_code == 200
    assert server.stop() == 0
    assert sorted(each.name for each in (server.data_dir / "snapshots").iterdir()) == sorted(
        [new, directory_name(other)]
    )
    assert not list((server.data_dir / "checkpoints" / old).rglob("adapter*"))
    server.start()
    assert tenant.loss(tenant.forward_backward(model, 8, ROW, forward_only=True)) != loss  # the step was kept
