"""The JSON results of futures, and the JSON that tells a client to poll again.

The SDK treats every JSON result with a key ``error`` as a failure, so a success never has that key. JSON has no NaN.
"""

import json
import math
from collections.abc import Mapping

from twinkle.server.ids import CheckpointPath
from twinkle.server.types import CheckpointRecord, Encoding, Outcome

_FOR_SAMPLER = "save_weights_for_sampler"


def created(model_id: str) -> Outcome:
    return _success({"model_id": model_id, "type": "create_model"})


def stepped(metrics: Mapping[str, float]) -> Outcome:
    """Return the result of an optimizer step. Metrics that are NaN or infinite are left out: JSON has neither."""
    return _success({"metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)}})


def saved(record: CheckpointRecord) -> Outcome:
    """Return the result of a save, with the size of an exported checkpoint, because clients download its files."""
    path = str(CheckpointPath(record.run_id, record.kind, record.name))
    if record.kind == "external_weights":
        return _success({"path": path, "size_bytes": record.size_bytes})
    return _success({"path": path, "type": "save_weights" if record.kind == "weights" else _FOR_SAMPLER})


def published(sampling_session_id: str) -> Outcome:
    """Return the result of an unnamed save for the sampler: the sampling session for the new version."""
    return _success({"sampling_session_id": sampling_session_id, "type": _FOR_SAMPLER})


def loaded(path: str, model_id: str) -> Outcome:
    return _success({"path": path, "model_id": model_id, "type": "load_weights"})


def unloaded(model_id: str) -> Outcome:
    return _success({"model_id": model_id, "type": "unload_model"})


def created_loss(loss_id: str) -> Outcome:
    return _success({"loss_id": loss_id, "type": "create_custom_loss"})


def pending(request_id: str, why_queued: str | None = None) -> bytes:
    """Return the body of a 408, which tells a client that the result is not ready and to poll again.

    ``why_queued``: why the request does not run yet, which SDKs log; None: it runs.
    """
    answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if why_queued is not None:
        answer |= {"queue_state": "paused_capacity", "queue_state_reason": why_queued}
    return _json(answer)


def _success(content: Mapping[str, object]) -> Outcome:
    assert "error" not in content
    return Outcome(Encoding.JSON, _json(content))


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
