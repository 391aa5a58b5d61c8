"""All metrics that the server has: names, kinds, labels and what they mean. docs/observability.md is made from this.

Names end in their unit; totals end in ``_total``. Labels are few and bounded: models that are configured, routes as
they are declared, kinds and outcomes from short lists. Tenants appear only where ``telemetry.tenants_in_metrics`` says.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["INSTRUMENTS", "Instrument"]

# Of requests: from what a submit takes to the longest long poll.
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Of work on the device, and of waiting for it.
_WORK_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_TOKENS = tuple(float(4**n) for n in range(2, 12))  # 16 … 4 M
_RATES = tuple(float(4**n) for n in range(1, 11))  # 4 … 1 M
_COUNTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
# Between bf16 noise of one kernel against another (some 1e-3) and a sampler that has other weights (1 and more).
_GAPS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Instrument:
    """``read``: looked up when somebody asks, not recorded as it happens."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: bool = False

    @property
    def unit(self) -> str:
        """As OpenTelemetry writes it; empty for a plain number."""
        stem = self.name.removesuffix("_total")
        return "s" if stem.endswith("_seconds") else "By" if stem.endswith("_bytes") else ""


# --- HTTP -------------------------------------------------------------------------------------------------------------

HTTP_REQUESTS = Instrument(
    "twinkle_http_requests_total", "counter", "Requests answered.", ("method", "route", "status")
)
HTTP_SECONDS = Instrument(
    "twinkle_http_request_duration_seconds",
    "histogram",
    "From the request's head to the end of the answer. Long polls (retrieve_future and its like) wait on purpose.",
    ("route", "status"),
    _REQUEST_SECONDS,
)
LONG_POLLS = Instrument(
    "twinkle_long_polls", "gauge", "Clients that wait for results now.", ("model", "queue"), read=True
)
REFUSALS = Instrument(
    "twinkle_refusals_total",
    "counter",
    "Requests refused because a limit was reached. limit: its key in the configuration, as in SECURITY.md's table.",
    ("limit",),
)

# --- training ---------------------------------------------------------------------------------------------------------

OPS = Instrument(
    "twinkle_ops_total",
    "counter",
    "Ops that ended. outcome: succeeded, user_error (the tenant's mistake) or server_error.",
    ("model", "kind", "outcome"),
)
OP_WAIT = Instrument(
    "twinkle_op_wait_seconds",
    "histogram",
    "From journalled to the start of its batch: for its turn, for earlier ops, and for the device.",
    ("model", "kind"),
    _WORK_SECONDS,
)
OP_SECONDS = Instrument(
    "twinkle_op_duration_seconds", "histogram", "From journalled to its result.", ("model", "kind"), _WORK_SECONDS
)
JOURNAL_SECONDS = Instrument(
    "twinkle_journal_duration_seconds",
    "histogram",
    "Writing an op down before it is acknowledged.",
    ("model",),
    _REQUEST_SECONDS,
)
BATCH_SECONDS = Instrument(
    "twinkle_batch_duration_seconds",
    "histogram",
    "Step time: one batch in the compute thread. kind: forward, forward_backward or barriers (optimizer steps).",
    ("model", "kind"),
    _WORK_SECONDS,
)
BATCH_TOKENS = Instrument(
    "twinkle_batch_tokens", "histogram", "Tokens of a batch of passes.", ("model", "kind"), _TOKENS
)
BATCH_OPS = Instrument(
    "twinkle_batch_ops", "histogram", "Ops of a batch: how many were merged.", ("model", "kind"), _COUNTS
)
BATCH_RATE = Instrument(
    "twinkle_batch_tokens_per_second",
    "histogram",
    "Tokens of a batch of passes by the time it took.",
    ("model", "kind"),
    _RATES,
)
TRAINED_TOKENS = Instrument(
    "twinkle_trained_tokens_total", "counter", "Tokens of passes that were computed.", ("model", "kind")
)
LOGPROB_GAP = Instrument(
    "twinkle_logprob_gap",
    "histogram",
    "Of each pass whose data carry the sampler's log-probabilities: mean distance from the trainer's.",
    ("model",),
    _GAPS,
)
LOGPROB_KL = Instrument(
    "twinkle_logprob_kl",
    "histogram",
    "Of the same passes: estimate of KL(sampler ‖ trainer), the mean of r − 1 − log r.",
    ("model",),
    _GAPS,
)
QUEUE_DEPTH = Instrument(
    "twinkle_queue_depth",
    "gauge",
    "Accepted and not running (training), or not done (sampling).",
    ("model", "queue"),
    read=True,
)
MERGE_RATIO = Instrument(
    "twinkle_merge_ratio", "gauge", "Passes in a batch of passes, on average since the start.", ("model",), read=True
)
PADDING_SHARE = Instrument(
    "twinkle_padding_ratio", "gauge", "Rows of padding by all rows computed since the start.", ("model",), read=True
)
ADAPTERS = Instrument(
    "twinkle_adapters",
    "gauge",
    "Live adapters. place: device, host (paged out) or disk (since a restart, not used yet).",
    ("model", "place"),
    read=True,
)

# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLES = Instrument(
    "twinkle_samples_total",
    "counter",
    "Sampling requests that ended. outcome: as above, or cancelled.",
    ("model", "outcome"),
)
SAMPLE_WAIT = Instrument(
    "twinkle_sample_wait_seconds", "histogram", "From accepted to handed to the engine.", ("model",), _WORK_SECONDS
)
SAMPLE_FIRST_TOKEN = Instrument(
    "twinkle_sample_first_token_seconds",
    "histogram",
    "From accepted to the first token; of streamed requests alone, others have no first token.",
    ("model",),
    _WORK_SECONDS,
)
SAMPLE_SECONDS = Instrument(
    "twinkle_sample_duration_seconds", "histogram", "From accepted to the result.", ("model",), _WORK_SECONDS
)
SAMPLE_RATE = Instrument(
    "twinkle_sample_tokens_per_second",
    "histogram",
    "Tokens of a request, all of its samples, by the time in the engine.",
    ("model",),
    _RATES,
)
SAMPLED_TOKENS = Instrument("twinkle_sampled_tokens_total", "counter", "Tokens that were generated.", ("model",))
PROMPT_TOKENS = Instrument(
    "twinkle_prompt_tokens_total",
    "counter",
    "Tokens of the prompts of requests that succeeded. source: computed, or cached (found from an earlier request).",
    ("model", "source"),
)

# --- the process ------------------------------------------------------------------------------------------------------

COMPUTE_SECONDS = Instrument(
    "twinkle_compute_seconds_total",
    "counter",
    "Time of the compute thread. lane: training or sampling.",
    ("model", "lane"),
    read=True,
)
COMPUTE_STEP = Instrument(
    "twinkle_compute_step_seconds", "gauge", "For how long the present step runs; 0: none does.", ("model",), read=True
)
UNFETCHED = Instrument(
    "twinkle_unfetched_result_bytes", "gauge", "Results that nobody fetched yet.", ("model", "queue"), read=True
)
DEVICE_MEMORY = Instrument(
    "twinkle_device_memory_bytes",
    "gauge",
    "Of the model's GPU. kind: allocated (in tensors), reserved (by torch) or total. None without a GPU.",
    ("model", "kind"),
    read=True,
)
HOST_MEMORY = Instrument(
    "twinkle_host_memory_bytes", "gauge", "Of the machine. kind: available or total.", ("kind",), read=True
)
BUDGET_USED = Instrument(
    "twinkle_budget_used_bytes",
    "gauge",
    "What is in use of a resource with a limit for the whole server; resources as in SECURITY.md's table.",
    ("resource",),
    read=True,
)
BUDGET_LIMIT = Instrument(
    "twinkle_budget_limit_bytes", "gauge", "The limit of the same resource.", ("resource",), read=True
)
DISK_FREE = Instrument("twinkle_disk_free_bytes", "gauge", "Where data_dir lies.", (), read=True)
JOURNAL_BYTES = Instrument(
    "twinkle_journal_bytes", "gauge", "Segment files on disk. kind: bodies or outcomes.", ("kind",), read=True
)
SESSIONS = Instrument("twinkle_sessions_active", "gauge", "Sessions whose client lives.", (), read=True)
SAMPLING_SESSIONS = Instrument(
    "twinkle_sampling_sessions_active", "gauge", "Sampling sessions of those.", (), read=True
)
STATE_UP = Instrument(
    "twinkle_state_up", "gauge", "1 when the database answered within a second, else 0.", (), read=True
)
UPTIME = Instrument("twinkle_uptime_seconds", "gauge", "Since the server started.", (), read=True)

# --- tenants ----------------------------------------------------------------------------------------------------------
# Only where telemetry.tenants_in_metrics is not 0; tenant: its id, or other.

TENANT_TRAINED = Instrument(
    "twinkle_tenant_trained_tokens_total", "counter", "Tokens that a tenant trained on.", ("tenant",), read=True
)
TENANT_SAMPLED = Instrument(
    "twinkle_tenant_sampled_tokens_total", "counter", "Tokens that were generated for it.", ("tenant",), read=True
)
TENANT_PROMPTS = Instrument(
    "twinkle_tenant_prompt_tokens_total",
    "counter",
    "Tokens of its prompts.",
    ("tenant",),
    read=True,
)
TENANT_STEPS = Instrument("twinkle_tenant_optim_steps_total", "counter", "Its optimizer steps.", ("tenant",), read=True)
TENANT_REQUESTS = Instrument("twinkle_tenant_requests_total", "counter", "Its ops and samples.", ("tenant",), read=True)
TENANT_QUEUE = Instrument("twinkle_tenant_queue_depth", "gauge", "Its training ops that wait.", ("tenant",), read=True)

INSTRUMENTS: tuple[Instrument, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Instrument))
