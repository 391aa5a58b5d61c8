"""What happened in a session, as a timeline: a JSON file that Perfetto and chrome://tracing show.

Times and kinds of ops as far as they are still on record; never what was in them.
"""

from twinkle.server.ids import directory_name
from twinkle.server.state import Store
from twinkle.server.state.records.ops import OpTimes
from twinkle.server.types import RunRecord, SessionRecord

_MICROSECONDS = 1e6


async def session_trace(store: Store, session: SessionRecord) -> dict[str, object]:
    """In the format of trace events: one process a run, one event an op, from its acceptance to its end."""
    events: list[dict[str, object]] = []
    for place, run in enumerate(await store.runs.of_session(session.session_id), start=1):
        events.append(_named(place, run))
        events += [_event(place, run, times) for times in await store.ops.times(run.run_id)]
    samplers = await store.sampling_sessions.of_session(session.session_id)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "state": session.state,
            "finish_reason": session.finish_reason,
            "sampling_sessions": [
                {"sampling_session_id": each.sampling_session_id, "created_at": each.created_at} for each in samplers
            ],
        },
    }


def trace_file_name(session: SessionRecord) -> str:
    return f"{directory_name(session.session_id)}.json"


def _named(place: int, run: RunRecord) -> dict[str, object]:
    about = {"name": f"{run.run_id} ({run.base_model}, {run.state})"}
    return {"name": "process_name", "ph": "M", "pid": place, "args": about}


def _event(place: int, run: RunRecord, times: OpTimes) -> dict[str, object]:
    """Complete ("X"), or begun ("B") as long as it has not ended."""
    about = {"request_id": f"{run.run_id}:{times.seq}", "seq_id": times.seq, "failed": times.failed}
    event: dict[str, object] = {
        "name": times.kind.value,
        "cat": "op",
        "pid": place,
        "tid": 0,
        "ts": times.accepted_at * _MICROSECONDS,
        "args": about,
    }
    if times.finished_at is None:
        return {**event, "ph": "B"}
    return {**event, "ph": "X", "dur": max(0.0, times.finished_at - times.accepted_at) * _MICROSECONDS}
