"""The sections of the configuration that concern the whole server, and the settings of single tenants."""

import ipaddress
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field

from twinkle.images import ImageLimits
from twinkle.server.config.messages import Rule, Section, SparseSection, refusal

_DAY = 86_400.0
_IMAGES = ImageLimits()
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_SQLITE = "sqlite:///"
_POSTGRESQL = "postgresql://"


def _host(text: str) -> str:
    if not _HOST_NAME.fullmatch(text):
        ipaddress.ip_address(text)
    return text


def _public_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError
    return text.rstrip("/")


def _collector_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError
    _ = parts.port  # raises ValueError unless it is a number
    return text


def _directory(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:  # a home directory that does not exist: ~nobody
        raise ValueError from None


def _secret_file(path: Path) -> Path:
    if str(path) in ("", "."):  # a variable that is not set
        raise ValueError
    return _directory(path)


def _not_blank(value: object) -> object:
    """Refuse an empty path: it would be the working directory, and usually comes from a variable that is not set."""
    if isinstance(value, str) and not value.strip():
        raise refusal("the path of a directory")
    return value


def _lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _database_url(text: str) -> str:
    if text.startswith(_POSTGRESQL):
        return _postgresql_url(text)
    if not text.startswith(_SQLITE) or len(text) == len(_SQLITE) or "?" in text or text.endswith((":memory:", "/")):
        raise ValueError
    return text


def _postgresql_url(text: str) -> str:
    """Check the URL of a PostgreSQL database and return it.

    Without a host it means a socket of this machine. Options of libpq may follow, but not a password.
    """
    parts = urlsplit(text)
    database = parts.path.removeprefix("/")
    secrets = [name for name in parse_qs(parts.query, strict_parsing=bool(parts.query)) if "password" in name]
    if not database or "/" in database or parts.netloc.count("@") > 1 or parts.fragment or secrets:
        raise ValueError
    _ = parts.port  # raises ValueError unless it is a number
    return text


Host = Annotated[str, Rule(_host, "a host name or IP address, without scheme, port or brackets")]
PublicUrl = Annotated[str, Rule(_public_url, "http://… or https://… with a host, without query")]
# Not strict: YAML has no paths, only text.
Directory = Annotated[
    Path, Field(strict=False), BeforeValidator(_not_blank), Rule(_directory, "the path of a directory")
]
DatabaseUrl = Annotated[
    str,
    Rule(
        _database_url,
        "sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/DATABASE "
        "(a password with @ as %40, / as %2F and so on)",
    ),
]

CollectorUrl = Annotated[str, Rule(_collector_url, "http://HOST:PORT, or https://HOST:PORT for TLS")]
SecretFile = Annotated[Path, Field(strict=False), Rule(_secret_file, "the path of a file that only its owner reads")]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class HttpOptions(Section):
    """Where the server listens."""

    host: Host = "localhost"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 picks any free port."""

    @property
    def is_loopback(self) -> bool:
        """Return whether the server listens on an address that only this machine can reach."""
        return names_this_machine(self.host)


@lru_cache(maxsize=256)  # it is called for every request
def names_this_machine(host: str) -> bool:
    """Return whether a host name or address can only mean the machine it is used on."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # another host name: it may resolve to anything
        return False


def leads_to_this_machine(host: str) -> bool:
    """Return whether a host in the URL of a client on this machine can only mean this machine.

    Beside the names of this machine these are 0.0.0.0 and [::]: to bind to them means all interfaces, and to connect to
    them means the loopback interface.
    """
    if names_this_machine(host):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


class AuthConfig(Section):
    """Who may use the server."""

    mode: Literal["open", "keys"] | None = None
    """open: any key that begins with tml- is accepted (from Twinkle's own client and on the routes of the OpenAI and
    Anthropic protocols, any key), and each key is a separate tenant. keys: only keys of this server are accepted
    (`twinkle-server keys create`, or a generated one). null: open if only this machine can reach the server (by
    `http_options.host`, and by `public_url` if it is set), or with `allow_open_on_network`; otherwise keys, and the
    first launch generates a key if there is none (see server.md)."""
    allow_open_on_network: bool = False
    """Allow open mode on an address that other machines can reach."""
    jwt: bool = False
    """Clients may exchange their key for a short-lived token (`POST auth/token`) and send that instead. Keys are still
    accepted."""
    jwt_seconds: int = Field(default=3600, ge=600, le=86_400)
    """Lifetime of such a token in seconds; SDKs renew it five minutes before it expires."""


class ClientsConfig(Section):
    """Settings that clients fetch when they connect, and the timeout of their long polls."""

    LONGEST_POLL: ClassVar = 25.0  # SDKs give up on an answer after 45 s, and proxies between often after 30

    batched_sample_polls: bool = True
    """A client polls for all of its samples with one request instead of one per sample. Needed for thousands of samples
    at a time."""
    custom_loss_server_side: bool = True
    """Run losses made with `create_custom_loss` on the server, in one pass. If false, they run in the client, in two
    passes."""
    create_model_by_loading: bool = False
    """A client that starts from a checkpoint creates its model with one request instead of two."""
    long_poll_seconds: float = Field(default=LONGEST_POLL, ge=0.1, le=LONGEST_POLL)
    """Seconds that a long poll waits for a result. After that, the client is told to poll again."""


class LimitsConfig(Section):
    """What one tenant may use, unless a key says otherwise. Queues and unfetched results are counted by base model."""

    max_request_bytes: Count = 64 * 2**20
    """Maximum size of one request body, before and after decompression."""
    max_uploading_bytes_per_tenant: Count = 256 * 2**20
    """Total body size of requests that are not answered yet. A body counts from its start, with the size that
    Content-Length announces. A tenant's only body always fits."""
    max_header_bytes: int = Field(default=65_536, ge=8192)
    """Size of the request line and headers of one request, with or without a key. Not checked on Ray, see server.md."""
    max_connections_per_address: Count = 16_384
    """Connections from one address (IPv6: from one /64 network), with or without a key. Not checked on Ray."""
    max_long_polls_per_tenant: Count = 8192
    """Long polls that wait for results at the same time. Each process counts separately."""
    max_sessions_per_tenant: Count = 1000
    """Active sessions."""
    max_adapters_per_tenant: Count = 30
    """Live adapters: runs that have not been evicted."""
    max_session_rows_per_tenant: Count = 5000
    """Session records, active or ended; training runs have a separate limit of the same size. At the limit, the oldest
    ended records without checkpoints are deleted, if their session was not seen for an hour."""
    max_sampling_session_rows_per_tenant: Count = 20_000
    """Records of sampling sessions. At the limit, the oldest ones whose session has ended and was not seen for an hour
    are deleted."""
    max_queued_ops_per_tenant: Count = 1024
    """Accepted training ops that wait to run."""
    max_queued_bytes_per_tenant: Count = 2**30
    """Bytes of memory that those ops use: their bodies, raw and decoded. The prompts and images of unfinished samples
    have a separate limit of the same size."""
    max_queued_bytes: Count | None = None
    """Bytes of memory that the waiting ops of all tenants use together, per base model. null: a fifth of the memory
    that the process may use."""
    max_training_tokens_per_minute: Count | None = None
    """Tokens that a tenant may train on, including forward passes; null: no limit. A pass with many targets per token
    or with a custom loss counts as the number of plain tokens that would take the same time."""
    max_sampling_tokens_per_minute: Count | None = None
    """Tokens of a tenant's samples and of their prompts; null: no limit. Top-k tokens and target tokens whose
    log-probabilities a request asks for count too."""
    max_checkpoint_bytes_per_tenant: Count | None = None
    """Disk space for a tenant's checkpoints and for the weights that its samplers use; null: no limit."""
    max_waiting_samples_per_tenant: Count = 4096
    """Accepted sampling requests that are not finished."""
    max_journal_bytes_per_tenant: Count = 4 * 2**30
    """Disk space for journalled training requests that a restart would replay, and for stored results."""
    sequence_gap_seconds: Seconds = 360.0
    """Seconds that a training op waits for a missing earlier sequence number before it fails. SDKs retry a request for
    five minutes."""
    max_rank: int = Field(default=128, ge=1, le=512)
    """LoRA rank of one adapter."""
    max_tokens_per_request: Count = 1_048_576
    """Tokens of one training request, summed over its sequences."""
    max_targets_per_token: Count = 1024
    """Targets of one token in a training request (K); never more than the vocabulary."""
    max_targets_per_request: int = Field(default=2**23, ge=1, le=2**24)
    """Targets of one training request, summed over its tokens. The result holds one number for each target."""
    max_images_per_request: Count = 1024
    """Images of one request, summed over its sequences. Their tokens count as tokens, too."""
    max_image_bytes: int = Field(default=_IMAGES.file_bytes, ge=1, le=_IMAGES.file_bytes)
    """Size of one image file. It is checked before anything of the image is read."""
    max_image_pixels: int = Field(default=_IMAGES.pixels, ge=1, le=_IMAGES.pixels)
    """Pixels of one image. They are read from its header, before the image is decoded."""
    max_pixels_per_request: Count = 2**28
    """Pixels of all images of one request. Decoding so many takes a few seconds, and about half a minute if the files
    are made to be slow."""
    max_custom_losses_per_tenant: Count = 100
    """Losses made with `create_custom_loss`. A loss counts until its session ends."""
    max_processors_per_tenant: Count = 20
    """Datasets, loaders, templates and the like that live on the server. On Ray, each replica of processors counts
    separately, here and in the limits of processors below."""
    max_processor_sessions_per_tenant: Count = 4
    """Sessions that have processors. Each of them has its own worker process."""
    processor_memory_gib: float = Field(default=4.0, ge=2)
    """Memory of one such worker process; torch alone needs more than 1 GiB."""
    processor_disk_gib: float = Field(default=20.0, gt=0)
    """Disk space of one such worker process: its datasets and temporary files."""
    max_hub_download_bytes: Count = 2**30
    """Size of a hub repository, not counting weights, from which a template may load its tokenizer."""
    max_referenced_batch_bytes_per_tenant: Count = 256 * 2**20
    """Bytes of JSON of the batches that dataloaders keep so that later requests can refer to them."""
    max_referenced_batch_bytes: Count = 2 * 2**30
    """The same limit for all tenants together."""
    processor_call_seconds: Seconds = 600.0
    """Seconds that a call of a processor may take. After that, its worker process is killed."""
    session_timeout_seconds: Seconds = 1800.0
    """Seconds without a heartbeat after which a session without unfinished ops expires and its adapters are evicted.
    Their state stays on disk."""
    adapter_max_lifetime_seconds: Seconds | None = None
    """Seconds after its creation at which an adapter is evicted, even if its client is alive; time while the server is
    down counts. Ops that it accepted before and that wait for no missing one are executed first, and its state stays on
    disk. null: an adapter lives as long as its session."""
    silent_session_seconds: Seconds = 60.0
    """Seconds without a heartbeat after which a session counts as silent (SDKs send a heartbeat every 10 s). At the
    limit of adapters or sessions, a tenant's silent sessions without unfinished ops make room first; adapters of a
    session that still sends ops stay. Samples of a silent session that no client polls for are cancelled."""
    parked_adapter_seconds: Seconds = 7 * _DAY
    """Seconds that the last state of an evicted adapter stays on disk as a checkpoint, so that a client can resume."""
    result_retention_seconds: Seconds = 600.0
    """Seconds that a result is kept after a client has first fetched it."""
    unfetched_result_seconds: Seconds = _DAY
    """Seconds that a result is kept if no client fetches it."""
    max_unfetched_result_bytes: Count = 2**30
    """Bytes of results that the tenant's clients have not completely fetched yet."""
    max_result_bytes: Count | None = None
    """Bytes of results of all tenants in the memory of one process, fetched or not. Beyond this limit, training results
    are kept on disk only, and new samples are refused, because samples are never stored on disk. null: a fifth of the
    memory that the process may use."""
    max_host_adapter_bytes: Count | None = None
    """Bytes of the adapters of one base model in host memory. Beyond this limit, idle adapters are offloaded to disk
    until they are used again. null: a quarter of the memory that the process may use."""
    memory_reserve_bytes: Count | None = None
    """Bytes of memory of the machine or control group to keep free. New work that would need them is refused with 503.
    null: a twentieth of that memory, at least 256 MiB and at most 4 GiB, but never more than a quarter of it."""
    max_json_result_bytes: Count = 256 * 2**20
    """Size of one JSON answer that holds results. In Tinker's protocol it is estimated beforehand, and a larger result
    is available as protobuf; a larger answer to a native sampling request is refused."""
    max_logits_per_request: int = Field(default=2**20, ge=1, le=2**26)
    """Logits that one native request may compute for `return_logits` or for a loss on logits: tokens times the size of
    the vocabulary. Those of one sequence must also fit into half of the model's memory for activations."""
    max_unused_versions_per_session: Count | None = 64
    """Unnamed sampler versions of an active session that are kept although nobody samples from them: the newest ones.
    null: all."""
    unused_version_seconds: Seconds = 600.0
    """Seconds without a sample after which an unnamed sampler version counts as unused. One that is sampled from is
    kept, however many newer ones there are."""
    sampler_version_retention_seconds: Seconds = _DAY
    """Seconds that an unnamed sampler version is kept after its session has ended."""
    ended_session_retention_seconds: Seconds = 30 * _DAY
    """Seconds that the record of an ended session is kept, with its runs, curves and sampling sessions. Runs that have
    checkpoints are kept as long as the checkpoints."""
    audit_retention_seconds: Seconds = 90 * _DAY
    """Seconds that entries of the audit log are kept, at most 100,000 for each tenant."""

    @property
    def version_mark_seconds(self) -> float:
        """Return how long a sampler does not mark a version's files as used again after it has marked them."""
        return min(30.0, self.unused_version_seconds / 4)


def _limit(what: str) -> Any:
    return Field(default=None, description=f"{what}; null: as in `limits`.")


class SpecialLimits(SparseSection):
    """Limits of one tenant. They replace the limits of the same names under `limits`."""

    max_uploading_bytes_per_tenant: Count | None = _limit("Bodies of requests that are not answered yet")
    max_long_polls_per_tenant: Count | None = _limit("Long polls that wait for results")
    max_sessions_per_tenant: Count | None = _limit("Active sessions")
    max_adapters_per_tenant: Count | None = _limit("Live adapters")
    max_session_rows_per_tenant: Count | None = _limit("Session records, and as many runs")
    max_sampling_session_rows_per_tenant: Count | None = _limit("Records of sampling sessions")
    max_queued_ops_per_tenant: Count | None = _limit("Training ops that wait to run")
    max_queued_bytes_per_tenant: Count | None = _limit("Memory of those ops, and as much of unfinished samples")
    max_training_tokens_per_minute: Count | None = _limit("Training tokens per minute")
    max_sampling_tokens_per_minute: Count | None = _limit("Tokens of samples and their prompts per minute")
    max_checkpoint_bytes_per_tenant: Count | None = _limit("Disk space for checkpoints")
    max_journal_bytes_per_tenant: Count | None = _limit("Disk space for journalled requests and results")
    max_waiting_samples_per_tenant: Count | None = _limit("Sampling requests that are not finished")
    max_unfetched_result_bytes: Count | None = _limit("Results not fetched yet")


class TenantConfig(Section):
    """The share and the limits of one tenant."""

    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    """Share of the device while other tenants of the same priority have work too: twice the weight, twice the
    tokens."""
    priority: Literal["low", "normal", "high"] = "normal"
    """Tenants of a higher priority go first. Lower priorities still get a turn from time to time."""
    limits: SpecialLimits = SpecialLimits()
    """Limits for this tenant only."""


class PersistenceConfig(Section):
    """Where the server's records are kept: sessions, runs, futures, keys, the index of the journal and the like."""

    url: DatabaseUrl | None = Field(default=None, repr=False)  # it may hold a password
    """Database of the server's state; null: `state.db` in `data_dir`. Everything else is in `data_dir` in any case."""

    @property
    def path(self) -> Path | None:
        """Return the configured SQLite file; None if none is configured."""
        if self.url is None or self.url.startswith(_POSTGRESQL):
            return None
        return _directory(Path(self.url.removeprefix(_SQLITE)))

    def url_in(self, data_dir: Path) -> str:
        """Return the database URL of a server with this ``data_dir``. It may hold a password: do not show it."""
        if self.url is not None and self.url.startswith(_POSTGRESQL):
            return self.url
        return f"{_SQLITE}{self.path or data_dir / 'state.db'}"


class TelemetryConfig(Section):
    """What operators see of the server: OpenTelemetry export, and who may read /metrics."""

    EXPORT_KEYS: ClassVar = ("service_name", "otlp_endpoint", "debug", "export_interval_ms", "resource_attributes")

    enabled: bool = False
    """Export traces and metrics by OTLP."""
    service_name: str = Field(default="twinkle-server", min_length=1)
    """Service name in traces and metrics."""
    otlp_endpoint: CollectorUrl = "http://localhost:4317"
    """OTLP collector (gRPC)."""
    debug: bool = False
    """Write to the log what would be exported, instead of sending it."""
    export_interval_ms: Count = 30_000
    """Milliseconds between two exports of metrics."""
    resource_attributes: dict[str, str] = Field(default_factory=dict)
    """Attributes added to everything that is exported."""
    metrics: Literal["local", "token", "off"] = "local"
    """Who may read /metrics. local: callers on this machine, and others with the token; with `public_url` or behind a
    proxy no caller counts as local. token: only callers with the token. off: nobody."""
    metrics_token_file: SecretFile | None = None
    """File with the token that a scraper sends as Authorization: Bearer, at least 16 characters. It is read at
    start."""
    tenants_in_metrics: int = Field(default=0, ge=0, le=1000)
    """How many tenants get their own usage series; all others are summed up as `other`. 0: no series by tenant."""
    stuck_step_seconds: Seconds = 600.0
    """Seconds. If a step on the device takes longer than this, the deep health check fails."""


class LoggingConfig(Section):
    """The log on stderr. --log-level and --log-format on the command line replace these keys."""

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower_case)] = "info"
    """Lowest level that is logged, in lower or upper case."""
    format: Literal["text", "json"] = "text"
    """json: one JSON object per line, with the ids of the request that the line is about."""
