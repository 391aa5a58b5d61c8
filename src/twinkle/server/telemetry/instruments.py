"""All metrics of the server: names, kinds, labels and meanings. The table in docs/observability.md is made from this.

Names end in their unit, if they have one, and totals in ``_total``. Labels are few and bounded: configured models,
declared routes, kinds and outcomes from short lists. Tenants appear only if ``telemetry.tenants_in_metrics`` is not 0.
"""

from dataclasses import dataclass
from typing import Literal

# Durations of requests: from the time of a submit to that of the longest long poll.
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Durations of work on the device, and of waiting for it.
_WORK_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_TOKENS = tuple(float(4**n) for n in range(2, 12))  # 16 … 4 M
_RATES = tuple(float(4**n) for n in range(1, 11))  # 4 … 1 M
_COUNTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
# From the bf16 noise between two kernels (about 1e-3) to a sampler with other weights (1 and more).
_GAPS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, eq=False)  # a key of dicts, by identity: hashing all fields takes microseconds
class Instrument:
    """One metric. ``read``: its value is looked up when metrics are collected, instead of recorded as it changes."""

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


def _counter(name: str, labels: str, meaning: str, read: bool = False) -> Instrument:
    return Instrument(name, "counter", meaning, tuple(labels.split()), read=read)


def _gauge(name: str, labels: str, meaning: str) -> Instrument:
    return Instrument(name, "gauge", meaning, tuple(labels.split()), read=True)


def _histogram(name: str, labels: str, buckets: tuple[float, ...], meaning: str) -> Instrument:
    return Instrument(name, "histogram", meaning, tuple(labels.split()), buckets)


# --- HTTP -------------------------------------------------------------------------------------------------------------

HTTP_REQUESTS = _counter("twinkle_http_requests_total", "method route status", "Requests that ended.")
HTTP_SECONDS = _histogram(
    "twinkle_http_request_duration_seconds",
    "route status",
    _REQUEST_SECONDS,
    "Time from the head of a request to the end of its answer. Long polls (such as retrieve_future) wait on purpose.",
)
LONG_POLLS = _gauge("twinkle_long_polls", "model queue", "Requests that wait for a result now.")
REFUSALS = _counter(
    "twinkle_refusals_total",
    "limit",
    "Requests refused because a limit was reached. limit: its key in the configuration, or the name of a fixed limit.",
)

# --- training ---------------------------------------------------------------------------------------------------------

OPS = _counter(
    "twinkle_ops_total",
    "model kind outcome",
    "Ops that ended. outcome: succeeded, user_error (the tenant's mistake) or server_error.",
)
OP_WAIT = _histogram(
    "twinkle_op_wait_seconds",
    "model kind",
    _WORK_SECONDS,
    "Time that an op waits, from the journal to the start of its batch: for its turn, for earlier ops, for the device.",
)
OP_SECONDS = _histogram(
    "twinkle_op_duration_seconds", "model kind", _WORK_SECONDS, "Time from the journal to the result."
)
JOURNAL_SECONDS = _histogram(
    "twinkle_journal_duration_seconds", "model", _REQUEST_SECONDS, "Time to write an op to the journal."
)
BATCH_SECONDS = _histogram(
    "twinkle_batch_duration_seconds",
    "model kind",
    _WORK_SECONDS,
    "Step time: one batch in the compute thread. kind: forward, forward_backward or barriers (ops that are no passes).",
)
BATCH_TOKENS = _histogram("twinkle_batch_tokens", "model kind", _TOKENS, "Tokens of a batch of passes.")
BATCH_OPS = _histogram("twinkle_batch_ops", "model kind", _COUNTS, "Ops of a batch: how many were merged.")
BATCH_RATE = _histogram(
    "twinkle_batch_tokens_per_second", "model kind", _RATES, "Tokens of a batch of passes, divided by the time it took."
)
TRAINED_TOKENS = _counter("twinkle_trained_tokens_total", "model kind", "Tokens of passes that were computed.")
LOGPROB_GAP = _histogram(
    "twinkle_logprob_gap",
    "model",
    _GAPS,
    "For each pass whose data carry the sampler's log-probabilities: their mean distance from the trainer's.",
)
LOGPROB_KL = _histogram(
    "twinkle_logprob_kl",
    "model",
    _GAPS,
    "For the same passes: an estimate of KL(sampler ‖ trainer), the mean of r − 1 − log r.",
)
QUEUE_DEPTH = _gauge(
    "twinkle_queue_depth", "model queue", "Ops that wait to run (queue training), or unfinished samples (sampling)."
)
MERGE_RATIO = _gauge("twinkle_merge_ratio", "model", "Passes in a batch of passes, on average since the start.")
PADDING_SHARE = _gauge("twinkle_padding_ratio", "model", "Share of padding among all rows computed since the start.")
ADAPTERS = _gauge(
    "twinkle_adapters",
    "model place",
    "Live adapters. place: device, host (paged out) or disk (in a snapshot until its next op).",
)
IMAGES = _counter(
    "twinkle_images_total",
    "model features",
    "Images. features: computed by the vision tower, for passes and prompts, or reused by a later pass.",
    read=True,
)

# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLES = _counter(
    "twinkle_samples_total", "model outcome", "Sampling requests that ended. outcome: as for ops, or cancelled."
)
SAMPLE_WAIT = _histogram(
    "twinkle_sample_wait_seconds", "model", _WORK_SECONDS, "Time from acceptance until the engine has the request."
)
SAMPLE_FIRST_TOKEN = _histogram(
    "twinkle_sample_first_token_seconds",
    "model",
    _WORK_SECONDS,
    "Time from acceptance to the first token. Streamed requests only; others get all tokens at once.",
)
SAMPLE_SECONDS = _histogram(
    "twinkle_sample_duration_seconds", "model", _WORK_SECONDS, "Time from acceptance to the result."
)
SAMPLE_RATE = _histogram(
    "twinkle_sample_tokens_per_second",
    "model",
    _RATES,
    "Tokens of all samples of a request, divided by its time in the engine.",
)
SAMPLED_TOKENS = _counter("twinkle_sampled_tokens_total", "model", "Tokens that were generated.")
PROMPT_TOKENS = _counter(
    "twinkle_prompt_tokens_total",
    "model source",
    "Tokens of the prompts of requests that succeeded. source: computed, or cached (found from an earlier request).",
)
DECODE_STEPS = _counter(
    "twinkle_decode_steps_total",
    "model",
    "Decode steps of the torch sampler; each draws one token for each of its sequences.",
    read=True,
)
DECODED_TOKENS = _counter(
    "twinkle_decoded_tokens_total",
    "model",
    "Tokens drawn in decode steps; divided by the steps: sequences per step. Some lie behind the end of a sample.",
    read=True,
)

# --- the process ------------------------------------------------------------------------------------------------------

COMPUTE_SECONDS = _counter(
    "twinkle_compute_seconds_total",
    "model lane",
    "Time that the compute thread was busy. lane: training or sampling.",
    read=True,
)
COMPUTE_STEP = _gauge(
    "twinkle_compute_step_seconds", "model", "How long the current step has been running; 0 if none runs."
)
PROCESSES = _gauge(
    "twinkle_model_processes",
    "model mesh",
    "Processes that train a replica of the model. mesh: backend and sizes, such as megatron, dp 1 × tp 2 × pp 2.",
)
UNFETCHED = _gauge("twinkle_unfetched_result_bytes", "model queue", "Results that no client has fetched yet.")
DEVICE_MEMORY = _gauge(
    "twinkle_device_memory_bytes",
    "model kind",
    "Memory of the model's GPU. kind: allocated (in tensors), reserved (by torch) or total. Absent without a GPU.",
)
HOST_MEMORY = _gauge("twinkle_host_memory_bytes", "kind", "Memory of the machine. kind: available or total.")
BUDGET_USED = _gauge(
    "twinkle_budget_used_bytes",
    "resource",
    "Bytes in use of a resource that has a limit for the whole process, such as memory, results, adapters, journal.",
)
BUDGET_LIMIT = _gauge("twinkle_budget_limit_bytes", "resource", "The limit of the same resource.")
DISK_FREE = _gauge("twinkle_disk_free_bytes", "", "Free space on the disk that holds data_dir.")
JOURNAL_BYTES = _gauge(
    "twinkle_journal_bytes", "kind", "Size of the journal's segment files. kind: bodies or outcomes."
)
SESSIONS = _gauge("twinkle_sessions_active", "", "Active sessions.")
SAMPLING_SESSIONS = _gauge("twinkle_sampling_sessions_active", "", "Sampling sessions of active sessions.")
STATE_UP = _gauge("twinkle_state_up", "", "1 if the database answered within a second, else 0.")
UPTIME = _gauge("twinkle_uptime_seconds", "", "Time since the server started.")

# --- tenants ----------------------------------------------------------------------------------------------------------
# Only if telemetry.tenants_in_metrics is not 0. The label tenant is the tenant's id, or "other".

TENANT_TRAINED = _counter(
    "twinkle_tenant_trained_tokens_total", "tenant", "Tokens that a tenant trained on.", read=True
)
TENANT_SAMPLED = _counter("twinkle_tenant_sampled_tokens_total", "tenant", "Tokens generated for a tenant.", read=True)
TENANT_PROMPTS = _counter("twinkle_tenant_prompt_tokens_total", "tenant", "Tokens of a tenant's prompts.", read=True)
TENANT_STEPS = _counter("twinkle_tenant_optim_steps_total", "tenant", "A tenant's optimizer steps.", read=True)
TENANT_REQUESTS = _counter("twinkle_tenant_requests_total", "tenant", "A tenant's ops and samples.", read=True)
TENANT_QUEUE = _gauge("twinkle_tenant_queue_depth", "tenant", "A tenant's training ops that wait.")

INSTRUMENTS: tuple[Instrument, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Instrument))


def table() -> str:
    """Return the table of docs/observability.md. ``python -m twinkle.server.telemetry`` prints it."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, INSTRUMENTS)])


def _row(instrument: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in instrument.labels)
    return f"| `{instrument.name}` | {instrument.kind} | {labels} | {instrument.meaning} |".replace("  ", " ")
