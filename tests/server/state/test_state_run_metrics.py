"""Curves in the database: how many points and names a run may have, and which are deleted."""

from pathlib import Path

import pytest

from tests.support.servers.state_samples import begin, with_store
from twinkle.errors import InvalidInputError
from twinkle.server.state.records import run_metrics as table
from twinkle.server.state.store import Store
from twinkle.server.types import MeasuredStep

pytestmark = pytest.mark.usefixtures("backend")

RUN = "s1:train:1"


def test_old_points_are_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_POINTS", 64)
    monkeypatch.setattr(table, "_THIN_EVERY", 8)

    async def check(store: Store) -> None:
        await begin(store)
        steps = [MeasuredStep(RUN, seq, float(seq), {"loss": 1.0}) for seq in range(1, 1001)]
        for start in range(0, 1000, 50):
            await store.run_metrics.add_steps(steps[start : start + 50])
        kept = [point.step for point in await store.run_metrics.since(RUN, 0, 10_000)]
        assert 32 <= len(kept) <= 72
        assert kept[0] == 1
        assert kept[-30:] == list(range(971, 1001))  # recent points are complete

    with_store(tmp_path, check)


def test_a_flood_of_logged_values_leaves_the_count_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_POINTS", 8)
    monkeypatch.setattr(table, "_THIN_EVERY", 4)

    async def check(store: Store) -> None:
        await begin(store)
        await store.run_metrics.add_steps([MeasuredStep(RUN, seq, 1.0, {}) for seq in (3, 5)])
        for number in range(200):
            await store.run_metrics.log(RUN, number, {"reward": 1.0}, 2.0)
        await store.run_metrics.add_steps([MeasuredStep(RUN, seq, 3.0, {}) for seq in (3, 5, 7)])
        points = await store.run_metrics.since(RUN, 0, 1000)
        assert [point.step for point in points if point.source == "server"][-2:] == [2, 3]

    with_store(tmp_path, check)


def test_names_of_a_run_are_counted(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await begin(store)
        for number in range(table.MAX_NAMES):
            await store.run_metrics.log(RUN, 0, {f"name{number}": 1.0}, 1.0)
        with pytest.raises(InvalidInputError, match=r"another.*at most 64 different names"):
            await store.run_metrics.log(RUN, 0, {"name1": 1.0, "another": 1.0}, 1.0)
        await store.run_metrics.log(RUN, 0, {"name1": 2.0}, 1.0)
        points = await store.run_metrics.since(RUN, 0, 1000)
        assert len(points) == table.MAX_NAMES + 1

    with_store(tmp_path, check)
