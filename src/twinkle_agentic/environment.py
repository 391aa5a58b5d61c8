"""The one module of the agents' package that reads environment variables.

OPENENV_BASE_URL  the address of the environment server of an ``OpenEnvClient`` that is given none
E2B_API_KEY       the key of an ``AgentEnv`` that is given none; the e2b package reads further variables itself
E2B_API_URL       the address of a sandbox service, as the e2b package reads it
"""

import os
from dataclasses import dataclass

__all__ = ["Environment", "read_environment"]


@dataclass(frozen=True)
class Environment:
    """The settings that come from environment variables; None: not set."""

    openenv_base_url: str | None
    e2b_api_key: str | None
    e2b_api_url: str | None


def read_environment() -> Environment:
    """Read the variables now: scripts may set them after import."""
    return Environment(
        openenv_base_url=os.environ.get("OPENENV_BASE_URL", "").strip() or None,
        e2b_api_key=os.environ.get("E2B_API_KEY", "").strip() or None,
        e2b_api_url=os.environ.get("E2B_API_URL", "").strip() or None,
    )
