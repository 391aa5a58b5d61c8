"""Errors of native requests."""

from twinkle.errors import UserError


class SequenceConflictError(UserError):
    """A number came back with another request; the first one stands."""

    def __init__(self, run_id: str, seq: int) -> None:
        super().__init__(f"seq_id {seq} of {run_id} was used before with another request; each request needs its own")
