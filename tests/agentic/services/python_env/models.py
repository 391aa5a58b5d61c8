"""What client and server exchange."""

from openenv.core.env_server.types import Action, Observation


class PythonAction(Action):
    code: str


class PythonObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
