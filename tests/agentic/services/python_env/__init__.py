"""An environment in the layout of the OpenEnv project, on OpenEnv's own classes: it runs Python programs."""

from tests.agentic.services.python_env.client import PythonEnv
from tests.agentic.services.python_env.models import PythonAction, PythonObservation

__all__ = ["PythonAction", "PythonEnv", "PythonObservation"]
