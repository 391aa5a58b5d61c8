"""The client of the environment."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from tests.agentic.services.python_env.models import PythonAction, PythonObservation


class PythonEnv(EnvClient[PythonAction, PythonObservation, State]):
    def _step_payload(self, action: PythonAction) -> dict[str, Any]:
        return {"code": action.code}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[PythonObservation]:
        observation = PythonObservation(**payload["observation"])
        return StepResult(observation, payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
