"""Runs that train all parameters of a model (``train_mode: full``): what they need, and what a busy replica answers.

Such a run holds its replica of the model while it is live; the record of the run is the record of the hold. So the hold
survives a restart, and ends when the run's last state is saved and the replica has the weights of the base model again.
"""

from datetime import UTC, datetime
from typing import Protocol

from twinkle.errors import UserError
from twinkle.model.types import FullSpec
from twinkle.server.backends.backend import ServedModel, TrainMode
from twinkle.server.config import ServerConfig
from twinkle.server.state.store import Store
from twinkle.server.types import RunRecord, SessionRecord


class WrongModeError(UserError):
    """A request asks for an adapter where all parameters are trained (``train_mode: full``), or the reverse."""

    def __init__(self, field: str, base_model: str, mode: TrainMode) -> None:
        """``field``: the field of the request that says what is trained."""
        full = f"null: {base_model} is served with train_mode: full, which trains all parameters and has no adapters"
        lora = f"a LoRA configuration: {base_model} is served with train_mode: lora, which trains adapters"
        got, allowed = ("a LoRA configuration", full) if mode == "full" else ("null", lora)
        super().__init__(f"{field}: got {got}, allowed: {allowed}")


def check_mode(model: ServedModel, run: RunRecord, field: str) -> None:
    """Raise WrongModeError unless the run trains what its model is served for: an adapter, or all parameters."""
    if (model.train_mode == "full") is not isinstance(run.spec, FullSpec):
        raise WrongModeError(field, run.base_model, model.train_mode)


class Host(Protocol):
    """The part of the gateway that this module uses."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def store(self) -> Store: ...

    def last_seen(self, session: SessionRecord) -> float: ...


async def held_message(gateway: Host, run: RunRecord, holder: RunRecord) -> str:
    """Return a message for a tenant whose ``run`` cannot begin: since when the model is held, and when it is free.

    It says nothing about ``holder`` or the holders of other replicas.
    """
    holders = await gateway.store.runs.holders(run.model_name) or (holder,)
    sessions = [await gateway.store.sessions.get(each.session_id) for each in holders]
    active = [session for session in sessions if session is not None and session.state == "active"]
    since = _time(min(each.created_at for each in holders))
    held = "it has been held" if len(holders) == 1 else f"its {len(holders)} replicas have been held, the first"
    if len(active) < len(holders):
        free = "A holder has left: try again when its last state is saved, in a minute or so"
    else:
        silent = min(map(gateway.last_seen, active)) + gateway.config.limits.session_timeout_seconds
        free = f"It is free when its holder unloads it, or after {_time(silent)} if its holder stays silent until then"
    mode = "is served with train_mode: full, where one run at a time trains all parameters"
    return f"{run.base_model} {mode}, and {held} since {since}. {free}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
