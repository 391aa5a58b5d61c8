"""Curves of runs: one point for every optimizer step, and one for every call with which a client logs values.

Each run has a limited number of points. Beyond the limit, every second point of the older half is deleted: the past
gets coarser, recent points stay complete. Each tenant has a limit too. Beyond it, the curves of its runs that are not
live are deleted, those with the oldest last request first. Both limits are checked at every 256th point of a run.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from sqlalchemy import bindparam, delete, func, insert, select

from twinkle.errors import InvalidInputError
from twinkle.server.state.database.database import Cursor, Row
from twinkle.server.state.database.tables import RUN_METRIC_NAMES, RUN_METRICS, RUNS
from twinkle.server.state.records.area import Area, in_write
from twinkle.server.types import MeasuredStep, MetricPoint

MAX_POINTS = 4096  # points of one run
MAX_POINTS_OF_TENANT = 200_000  # points: more than the live runs that a tenant may have by default can store
MAX_NAMES = 64  # different names that a client may use for the values of one run
_THIN_EVERY = 256  # points: how often the limits are checked

_OF_RUN = RUN_METRICS.c.run_id == bindparam("run")
_NEWEST_FIRST = RUN_METRICS.c.number.desc()

# Two processes that share a database may write points of one run: the row lock makes one wait for the other.
_LOCK_RUN = select(RUNS.c.run_id).where(RUNS.c.run_id == bindparam("run")).with_for_update(key_share=True)
_LAST_NUMBER = select(func.coalesce(func.max(RUN_METRICS.c.number), 0)).where(_OF_RUN)
_LAST_STEP = select(RUN_METRICS).where(_OF_RUN, RUN_METRICS.c.seq.is_not(None)).order_by(_NEWEST_FIRST).limit(1)
_SINCE = (
    select(RUN_METRICS)
    .where(_OF_RUN, RUN_METRICS.c.number > bindparam("since"))
    .order_by(RUN_METRICS.c.number)
    .limit(bindparam("limit"))
)
_NUMBERS = select(RUN_METRICS.c.number).where(_OF_RUN).order_by(RUN_METRICS.c.number)
_DELETE = delete(RUN_METRICS).where(_OF_RUN, RUN_METRICS.c.number == bindparam("number_"))
_COUNT_OF_TENANT = (
    select(func.count()).select_from(RUN_METRICS.join(RUNS)).where(RUNS.c.tenant_id == bindparam("tenant_id"))
)
_IDLE_RUNS = (
    select(RUN_METRICS.c.run_id)
    .join(RUNS, RUNS.c.run_id == RUN_METRICS.c.run_id)
    .where(RUNS.c.tenant_id == bindparam("tenant_id"), RUNS.c.state != "live", RUNS.c.run_id != bindparam("run"))
    .group_by(RUN_METRICS.c.run_id, RUNS.c.last_request_at)
    .order_by(RUNS.c.last_request_at)
)
_NAMES = select(RUN_METRIC_NAMES.c.name).where(RUN_METRIC_NAMES.c.run_id == bindparam("run"))
_INSERT_NAME = insert(RUN_METRIC_NAMES)


class RunMetrics(Area):
    """The points of all runs' curves: those measured at optimizer steps, and those that clients logged."""

    @in_write
    def add_steps(self, cursor: Cursor, steps: Sequence[MeasuredStep]) -> None:
        """Add optimizer steps in the order in which they were taken. Replayed steps that are on record are skipped."""
        run_of = attrgetter("run_id")
        by_run = {run_id: tuple(group) for run_id, group in groupby(sorted(steps, key=run_of), key=run_of)}
        for run_id, taken in by_run.items():
            _add_steps(cursor, run_id, taken)

    @in_write
    def log(
        self, cursor: Cursor, run_id: str, step: int | None, values: Mapping[str, float], now: float
    ) -> MetricPoint:
        """Add values that a client logged; InvalidInputError if the run would have more than 64 different names.

        Without ``step`` they belong to the newest optimizer step of the run, or to 0 before the first.
        """
        cursor.rows(_LOCK_RUN, {"run": run_id})
        _admit_names(cursor, run_id, values)
        number = cursor.number(_LAST_NUMBER, {"run": run_id}) + 1
        at_step = _last_step(cursor, run_id)[1] if step is None else step
        point = MetricPoint(number, now, "client", at_step, values)
        _add(cursor, run_id, point, None)
        return point

    async def since(self, run_id: str, number: int, limit: int) -> tuple[MetricPoint, ...]:
        """Return at most ``limit`` points of a run after point ``number``, oldest first."""
        return tuple(map(_point, await self._rows(_SINCE, run=run_id, since=number, limit=limit)))


def _add_steps(cursor: Cursor, run_id: str, taken: Sequence[MeasuredStep]) -> None:
    cursor.rows(_LOCK_RUN, {"run": run_id})
    number = cursor.number(_LAST_NUMBER, {"run": run_id})
    last_seq, step = _last_step(cursor, run_id)
    for measured in taken:
        if measured.seq > last_seq:
            number, step, last_seq = number + 1, step + 1, measured.seq
            _add(cursor, run_id, MetricPoint(number, measured.at, "server", step, measured.values), measured.seq)


def _last_step(cursor: Cursor, run_id: str) -> tuple[int, int]:
    """Return the sequence number of the op of the newest step, and the step's number; (-1, 0) before the first step."""
    row = cursor.row(_LAST_STEP, {"run": run_id})
    return (-1, 0) if row is None else (row["seq"], row["step"])


def _add(cursor: Cursor, run_id: str, point: MetricPoint, seq: int | None) -> None:
    row = {"run_id": run_id, "number": point.number, "recorded_at": point.time, "seq": seq, "step": point.step}
    cursor.insert(RUN_METRICS, **row, metrics=json.dumps(dict(point.values), allow_nan=False))
    if point.number % _THIN_EVERY == 0:
        _thin(cursor, run_id)
        _drop_curves_of_idle_runs(cursor, run_id)


def _thin(cursor: Cursor, run_id: str) -> None:
    """Delete every second point of the older half, but not the newest step, if the run has more than ``MAX_POINTS``."""
    numbers = [row["number"] for row in cursor.rows(_NUMBERS, {"run": run_id})]
    if len(numbers) <= MAX_POINTS:
        return
    last = cursor.row(_LAST_STEP, {"run": run_id})  # must stay: new steps are numbered from it
    gone = [n for n in numbers[1 : len(numbers) // 2 : 2] if last is None or n != last["number"]]
    cursor.execute_many(_DELETE, [{"run": run_id, "number_": number} for number in gone])


def _drop_curves_of_idle_runs(cursor: Cursor, run_id: str) -> None:
    """Delete curves of the tenant's runs that are not live, until it is within its limit of points or none is left.

    The curve of ``run_id``, a run of this tenant, stays.
    """
    run = cursor.find(RUNS, run_id=run_id)
    assert run is not None, "a point has a run"
    excess = cursor.number(_COUNT_OF_TENANT, {"tenant_id": run["tenant_id"]}) - MAX_POINTS_OF_TENANT
    if excess > 0:
        for idle in cursor.rows(_IDLE_RUNS, {"tenant_id": run["tenant_id"], "run": run_id}):
            if excess > 0:
                excess -= cursor.delete(RUN_METRICS, run_id=idle["run_id"])


def _admit_names(cursor: Cursor, run_id: str, values: Mapping[str, float]) -> None:
    """Store the names of a client's values; InvalidInputError if the run would have too many different names."""
    known = {row["name"] for row in cursor.rows(_NAMES, {"run": run_id})}
    new = [name for name in values if name not in known]
    if len(known) + len(new) > MAX_NAMES:
        raise InvalidInputError("values", new[-1], f"at most {MAX_NAMES} different names in the life of a run")
    cursor.execute_many(_INSERT_NAME, [{"run_id": run_id, "name": name} for name in new])


def _point(row: Row) -> MetricPoint:
    return MetricPoint(
        number=row["number"],
        time=row["recorded_at"],
        source="client" if row["seq"] is None else "server",
        step=row["step"],
        values=json.loads(row["metrics"]),
    )
