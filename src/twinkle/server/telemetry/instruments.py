"""All metrics that the server has: names, kinds, labels and what they mean. docs/observability.md is made from this.

Names end in their unit; totals end in ``_total``. Labels are few and bounded: models that are configured, routes as
they are declared, kinds and outcomes from short lists. Tenants appear only where ``telemetry.tenants_in_metrics`` says.
"""

from dataclasses import dataclass
from typing import Literal

# Durations of requests: from what a submit takes to the longest long poll.
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Durations of work on the device, and of waiting for it.
_WORK_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_TOKENS = tuple(float(4**n) for n in range(2, 12))  # 16 … 4 M
_RATES = tuple(float(4**n) for n in range(1, 11))  # 4 … 1 M
_COUNTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
# Between bf16 noise of one kernel against another (some 1e-3) and a sampler that has other weights (1 and more).
_GAPS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Instrument:
    """One metric. ``read``: its value is looked up when somebody asks, not recorded as it happens."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: bool = False

    @property
    def unit(self) -> str:
        """Return the unit as OpenTelemetry writes it; empty for a plain number."""
        stem = self.name.removesuffix("_total")
        return "s" if stem.endswith("_seconds") else "By" if stem.endswith("_bytes") else ""


def _counter(name: str, meaning: str, *labels: str, read: bool = False) -> Instrument:
    return Instrument(name, "counter", meaning, labels, read=read)


def _gauge(name: str, meaning: str, *labels: str) -> Instrument:
    return Instrument(name, "gauge", meaning, labels, read=True)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Instrument:
    return Instrument(name, "histogram", meaning, labels, buckets)


# --- HTTP -------------------------------------------------------------------------------------------------------------

HTTP_REQUESTS = _counter("twinkle_http_requests_total", "Requests answered.", "method", "route", "status")
HTTP_SECONDS = _histogram(
    "twinkle_http_request_duration_seconds",
    "From the request's head to the end of the answer. Long polls (retrieve_future and its like) wait on purpose.",
    _REQUEST_SECONDS,
    "route",
    "status",
)
LONG_POLLS = _gauge("twinkle_long_polls", "Clients that wait for results now.", "model", "queue")
REFUSALS = _counter(
    "twinkle_refusals_total",
    "Requests refused because a limit was reached. limit: its key in the configuration, as in SECURITY.md's table.",
    "limit",
)

# --- training ---------------------------------------------------------------------------------------------------------

OPS = _counter(
    "twinkle_ops_total",
    "Ops that ended. outcome: succeeded, user_error (the tenant's mistake) or server_error.",
    "model",
    "kind",
    "outcome",
)
OP_WAIT = _histogram(
    "twinkle_op_wait_seconds",
    "From journalled to the start of its batch: for its turn, for earlier ops, and for the device.",
    _WORK_SECONDS,
    "model",
    "kind",
)
OP_SECONDS = _histogram("twinkle_op_duration_seconds", "From journalled to its result.", _WORK_SECONDS, "model", "kind")
JOURNAL_SECONDS = _histogram(
    "twinkle_journal_duration_seconds", "Writing an op down before it is acknowledged.", _REQUEST_SECONDS, "model"
)
BATCH_SECONDS = _histogram(
    "twinkle_batch_duration_seconds",
    "Step time: one batch in the compute thread. kind: forward, forward_backward or barriers (optimizer steps).",
    _WORK_SECONDS,
    "model",
    "kind",
)
BATCH_TOKENS = _histogram("twinkle_batch_tokens", "Tokens of a batch of passes.", _TOKENS, "model", "kind")
BATCH_OPS = _histogram("twinkle_batch_ops", "Ops of a batch: how many were merged.", _COUNTS, "model", "kind")
BATCH_RATE = _histogram(
    "twinkle_batch_tokens_per_second", "Tokens of a batch of passes by the time it took.", _RATES, "model", "kind"
)
TRAINED_TOKENS = _counter("twinkle_trained_tokens_total", "Tokens of passes that were computed.", "model", "kind")
LOGPROB_GAP = _histogram(
    "twinkle_logprob_gap",
    "Of each pass whose data carry the sampler's log-probabilities: mean distance from the trainer's.",
    _GAPS,
    "model",
)
LOGPROB_KL = _histogram(
    "twinkle_logprob_kl",
    "Of the same passes: estimate of KL(sampler ‖ trainer), the mean of r − 1 − log r.",
    _GAPS,
    "model",
)
QUEUE_DEPTH = _gauge(
    "twinkle_queue_depth", "Accepted and not running (training), or not done (sampling).", "model", "queue"
)
MERGE_RATIO = _gauge("twinkle_merge_ratio", "Passes in a batch of passes, on average since the start.", "model")
PADDING_SHARE = _gauge("twinkle_padding_ratio", "Rows of padding by all rows computed since the start.", "model")
ADAPTERS = _gauge(
    "twinkle_adapters",
    "Live adapters. place: device, host (paged out) or disk (since a restart, not used yet).",
    "model",
    "place",
)

# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLES = _counter(
    "twinkle_samples_total", "Sampling requests that ended. outcome: as for ops, or cancelled.", "model", "outcome"
)
SAMPLE_WAIT = _histogram(
    "twinkle_sample_wait_seconds", "From accepted to handed to the engine.", _WORK_SECONDS, "model"
)
SAMPLE_FIRST_TOKEN = _histogram(
    "twinkle_sample_first_token_seconds",
    "From accepted to the first token; of streamed requests alone, others have no first token.",
    _WORK_SECONDS,
    "model",
)
SAMPLE_SECONDS = _histogram("twinkle_sample_duration_seconds", "From accepted to the result.", _WORK_SECONDS, "model")
SAMPLE_RATE = _histogram(
    "twinkle_sample_tokens_per_second",
    "Tokens of a request, all of its samples, by the time in the engine.",
    _RATES,
    "model",
)
SAMPLED_TOKENS = _counter("twinkle_sampled_tokens_total", "Tokens that were generated.", "model")
PROMPT_TOKENS = _counter(
    "twinkle_prompt_tokens_total",
    "Tokens of the prompts of requests that succeeded. source: computed, or cached (found from an earlier request).",
    "model",
    "source",
)

# --- the process ------------------------------------------------------------------------------------------------------

COMPUTE_SECONDS = _counter(
    "twinkle_compute_seconds_total",
    "Time of the compute thread. lane: training or sampling.",
    "model",
    "lane",
    read=True,
)
COMPUTE_STEP = _gauge("twinkle_compute_step_seconds", "For how long the present step runs; 0: none does.", "model")
UNFETCHED = _gauge("twinkle_unfetched_result_bytes", "Results that nobody fetched yet.", "model", "queue")
DEVICE_MEMORY = _gauge(
    "twinkle_device_memory_bytes",
    "Of the model's GPU. kind: allocated (in tensors), reserved (by torch) or total. None without a GPU.",
    "model",
    "kind",
)
HOST_MEMORY = _gauge("twinkle_host_memory_bytes", "Of the machine. kind: available or total.", "kind")
BUDGET_USED = _gauge(
    "twinkle_budget_used_bytes",
    "What is in use of a resource with a limit for the whole server; resources as in SECURITY.md's table.",
    "resource",
)
BUDGET_LIMIT = _gauge("twinkle_budget_limit_bytes", "The limit of the same resource.", "resource")
DISK_FREE = _gauge("twinkle_disk_free_bytes", "Where data_dir lies.")
JOURNAL_BYTES = _gauge("twinkle_journal_bytes", "Segment files on disk. kind: bodies or outcomes.", "kind")
SESSIONS = _gauge("twinkle_sessions_active", "Sessions whose client lives.")
SAMPLING_SESSIONS = _gauge("twinkle_sampling_sessions_active", "Sampling sessions of those.")
STATE_UP = _gauge("twinkle_state_up", "1 when the database answered within a second, else 0.")
UPTIME = _gauge("twinkle_uptime_seconds", "Since the server started.")

# --- tenants ----------------------------------------------------------------------------------------------------------
# Only where telemetry.tenants_in_metrics is not 0; tenant: its id, or other.

TENANT_TRAINED = _counter(
    "twinkle_tenant_trained_tokens_total", "Tokens that a tenant trained on.", "tenant", read=True
)
TENANT_SAMPLED = _counter(
    "twinkle_tenant_sampled_tokens_total", "Tokens that were generated for it.", "tenant", read=True
)
TENANT_PROMPTS = _counter("twinkle_tenant_prompt_tokens_total", "Tokens of its prompts.", "tenant", read=True)
TENANT_STEPS = _counter("twinkle_tenant_optim_steps_total", "Its optimizer steps.", "tenant", read=True)
TENANT_REQUESTS = _counter("twinkle_tenant_requests_total", "Its ops and samples.", "tenant", read=True)
TENANT_QUEUE = _gauge("twinkle_tenant_queue_depth", "Its training ops that wait.", "tenant")

INSTRUMENTS: tuple[Instrument, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Instrument))


def table() -> str:
    """Return the table of docs/observability.md. ``python -m twinkle.server.telemetry`` prints it."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, INSTRUMENTS)])


def _row(instrument: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in instrument.labels)
    return f"| `{instrument.name}` | {instrument.kind} | {labels} | {instrument.meaning} |".replace("  ", " ")
