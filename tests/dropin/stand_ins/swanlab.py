"""Stand-in for the tracking service swanlab: keeps what is logged."""

from typing import Any

LOGGED: list[dict[str, Any]] = []


def login(api_key: str | None = None, save: bool = False) -> None:
    """Log in nowhere."""


def init(**options: Any) -> None:
    """Start a run that is kept in this process."""


def log(values: dict[str, Any], step: int | None = None) -> None:
    LOGGED.append({**values, "step": step})
