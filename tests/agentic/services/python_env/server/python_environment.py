"""Runs a program and rewards its length; the variable ``done`` of a program ends the episode."""

import contextlib
import io
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from tests.agentic.services.python_env.models import PythonAction, PythonObservation


class PythonEnvironment(Environment[PythonAction, PythonObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._variables: dict[str, Any] = {}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> PythonObservation:
        self._variables = dict(kwargs)
        return PythonObservation(stdout="ready")

    def step(self, action: PythonAction, timeout_s: float | None = None, **kwargs: Any) -> PythonObservation:
        if action.code == "crash":
            raise RuntimeError("the environment is broken")
        printed, error = io.StringIO(), ""
        with contextlib.redirect_stdout(printed):
            try:
                exec(action.code, self._variables)
            except Exception as raised:  # noqa: BLE001 - a model's program may raise anything
                error = f"{type(raised).__name__}: {raised}"
        return PythonObservation(
            stdout=printed.getvalue(),
            stderr=error,
            exit_code=int(bool(error)),
            reward=len(action.code) / 100,
            done=bool(self._variables.get("done")),
        )

    @property
    def state(self) -> State:
        return State()
