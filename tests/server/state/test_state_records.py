"""Sessions, runs, checkpoints, sampling sessions and snapshots: round trips, order, idempotency."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.servers.state_samples import (
    begin,
    checkpoint,
    integrity_error,
    opened,
    run,
    sampling_session,
    session,
    with_store,
)
from twinkle.model.types import LoraSpec
from twinkle.server.state.database.database import Page
from twinkle.server.state.errors import CheckpointExistsError
from twinkle.server.state.store import Store
from twinkle.server.types import SnapshotRecord

pytestmark = pytest.mark.usefixtures("backend")


def test_every_record_comes_back_as_it_was_also_after_reopening(tmp_path):
    full_session = session(
        last_seen=123.5,
        sdk_version="0.36.0",
        display_name="Größe ✓",
        project_id="p1",
        tags=("a", "b"),
        user_metadata={"nested": {"n": [1, 2.5, None, True]}},
    )
    spec = LoraSpec(16, alpha=8.0, seed=3, train_mlp=False, train_unembed=True, target_modules=("q_proj", "v_proj"))
    full_run = run(spec=spec, user_metadata={"renderer_name": "llama3"}, state="parked", note="resume from x")
    all_linear = run(2, spec=LoraSpec(8, target_modules="all-linear"))
    full_checkpoint = checkpoint(expires_at=999.25, public=True, user_metadata={"step": "10"})
    full_sampling = sampling_session(model_path="tinker://x", version_id="v1", directory="versions/v1")
    snapshot = SnapshotRecord("s1:train:1", 12, "snapshots/12", failed_seq=11, taken_at=5.5)

    async def write(store: Store):
        assert await store.sessions.create(full_session) == full_session
        assert await store.runs.add(full_run) == full_run
        await store.runs.add(all_linear)
        assert await store.checkpoints.add(full_checkpoint) is None
        assert await store.sampling_sessions.create(full_sampling) == full_sampling
        assert await store.snapshots.set(snapshot) is None
        await check(store)

    async def check(store: Store):
        assert await store.sessions.get("s1") == full_session
        assert await store.runs.get("s1:train:1") == full_run
        assert all_linear in await store.runs.of_session("s1")
        assert await store.checkpoints.get("s1:train:1", "weights", "final") == full_checkpoint
        assert await store.sampling_sessions.get("s1:sample:1") == full_sampling
        assert await store.snapshots.get("s1:train:1") == snapshot

    with_store(tmp_path, write)
    with_store(tmp_path, check)


def test_what_does_not_exist_is_none(tmp_path):
    async def check(store: Store):
        assert await store.sessions.get("no") is None
        assert await store.runs.get("no") is None
        assert not await store.runs.of_session("no")
        assert await store.checkpoints.get("no", "weights", "no") is None
        assert not await store.checkpoints.set_expiry("no", "weights", "no", 1.0)
        assert not await store.checkpoints.set_public("no", "weights", "no", True)
        assert await store.sampling_sessions.get("no") is None
        assert await store.snapshots.get("no") is None
        assert await store.ops.get("no", 1) is None
        assert await store.ops.outcome("no", 1) is None
        assert await store.sessions.list("no", 10) == Page((), 0)

    with_store(tmp_path, check)


def test_sessions_are_created_once_for_a_key(tmp_path):
    async def check(store: Store):
        first = await store.sessions.create(session("s1"), "key")
        assert await store.sessions.create(session("s2"), "key") == first
        assert (await store.sessions.create(session("s3", tenant_id="bob"), "key")).session_id == "s3"
        assert (await store.sessions.create(session("s4"))).session_id == "s4"
        assert (await store.sessions.create(session("s5"))).session_id == "s5"
        assert await store.sessions.get("s2") is None
        at_once = await asyncio.gather(*(store.sessions.create(session(f"c{n}"), "other") for n in range(20)))
        assert {record.session_id for record in at_once} == {"c0"}

    with_store(tmp_path, check)


def test_sessions_live_fall_silent_and_are_forgiven(tmp_path):
    async def check(store: Store):
        for number in range(4):
            await store.sessions.create(session(f"s{number}", created_at=100.0 + number))
        await store.sessions.touch({"s0": 500.0, "s1": 400.0, "s2": 50.0, "unknown": 1.0})
        await store.sessions.end("s3", "finished", 1000.0)
        await store.sessions.touch({"s3": 900.0})
        assert [(await store.sessions.get(f"s{n}")).last_seen for n in range(4)] == [500.0, 400.0, 102.0, 103.0]
        assert [record.session_id for record in await store.sessions.silent(450.0)] == ["s2", "s1"]
        assert await store.sessions.extend_deadlines_after_downtime(1000.0) == 3
        assert await store.sessions.silent(1000.0) == ()
        assert (await store.sessions.get("s3")).last_seen == 103.0
        await store.sessions.set_project(session("s1"), "p", 1000.0)
        assert (await store.sessions.get("s1")).project_id == "p"

    with_store(tmp_path, check)


def test_sessions_are_listed_newest_first_for_their_tenant(tmp_path):
    async def check(store: Store):
        for number in range(5):
            await store.sessions.create(session(f"s{number}", created_at=100.0 + number))
        await store.sessions.create(session("b", tenant_id="bob"))
        page = await store.sessions.list("alice", limit=2, offset=1)
        assert ([record.session_id for record in page.items], page.total) == (["s3", "s2"], 5)

    with_store(tmp_path, check)


def test_runs_are_listed_by_newest_request_and_by_project(tmp_path):
    async def check(store: Store):
        await store.sessions.create(session("s1", project_id="p"))
        await store.sessions.create(session("s2"))
        for number in (1, 2, 3):
            await store.runs.add(run(number))
        await store.runs.add(run(1, session_id="s2"))
        await store.runs.add(run(2, session_id="s2", tenant_id="bob"))
        await store.runs.touch({"s1:train:2": 300.0, "s2:train:1": 200.0, "s1:train:1": 50.0, "unknown": 1.0})

        page = await store.runs.list("alice", limit=3)
        assert [record.run_id for record in page.items] == ["s1:train:2", "s2:train:1", "s1:train:1"]
        assert page.total == 4
        page = await store.runs.list("alice", limit=2, offset=1, project_id="p")
        assert ([record.run_id for record in page.items], page.total) == (["s1:train:1", "s1:train:3"], 3)
        assert [record.number for record in await store.runs.of_session("s1")] == [1, 2, 3]

    with_store(tmp_path, check)


def test_a_run_is_added_once_for_a_number(tmp_path):
    async def check(store: Store):
        await begin(store)
        assert await store.runs.add(run(1, note="second")) == run(1)
        await store.runs.set_state("s1:train:1", "failed", "out of luck")
        assert await store.runs.get("s1:train:1") == run(1, state="failed", note="out of luck")
        assert await store.runs.in_state("live") == ()
        assert await store.runs.in_state("failed") == (run(1, state="failed", note="out of luck"),)
        with pytest.raises(integrity_error()):
            await store.runs.add(run(1, session_id="nobody"))

    with_store(tmp_path, check)


def test_a_checkpoint_name_is_taken_once_unless_overwritten_or_replayed(tmp_path):
    async def check(store: Store):
        await begin(store)
        first = checkpoint()
        await store.checkpoints.add(first)
        other = replace(first, request_id="s1:train:1:9", size_bytes=2, directory="elsewhere")
        with pytest.raises(CheckpointExistsError, match="weights/final already"):
            await store.checkpoints.add(other)
        assert await store.checkpoints.get("s1:train:1", "weights", "final") == first
        assert await store.checkpoints.add(replace(first, size_bytes=1)) == replace(first)
        assert await store.checkpoints.add(other, overwrite=True) == replace(first, size_bytes=1)
        assert await store.checkpoints.of_run("s1:train:1") == (other,)
        assert await store.checkpoints.add(replace(first, kind="sampler_weights")) is None

    with_store(tmp_path, check)


def test_checkpoints_are_listed_newest_first_and_expire(tmp_path):
    async def check(store: Store):
        await begin(store, 1, 2)
        for number, kind in enumerate(("weights", "weights", "sampler_weights", "external_weights")):
            await store.checkpoints.add(checkpoint(f"c{number}", kind=kind, created_at=100.0 + number))
        await store.checkpoints.add(checkpoint("c4", "s1:train:2", created_at=200.0))
        names = [record.name for record in await store.checkpoints.of_run("s1:train:1")]
        assert names == ["c3", "c2", "c1", "c0"]
        latest = await store.checkpoints.latest("s1:train:1")
        assert {kind: record.name for kind, record in latest.items()} == {
            "weights": "c1",
            "sampler_weights": "c2",
            "external_weights": "c3",
        }
        page = await store.checkpoints.list("alice", limit=2, offset=0)
        assert ([record.name for record in page.items], page.total) == (["c4", "c3"], 5)
        assert (await store.checkpoints.list("bob", limit=2)).total == 0

        assert await store.checkpoints.set_expiry("s1:train:1", "weights", "c0", 300.0)
        assert await store.checkpoints.set_expiry("s1:train:1", "weights", "c1", 250.0)
        assert await store.checkpoints.set_public("s1:train:1", "weights", "c0", True)
        assert [record.name for record in await store.checkpoints.expired(299.0)] == ["c1"]
        assert [record.name for record in await store.checkpoints.expired(300.0)] == ["c1", "c0"]
        await store.checkpoints.set_expiry("s1:train:1", "weights", "c1", None)
        assert [record.name for record in await store.checkpoints.expired(1e9)] == ["c0"]
        first = await store.checkpoints.get("s1:train:1", "weights", "c0")
        assert (first.public, first.expires_at) == (True, 300.0)
        await store.checkpoints.begin_delete(first)
        # a crash does not undo the deletion
        assert [record.name for record in await store.checkpoints.expired(0.0)] == ["c0"]
        await store.checkpoints.finish_delete(replace(first, directory="elsewhere"))
        # a different checkpoint of this name
        assert await store.checkpoints.get("s1:train:1", "weights", "c0") is not None
        await store.checkpoints.finish_delete(first)
        assert await store.checkpoints.get("s1:train:1", "weights", "c0") is None
        assert not await store.checkpoints.lie_in(first.directory)

    with_store(tmp_path, check)


def test_sampling_sessions_are_created_once_for_a_number(tmp_path):
    async def check(store: Store):
        await begin(store)
        second = await store.sampling_sessions.create(sampling_session(2))
        first = await store.sampling_sessions.create(sampling_session(1, version_id="v"))
        assert await store.sampling_sessions.create(sampling_session(1, version_id="w")) == first
        assert await store.sampling_sessions.of_session("s1") == (first, second)

    with_store(tmp_path, check)


def test_unnamed_versions_of_sessions_that_ended_are_abandoned(tmp_path):
    async def check(store: Store):
        for name in ("over", "alive", "recent"):
            await store.sessions.create(session(name, last_seen=900.0 if name == "recent" else 100.0))
            named = sampling_session(1, name, version_id="v", model_path="tinker://x")
            await store.sampling_sessions.create(named)
            await store.sampling_sessions.create(sampling_session(2, name, version_id=f"{name}:sample:2"))
        await store.sessions.end("over", "expired", 1000.0)
        await store.sessions.end("recent", "finished", 1000.0)
        (abandoned,) = await store.sampling_sessions.abandoned(before=500.0)
        assert abandoned.sampling_session_id == "over:sample:2"
        await store.sampling_sessions.delete("over:sample:2")
        assert await store.sampling_sessions.abandoned(before=500.0) == ()
        assert [sampling.number for sampling in await store.sampling_sessions.of_session("over")] == [1]

    with_store(tmp_path, check)


def test_all_but_the_newest_unnamed_versions_of_active_sessions_are_superseded(tmp_path):
    async def check(store: Store):
        for name in ("s", "other", "over"):
            await store.sessions.create(session(name))
            for number in (1, 2, 3, 4):
                unnamed = f"{name}:sample:{number}" if number != 2 else "v"  # the second is of a checkpoint
                await store.sampling_sessions.create(sampling_session(number, name, version_id=unnamed))
        await store.sessions.end("over", "finished", 1000.0)

        async def superseded(newest: int) -> list[str]:
            return sorted(each.sampling_session_id for each in await store.sampling_sessions.superseded(newest))

        assert await superseded(2) == ["other:sample:1", "s:sample:1"]
        assert await superseded(1) == ["other:sample:1", "other:sample:3", "s:sample:1", "s:sample:3"]
        assert await superseded(3) == []
        assert len(await superseded(0)) == 6

    with_store(tmp_path, check)


def test_an_adapter_has_one_snapshot(tmp_path):
    async def check(store: Store):
        await begin(store)
        first = SnapshotRecord("s1:train:1", 3, "a", None, 1.0)
        second = SnapshotRecord("s1:train:1", 5, "b", 4, 2.0)
        assert await store.snapshots.set(first) is None
        assert await store.snapshots.set(second) == first
        assert await store.snapshots.get("s1:train:1") == second
        await store.snapshots.delete("s1:train:1")
        assert await store.snapshots.get("s1:train:1") is None

    with_store(tmp_path, check)


def test_a_tool_reads_and_writes_records_beside_the_server(tmp_path):
    async def main():
        async with opened(tmp_path) as server, opened(tmp_path, lock=False) as tool:
            await begin(server)
            assert await tool.runs.get("s1:train:1") == run(1)
            await tool.runs.set_state("s1:train:1", "failed", "by hand")
            assert (await server.runs.get("s1:train:1")).note == "by hand"

    asyncio.run(main())


def test_clients_of_a_sampling_session(tmp_path):
    async def before(store: Store):
        await begin(store)
        for number in (1, 2):
            await store.sampling_sessions.create(sampling_session(number))
        assert [await store.sampling_sessions.join("s1:sample:1") for _ in range(2)] == [1, 2]
        assert await store.sampling_sessions.join("s1:sample:2") == 1
        assert await store.sampling_sessions.numbers_in_use("s1:sample:1", 0) == range(0)
        for numbers in (range(0, 10), range(7, 20)):
            await store.sampling_sessions.set_numbers_in_use("s1:sample:1", 0, numbers)
        await store.sampling_sessions.set_numbers_in_use("s1:sample:1", 10**9, range(10**18, 10**18 + 5))

    async def after(store: Store):
        assert await store.sampling_sessions.numbers_in_use("s1:sample:1", 0) == range(7, 20)
        assert await store.sampling_sessions.numbers_in_use("s1:sample:1", 10**9) == range(10**18, 10**18 + 5)
        assert await store.sampling_sessions.join("s1:sample:1") == 10**9 + 1
        await store.sampling_sessions.delete("s1:sample:1")
        assert await store.sampling_sessions.numbers_in_use("s1:sample:1", 0) == range(0)
        assert await store.sampling_sessions.join("s1:sample:2") == 2

    with_store(tmp_path, before)
    with_store(tmp_path, after)


def test_files_that_only_ended_sessions_sample_from(tmp_path):
    async def check(store: Store):
        await begin(store)
        await store.sessions.create(session("over"))
        await store.checkpoints.add(replace(checkpoint(), directory="kept"))
        for number, directory in enumerate(["kept", "shared", "gone"], start=1):
            fields = {"version_id": f"v{number}", "directory": directory}
            await store.sampling_sessions.create(sampling_session(number, "over", **fields))
        await store.sampling_sessions.create(sampling_session(1, version_id="v2", directory="shared"))
        await store.sampling_sessions.create(sampling_session(4, "over", version_id="over:sample:4", directory="own"))
        await store.sampling_sessions.create(sampling_session(5, "over"))
        assert await store.sampling_sessions.orphaned() == ()
        await store.sessions.end("over", "finished", 1000.0)
        assert [found.directory for found in await store.sampling_sessions.orphaned()] == ["gone"]
        assert [await store.sampling_sessions.refer_to(name) for name in ("kept", "shared", "gone")] == [0, 1, 0]
        await store.sessions.end("s1", "expired", 1000.0)
        assert {found.directory for found in await store.sampling_sessions.orphaned()} == {"gone", "shared"}

    with_store(tmp_path, check)
