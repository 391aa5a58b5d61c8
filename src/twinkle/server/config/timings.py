"""Times that a server needs and that its configuration file does not have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Intervals and time limits in seconds. Servers use the defaults; tests use other values."""

    maintenance: float = 15.0  # between two rounds of maintenance
    snapshot: float = 5.0  # from an op to the next snapshot of its adapter
    key_cache: float = 10.0  # how long a key that another process revoked may still work
    signed_url: float = 3600.0  # how long a signed address is valid
    outage: float = 30.0  # how long callers wait for a database that is unreachable
    export: float = 5.0  # one export of traces or metrics, including its retries
    mock_pass: float = 0.0  # a batch of passes of the mock trainer, however many tokens it has
    mock_token: float = 0.0  # a token of such a batch, in addition
    mock_step: float = 0.0  # a step of the mock sampler


DEFAULT_TIMINGS = Timings()
