"""The nouns of the service. Nothing here knows HTTP, the database or torch."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from twinkle.errors import LimitExceededError, UserError
from twinkle.loss.graph.nodes import LossGraph
from twinkle.model.csr import Csr
from twinkle.model.types import AdamParams, Datum, IntArray, LoraSpec, Preference

Metadata = Mapping[str, str]

# What a price counts, in round figures. A token of a small model takes some 100 microseconds on a CPU.
TARGETS_A_TOKEN = 128  # further targets of a token: gathering, its gradient and its part of the result
NUMBERS_A_TOKEN = 2**15  # numbers that a custom loss computes, each as dear as a sum
JSON_NUMBER_BYTES = 24
OBJECT_BYTES = 1024  # of an op or a datum beside its arrays


class Tally(Counter[str]):
    """Counts by name, of tenants for instance. A name whose count is 0 is not kept: tenants come and go for ever."""

    def __setitem__(self, name: str, count: int) -> None:
        if count:
            super().__setitem__(name, count)
        else:
            del self[name]

    @contextmanager
    def counting(self, name: str, count: int = 1) -> Iterator[None]:
        """Add ``count`` as long as this is entered."""
        self[name] += count
        try:
            yield
        finally:
            self[name] -= count


class OpKind(StrEnum):
    """What a tenant may ask of an adapter. All but the two passes are barriers for their own adapter.

    A verb is whatever the native protocol asks for beside passes and files.
    """

    CREATE = "create"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save"
    PUBLISH = "publish"
    LOAD = "load"
    VERB = "verb"
    EXPORT = "export"
    CREATE_FROM = "create_from"

    @property
    def is_pass(self) -> bool:
        return self in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)

    @property
    def creates(self) -> bool:
        """Whether its adapter begins with it."""
        return self in (OpKind.CREATE, OpKind.CREATE_FROM)

    @property
    def adds_memory(self) -> bool:
        """Whether it is new work that needs memory, rather than the end of work that has some."""
        return self.is_pass or self.creates or self is OpKind.LOAD

    @property
    def takes_files(self) -> bool:
        """Whether it waits for disk and database."""
        return self in (OpKind.SAVE, OpKind.PUBLISH, OpKind.LOAD, OpKind.EXPORT, OpKind.CREATE_FROM)


# --- what an op carries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """What an op costs, known before anything of it is allocated. Limits, queues and the scheduler count it.

    ``work`` is the time it takes on the device, in tokens of a plain pass: width, further passes and custom losses
    count too. ``held_bytes`` is the memory of the op while it waits, ``result_bytes`` that of its result.
    """

    tokens: int = 0
    work: int = 0
    held_bytes: int = 0
    result_bytes: int = 0

    @property
    def cost(self) -> int:
        """Return what it counts in batches, in shares and against a minute's tokens."""
        return max(self.tokens, self.work)


@dataclass(frozen=True)
class CreateAdapter:
    spec: LoraSpec


@dataclass(frozen=True)
class CustomLossUse:
    """A loss that the tenant created. ``inputs``: for every datum all arrays it brought, by name.

    ``graph`` is what ``loss_id`` stands for, once somebody looked.
    """

    loss_id: str
    inputs: tuple[Mapping[str, NDArray[Any] | Csr], ...]
    graph: LossGraph | None = None
    work: int = 0  # numbers that the graph computes for all datums, as far as shapes tell; known with the graph


@dataclass(frozen=True)
class TrainPass:
    """One forward or forward_backward request. ``custom`` or ``preference`` comes in the place of a named loss.

    ``base_model``: without the adapter, in a forward alone.
    """

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, float]
    custom: CustomLossUse | None = None
    preference: Preference | None = None
    base_model: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def price(self) -> Price:
        """Return its price by its shapes: width, a second look for a loss of its own, and what that loss computes."""
        tokens, targets = self.tokens, sum(datum.cells for datum in self.data)
        work = tokens + max(0, targets - tokens) // TARGETS_A_TOKEN
        arrays = sum(datum.nbytes + OBJECT_BYTES for datum in self.data)
        if self.custom is not None or self.preference is not None:
            work += tokens // 3
        if self.custom is not None:  # its targets are among its inputs
            work += self.custom.work // NUMBERS_A_TOKEN
            arrays += sum(array.nbytes for inputs in self.custom.inputs for array in inputs.values())
        if self.preference is not None:
            arrays += sum(each.nbytes for each in self.preference.ref_logps)
        # A result has 4 bytes a target; JSON clients also get each target's part of the loss.
        return Price(tokens, work, arrays, 8 * targets + 64 * len(self.data))


@dataclass(frozen=True)
class OptimStep:
    params: AdamParams


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True)
class SaveWeights:
    """A checkpoint. The files of external_weights are encrypted to ``recipients``, if there are any."""

    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata = field(default_factory=dict)
    kind: CheckpointKind = "weights"
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishSampler:
    """The weights of a sampling session of its own, which is number ``session_seq`` of its session."""

    session_seq: int


@dataclass(frozen=True)
class LoadWeights:
    """Of an op that creates its adapter: the adapter begins as this checkpoint, and has the shape of its run."""

    path: str
    optimizer: bool


@dataclass(frozen=True)
class CreateNative:
    """An adapter for the library's verbs. ``config``: the fields of PEFT's LoraConfig that it was asked for with."""

    spec: LoraSpec
    config: Mapping[str, object]
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class NativePass:
    """A pass through the library's verbs: forward, forward_only, forward_backward, or backward, which has no rows."""

    verb: str
    rows: tuple[Mapping[str, IntArray], ...]  # (T,) each
    options: Mapping[str, object]  # of the verb
    loss_arguments: Mapping[str, object]

    @property
    def tokens(self) -> int:
        return sum(len(row["input_ids"]) for row in self.rows)

    @property
    def price(self) -> Price:
        """Return its price by its shapes. A result has log-probabilities and entropies, as JSON."""
        tokens, arrays = self.tokens, sum(values.nbytes for row in self.rows for values in row.values())
        return Price(tokens, tokens, arrays + OBJECT_BYTES * len(self.rows), JSON_NUMBER_BYTES * 2 * tokens)


@dataclass(frozen=True)
class NativeVerb:
    """Any other verb of the library, with its arguments. ``steps``: it is a step of the optimizer."""

    verb: str
    arguments: Mapping[str, object]
    steps: bool = False


@dataclass(frozen=True)
class NativeSave:
    """``sampler``: weights alone, for sampling; only the last few of a name are kept."""

    name: str  # empty: one is made
    optimizer: bool
    sampler: bool
    consumed_train_samples: int = 0
    interval: int = 1
    ttl_seconds: int | None = None


@dataclass(frozen=True)
class NativeLoad:
    """``path``: a checkpoint's address, or a directory that tenants may name. ``verb``: load or resume."""

    verb: str
    path: str
    optimizer: bool


@dataclass(frozen=True)
class Refused:
    """A request whose body was understood well enough to know its place in the sequence, and is wrong.

    ``limit``: the key in the configuration of the limit that it exceeds, if that is what is wrong.
    """

    message: str
    limit: str | None = None

    @classmethod
    def because(cls, error: UserError) -> "Refused":
        return cls(str(error), error.key if isinstance(error, LimitExceededError) else None)


Pass = TrainPass | NativePass
Native = CreateNative | NativePass | NativeVerb | NativeSave | NativeLoad
Files = SaveWeights | PublishSampler | LoadWeights
Payload = CreateAdapter | TrainPass | OptimStep | Files | Native | Refused


@dataclass(frozen=True)
class Op:
    """One request against an adapter. ``body`` is what the journal keeps of it, so that it can be replayed.

    ``sent_digest`` is the digest of what the client sent, where the body is not exactly that.
    """

    adapter_id: str
    seq: int
    kind: OpKind
    payload: Payload
    body: bytes
    sent_digest: bytes | None = None

    @cached_property
    def request_id(self) -> str:
        return f"{self.adapter_id}:{self.seq}"

    @cached_property
    def digest(self) -> bytes:
        """Tells whether the same number came with the same body."""
        return self.sent_digest or digest(self.body)

    @property
    def custom_loss(self) -> CustomLossUse | None:
        return self.payload.custom if isinstance(self.payload, TrainPass) else None

    @cached_property
    def price(self) -> Price:
        """By the shapes of what it carries, which are known when its body is decoded. Only a pass has tokens."""
        price = self.payload.price if isinstance(self.payload, Pass) else Price()
        held_bytes = price.held_bytes + len(self.body) + OBJECT_BYTES
        return Price(price.tokens, price.work, held_bytes, price.result_bytes)

    @property
    def is_step(self) -> bool:
        """Of the optimizer."""
        return self.kind is OpKind.OPTIM_STEP or (isinstance(self.payload, NativeVerb) and self.payload.steps)

    @property
    def changes_weights(self) -> bool:
        return self.is_step or self.kind.creates or self.kind is OpKind.LOAD


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


@dataclass(frozen=True)
class Budget:
    """Bytes of one resource that the whole server shares: in use, and the limit. For /metrics and `status`."""

    resource: str
    used: int
    limit: int


# --- outcomes ---------------------------------------------------------------------------------------------------------

Category = Literal["user", "server", "unknown"]


class Encoding(StrEnum):
    """How a result's bytes are to be read."""

    JSON = "application/json"
    PROTOBUF = "application/x-protobuf"


class Ending(StrEnum):
    """How an op ended, as far as its outcome does not say it and a replay of the journal must know."""

    RAN = "ran"
    REFUSED = "refused"  # it never ran
    DROPPED = "dropped"  # it failed, and the gradient since the last optimizer step was dropped with it


@dataclass(frozen=True)
class Outcome:
    """The end of a future, encoded once.

    ``category`` is None of a success. Of a failure it says whose mistake that was, and the body is JSON with the keys
    error and category, as clients get it.
    """

    encoding: Encoding
    body: bytes
    category: Category | None = None
    ending: Ending = Ending.RAN

    @property
    def failed(self) -> bool:
        return self.category is not None

    @property
    def message(self) -> str:
        """Return what went wrong. Only a failure has a message."""
        return str(json.loads(self.body)["error"])

    @classmethod
    def failure(cls, message: str, category: Category, ending: Ending = Ending.RAN) -> "Outcome":
        body = json.dumps({"error": message, "category": category}, separators=(",", ":")).encode()
        return cls(Encoding.JSON, body, category, ending)

    @classmethod
    def from_record(cls, encoding: Encoding, body: bytes, failed: bool, ending: Ending | None) -> "Outcome":
        """Return an outcome as the journal has it, which keeps the category of a failure in its body alone."""
        category = json.loads(body)["category"] if failed else None
        return cls(encoding, body, category, ending or Ending.RAN)


# --- records: what the state keeps ------------------------------------------------------------------------------------
# Times are seconds since the epoch.


FinishReason = Literal["success", "errored", "interrupted"]


@dataclass(frozen=True)
class SessionRecord:
    """``finish_reason``: what its client said when it was done; None of one that goes on or fell silent."""

    session_id: str
    tenant_id: str
    created_at: float
    last_seen: float
    state: Literal["active", "finished", "expired"] = "active"
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    finish_detail: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """An adapter's life, which Tinker calls a training run. ``base_model`` is the name the client used."""

    run_id: str
    session_id: str
    number: int  # model_seq_id
    tenant_id: str
    base_model: str
    model_name: str  # the served model
    spec: LoraSpec
    created_at: float
    last_request_at: float
    state: Literal["live", "failed", "parked"] = "live"
    user_metadata: Metadata = field(default_factory=dict)
    note: str | None = None  # why it failed, or how to resume
    replica: str = ""  # which of several replicas of the model has it


@dataclass(frozen=True)
class CheckpointRecord:
    """``tinker://{run_id}/{kind}/{name}``; the files are in ``directory``, relative to the data directory."""

    run_id: str
    kind: CheckpointKind
    name: str
    tenant_id: str
    request_id: str  # of the op that wrote it
    directory: str
    created_at: float
    size_bytes: int
    expires_at: float | None = None
    public: bool = False
    user_metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingSessionRecord:
    """``version_id`` names the immutable weights (None: the base model) and ``directory`` where they lie.

    ``size_bytes``: of the files there, if they are the tenant's own.
    """

    sampling_session_id: str
    session_id: str
    number: int  # sampling_session_seq_id
    tenant_id: str
    base_model: str
    model_name: str
    model_path: str | None
    version_id: str | None
    directory: str | None
    created_at: float
    replica: str = ""  # which of several replicas of the model samples
    size_bytes: int = 0


@dataclass(frozen=True)
class CustomLossRecord:
    """A loss of a session's own. ``body`` is what created it; ``error`` says why it is none."""

    loss_id: str
    session_id: str
    number: int  # custom_loss_seq_id
    tenant_id: str
    digest: bytes  # of the body as it came
    body: bytes
    error: str | None
    created_at: float


@dataclass(frozen=True)
class BlobRef:
    """Where some bytes lie in the journal's segment files."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True)
class OpRecord:
    """An op in the journal. ``outcome`` is None until it is done."""

    adapter_id: str
    seq: int
    kind: OpKind
    digest: bytes  # of the body: the same number with another body is refused
    body: BlobRef
    accepted_at: float
    outcome: BlobRef | None = None
    encoding: Encoding | None = None
    failed: bool = False
    ending: Ending | None = None  # None: the outcome was recorded by a version that did not record this


@dataclass(frozen=True)
class SnapshotRecord:
    """An adapter on disk with all ops up to and including ``seq`` applied."""

    adapter_id: str
    seq: int
    directory: str  # relative to the data directory
    failed_seq: int | None  # a failed forward_backward in the open window
    taken_at: float


# --- what is known of a run over time: points of named numbers --------------------------------------------------------

Source = Literal["server", "client"]  # measured by the server, or logged by the client


@dataclass(frozen=True)
class MeasuredStep:
    """One optimizer step of a run, by the op that took it. ``at``: seconds since the epoch."""

    run_id: str
    seq: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class MetricPoint:
    """``number`` counts the points of a run. ``step``: the run's optimizer steps, or what the client calls a step."""

    number: int
    time: float
    source: Source
    step: int
    values: Mapping[str, float]
