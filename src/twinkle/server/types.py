"""The data types of the server: ops, outcomes, prices and stored records. Nothing here knows HTTP, the database or
torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, LimitExceededError, UserError
from twinkle.images import EncodedImage, SentImages
from twinkle.images.sent import NO_IMAGES
from twinkle.loss.graph.nodes import LossGraph
from twinkle.model.csr import Csr
from twinkle.model.types import (
    LARGE_ROUTE,
    AdamParams,
    Datum,
    FullSpec,
    Image,
    IntArray,
    LoraSpec,
    Preference,
    TrainingSpec,
)

Metadata = Mapping[str, str]

# How a price converts other work into tokens, in round figures: this many targets or numbers cost as much as one token.
# A token of a small model takes some 100 microseconds on a CPU.
TARGETS_A_TOKEN = 128  # targets beyond one per token: gathering them, their gradient and their part of the result
NUMBERS_A_TOKEN = 2**15  # numbers that a custom loss computes, each counted as one addition
JSON_NUMBER_BYTES = 24  # one number in a JSON result
# Pixels that are decoded and seen by the vision tower. An image token stands for about 1000 pixels, so an image costs a
# quarter more than its tokens; one that is shrunk costs what decoding it does.
PIXELS_A_TOKEN = 4096
_PIXEL_BYTES = 3 * 32**2  # memory of a decoded image, a token: at most 32 × 32 pixels
ROUTE_BYTES = 3 * LARGE_ROUTE  # of a token's routes in a result, packed: two bytes a number as base64
_LARGE_VOCABULARY = 2**18
_PRICED_LOGITS = 2**20  # as limits.max_logits_per_request by default
OBJECT_BYTES = 1024  # memory of an op or a datum in addition to its arrays


class Tally(Counter[str]):
    """Counts by name, for example by tenant id. A name is removed when its count is 0, so that memory does not grow
    with every tenant that was ever seen.
    """

    def __setitem__(self, name: str, count: int) -> None:
        if count:
            super().__setitem__(name, count)
        else:
            del self[name]

    @contextmanager
    def counting(self, name: str, count: int = 1) -> Iterator[None]:
        """Add ``count`` to the name's count for the duration of a ``with`` block."""
        self[name] += count
        try:
            yield
        finally:
            self[name] -= count


class OpKind(StrEnum):
    """The kinds of ops. All except the two passes are barriers for their own adapter.

    A verb is an op of the native protocol that neither creates an adapter nor is a pass, a save or a load.
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
        """Return whether this op creates its adapter."""
        return self in (OpKind.CREATE, OpKind.CREATE_FROM)

    @property
    def adds_memory(self) -> bool:
        """Return whether this op is new work that needs memory. The other kinds finish work that already holds some."""
        return self.is_pass or self.creates or self is OpKind.LOAD

    @property
    def takes_files(self) -> bool:
        """Return whether this op waits for the disk and the database."""
        return self in (OpKind.SAVE, OpKind.PUBLISH, OpKind.LOAD, OpKind.EXPORT, OpKind.CREATE_FROM)


def image_bytes(images: Sequence[Image]) -> int:
    """Return the memory of a request's images: as they are, and as they will be when files among them are decoded.

    An image that several sequences share counts once, because it is decoded once.
    """
    present = {id(image.pixels): image.nbytes for image in images}
    decoded = {image.digest: _PIXEL_BYTES * image.tokens for image in images if isinstance(image.pixels, EncodedImage)}
    return sum(present.values()) + sum(decoded.values())


# --- what an op carries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """What an op or sample costs, known before memory is allocated for its result. Limits, queues and the scheduler
    count it.

    ``work`` is the time that the op takes on the device, in units of one token of a plain pass. Several targets per
    token, a second forward pass and the computation of a custom loss add to it. ``held_bytes`` is the memory of the op
    while it waits, ``result_bytes`` the memory of its result.
    """

    tokens: int = 0
    work: int = 0
    held_bytes: int = 0
    result_bytes: int = 0

    @property
    def cost(self) -> int:
        """Return the tokens that count in batches, in shares and against the limit on tokens per minute."""
        return max(self.tokens, self.work)


@dataclass(frozen=True)
class CreateAdapter:
    spec: TrainingSpec


@dataclass(frozen=True)
class CustomLossUse:
    """The use of a tenant's custom loss in a pass. ``inputs`` has, for every datum, its arrays by name.

    ``graph`` is the loss that ``loss_id`` names; it is None until the loss has been looked up.
    """

    loss_id: str
    inputs: tuple[Mapping[str, NDArray[Any] | Csr], ...]
    graph: LossGraph | None = None
    work: int = 0  # numbers that the graph computes for all datums, estimated from shapes; 0 until ``graph`` is set


@dataclass(frozen=True)
class SentSequence:
    """One sequence of a pass: ``sent`` are its images as they were sent, ``images`` those placed among its tokens."""

    tokens: IntArray
    sent: SentImages
    images: tuple[Image, ...]


def _still_sent(sequences: Sequence[SentSequence]) -> tuple[SentImages, ...]:
    """Return the images of sequences as they were sent; none if all are decoded."""
    sent = tuple(each.sent for each in sequences)
    return sent if any(sent) else ()


@dataclass(frozen=True)
class TrainPass:
    """One forward or forward_backward request. ``custom`` or ``preference``, if set, replaces the named loss.

    ``without_adapter``: run the base model without the adapter. Only a forward request may set it.

    ``images``: those of each datum as they were sent, until they are placed among its tokens and decoded; then, and
    without images, it is empty. ``pixels``: how many the files of all placed images have, before they are resized.
    """

    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, float]
    custom: CustomLossUse | None = None
    preference: Preference | None = None
    without_adapter: bool = False
    images: tuple[SentImages, ...] = ()
    pixels: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def sequences(self) -> "list[SentSequence]":
        """Return the sequences with their images, as far as these are placed."""
        pairs = zip(self.data, self.images or [NO_IMAGES] * len(self.data), strict=True)
        return [SentSequence(datum.tokens, sent, tuple(datum.images)) for datum, sent in pairs]

    def placed(self, sequences: "Sequence[SentSequence]", pixels: int) -> "TrainPass":
        """Return the pass with images placed among its tokens, or decoded: then they are not among ``images``."""
        data = [
            replace(datum, tokens=each.tokens, images=each.images)
            for datum, each in zip(self.data, sequences, strict=True)
        ]
        return replace(self, data=tuple(data), images=_still_sent(sequences), pixels=pixels)

    @property
    def price(self) -> Price:
        """Return the price, computed from shapes alone.

        Targets beyond one per token add work. So do a custom or preference loss, which may need a second forward pass,
        and the numbers that a custom loss computes.
        """
        tokens, targets = self.tokens, sum(datum.cells for datum in self.data)
        work = tokens + max(0, targets - tokens) // TARGETS_A_TOKEN + self.pixels // PIXELS_A_TOKEN
        arrays = sum(datum.nbytes + OBJECT_BYTES for datum in self.data)
        arrays += image_bytes([image for datum in self.data for image in datum.images])
        if self.custom is not None or self.preference is not None:
            work += tokens // 3
        if self.custom is not None:  # the inputs include the targets
            work += self.custom.work // NUMBERS_A_TOKEN
            arrays += sum(array.nbytes for inputs in self.custom.inputs for array in inputs.values())
        if self.preference is not None:
            arrays += sum(each.nbytes for each in self.preference.ref_logps)
        # A result has 4 bytes per target; JSON clients also get each target's part of the loss, 4 bytes more.
        return Price(tokens, work, arrays, 8 * targets + 64 * len(self.data))


@dataclass(frozen=True)
class OptimStep:
    params: AdamParams


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True)
class SaveWeights:
    """The payload of a save. The files of kind external_weights are encrypted to ``recipients``, if there are any."""

    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata = field(default_factory=dict)
    kind: CheckpointKind = "weights"
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishSampler:
    """The payload of an op that publishes the present weights as a new sampling session.

    ``session_seq`` is the number of the sampling session within the client's session.
    """

    session_seq: int


@dataclass(frozen=True)
class LoadWeights:
    """The payload of a load. In an op that creates its adapter (``CREATE_FROM``), the new adapter starts from this
    checkpoint and has the shape (``spec``) of its run.
    """

    path: str
    optimizer: bool


@dataclass(frozen=True)
class CreateNative:
    """The payload that creates an adapter of the native protocol. ``config``: PEFT LoraConfig fields of the request;
    empty for a run that trains all parameters.
    """

    spec: TrainingSpec
    config: Mapping[str, object]
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class NativePass:
    """A pass of the native protocol: the verb forward, forward_only, forward_backward, or backward.

    backward has no rows: it belongs to the forward before it.

    ``images``: those of each row, placed among its tokens; empty if no row has some. ``sent``: as they were sent, until
    they are placed and decoded. ``pixels``: how many their files have, before they are resized.
    """

    verb: str
    rows: tuple[Mapping[str, IntArray], ...]  # (T,) each
    options: Mapping[str, object]  # the verb's other arguments
    loss_arguments: Mapping[str, object]
    sent: tuple[SentImages, ...] = ()
    images: tuple[tuple[Image, ...], ...] = ()
    pixels: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(row["input_ids"]) for row in self.rows)

    @property
    def sequences(self) -> "list[SentSequence]":
        """Return the rows with their images, as far as these are placed."""
        count = len(self.rows)
        every = zip(self.rows, self.sent or [NO_IMAGES] * count, self.images or [()] * count, strict=True)
        return [SentSequence(row["input_ids"], sent, images) for row, sent, images in every]

    def placed(self, sequences: "Sequence[SentSequence]", pixels: int) -> "NativePass":
        """Return the pass with its images placed, or decoded: then they are not among ``sent``.

        InvalidInputError: a row has one token for each image. Its labels have one number for each token already, so
        the tokens of its images must all be there.
        """
        for row, each in zip(self.rows, sequences, strict=True):
            if len(each.tokens) != len(row["input_ids"]):
                given = f"{len(row['input_ids'])} tokens"
                allowed = f"{len(each.tokens)} tokens: as many image tokens as the images become"
                raise InvalidInputError(each.sent.field, given, allowed)
        images = tuple(each.images for each in sequences)
        return replace(self, images=images, sent=_still_sent(sequences), pixels=pixels)

    @property
    def price(self) -> Price:
        """Return the price, computed from shapes alone. A result has log-probabilities and entropies, as JSON.

        Logits are priced for a large vocabulary, since the payload does not know the model's.
        """
        tokens, arrays = self.tokens, sum(values.nbytes for row in self.rows for values in row.values())
        arrays += image_bytes([image for images in self.images for image in images])
        numbers = 2 * tokens
        if self.options.get("return_logits") is True:
            numbers += min(tokens * _LARGE_VOCABULARY, _PRICED_LOGITS)
        result_bytes = JSON_NUMBER_BYTES * numbers
        if self.options.get("router_replay_action") is not None:  # recorded, and if replayed, they are in ``arrays``
            result_bytes += tokens * ROUTE_BYTES
        work = tokens + self.pixels // PIXELS_A_TOKEN
        return Price(tokens, work, arrays + OBJECT_BYTES * len(self.rows), result_bytes)


@dataclass(frozen=True)
class NativeVerb:
    """A verb of the native protocol that is not a pass, a save or a load, with its arguments.

    ``steps``: the verb is an optimizer step.
    """

    verb: str
    arguments: Mapping[str, object]
    steps: bool = False


@dataclass(frozen=True)
class NativeSave:
    """A save of the native protocol. ``sampler``: save only weights, for sampling; of such checkpoints of a run with
    one name, the last two are kept.
    """

    name: str  # empty: the server makes a name
    optimizer: bool
    sampler: bool
    consumed_train_samples: int = 0
    interval: int = 1  # save only after every so many optimizer steps
    ttl_seconds: int | None = None


@dataclass(frozen=True)
class NativeLoad:
    """A load of the native protocol. ``path``: a checkpoint's address, or a directory that the server's configuration
    allows. ``verb``: load or resume_from_checkpoint.
    """

    verb: str
    path: str
    optimizer: bool


@dataclass(frozen=True)
class Refused:
    """The payload of an op that must fail: its body is invalid, but its sequence number could be read. In a replay also
    a placeholder for a body that was not read.

    ``limit``: the configuration key of the limit that the request exceeds, if that is the reason.
    """

    message: str
    limit: str | None = None

    @classmethod
    def because(cls, error: UserError) -> "Refused":
        """Return the payload that stands for this error."""
        return cls(str(error), error.key if isinstance(error, LimitExceededError) else None)


Pass = TrainPass | NativePass
Native = CreateNative | NativePass | NativeVerb | NativeSave | NativeLoad
Files = SaveWeights | PublishSampler | LoadWeights
Payload = CreateAdapter | TrainPass | OptimStep | Files | Native | Refused


# The number of an op whose client sent none, until the training service numbers it. The creation of a run, which always
# has a number, has the same one.
UNNUMBERED = 0
# The digest of an op that the server numbered. It is not compared with that of other requests: without a number of its
# client, a request that is sent again cannot be told from a new one.
NUMBERED_HERE = bytes(16)


@dataclass(frozen=True)
class Op:
    """One request that concerns a run and has a place in its sequence. ``body`` is what the journal stores for replay.

    ``sent_digest`` is the digest of what the client sent, where it is not the digest of ``body``.
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
        """Return the digest by which a repeated request is told from another one with the same sequence number.

        Publications are not compared: when the SDK sends one again because the answer was lost, it counts the number of
        the sampling session on, so that the body differs. The first request's session is the answer to both.
        """
        body = b"publish" if isinstance(self.payload, PublishSampler) else self.body
        return self.sent_digest or digest(body)

    @property
    def waits_for_images(self) -> bool:
        """Return whether it has images that are not placed among its tokens, or not decoded."""
        if isinstance(self.payload, NativePass):
            return bool(self.payload.sent)
        return isinstance(self.payload, TrainPass) and bool(self.payload.images)

    @property
    def custom_loss(self) -> CustomLossUse | None:
        return self.payload.custom if isinstance(self.payload, TrainPass) else None

    @cached_property
    def price(self) -> Price:
        """Return the price, computed from the shapes in the payload and the body's length. Only a pass has tokens."""
        price = self.payload.price if isinstance(self.payload, Pass) else Price()
        held_bytes = price.held_bytes + len(self.body) + OBJECT_BYTES
        return Price(price.tokens, price.work, held_bytes, price.result_bytes)

    @property
    def is_step(self) -> bool:
        """Return whether this op is an optimizer step."""
        return self.kind is OpKind.OPTIM_STEP or (isinstance(self.payload, NativeVerb) and self.payload.steps)

    @property
    def changes_weights(self) -> bool:
        return self.is_step or self.kind.creates or self.kind is OpKind.LOAD


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


@dataclass(frozen=True)
class Budget:
    """A limit in bytes on one resource, such as the memory of queued ops, with the bytes in use.

    Shown in /metrics and `status`.
    """

    resource: str
    used: int
    limit: int


# --- outcomes ---------------------------------------------------------------------------------------------------------

Category = Literal["user", "server", "unknown"]


class Encoding(StrEnum):
    """The content type of an outcome's bytes."""

    JSON = "application/json"
    PROTOBUF = "application/x-protobuf"


class Ending(StrEnum):
    """How an op ended. The outcome's bytes do not say this, but a replay of the journal must know it."""

    RAN = "ran"
    REFUSED = "refused"  # the op never ran
    DROPPED = "dropped"  # the op failed, and the gradient since the last optimizer step was dropped with it


@dataclass(frozen=True)
class Outcome:
    """The end of an op or sample: the encoded answer, and whether it succeeded.

    ``category`` is None for a success. For a failure it says who has to act (the user or the server), and the body is
    JSON with the keys ``error`` and ``category``, as clients get it.
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
        """Return the error message. Only a failure has one."""
        return str(json.loads(self.body)["error"])

    @classmethod
    def failure(cls, message: str, category: Category, ending: Ending = Ending.RAN) -> "Outcome":
        body = json.dumps({"error": message, "category": category}, separators=(",", ":")).encode()
        return cls(Encoding.JSON, body, category, ending)

    @classmethod
    def from_record(cls, encoding: Encoding, body: bytes, failed: bool, ending: Ending | None) -> "Outcome":
        """Return an outcome that was read from the journal, which stores a failure's category only inside its body."""
        category = json.loads(body)["category"] if failed else None
        return cls(encoding, body, category, ending or Ending.RAN)


# --- records: what the database stores --------------------------------------------------------------------------------
# Times are seconds since the epoch.


FinishReason = Literal["success", "errored", "interrupted"]


@dataclass(frozen=True)
class SessionRecord:
    """One session. ``finish_reason`` is what the client sent when it finished; None while the session is active, and
    for a session that expired without a last message.
    """

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


_MODE, _FULL = "train_mode", "full"  # in the stored form of a spec without an adapter


def stored_spec(spec: TrainingSpec) -> dict[str, object]:
    """Return what the database and snapshots store of a spec, as JSON values: an adapter's spec by its fields."""
    return {_MODE: _FULL} if isinstance(spec, FullSpec) else asdict(spec)


def read_spec(stored: Mapping[str, Any]) -> TrainingSpec:
    """Return the spec whose stored form this is."""
    if stored.get(_MODE) == _FULL:
        return FullSpec()
    fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in stored.items()}
    return LoraSpec(**fields)


@dataclass(frozen=True)
class RunRecord:
    """One run: the life of an adapter, which Tinker calls a training run.

    ``base_model`` is the name that the client used. A live run whose spec is a :class:`FullSpec` holds its replica of
    the model: no other tenant can train there until the run is not live any more.
    """

    run_id: str
    session_id: str
    number: int  # model_seq_id; for a native run a hash of the adapter's name
    tenant_id: str
    base_model: str
    model_name: str  # the name of the served model
    spec: TrainingSpec
    created_at: float
    last_request_at: float
    state: Literal["live", "failed", "parked"] = "live"
    user_metadata: Metadata = field(default_factory=dict)
    note: str | None = None  # for the tenant: why the run failed, or how to resume it
    replica: str = ""  # the replica of the model that has this run, where there are several

    @property
    def lora(self) -> LoraSpec | None:
        """Return the shape of the run's adapter; None if it trains all parameters."""
        return self.spec if isinstance(self.spec, LoraSpec) else None

    @property
    def name(self) -> str:
        """Return the name that people know the run by; empty if its client gave none.

        It is ``name`` in the run's user_metadata, else, for a run of the native protocol, the name of its adapter.
        """
        of_session = f"{self.session_id}-"
        adapter = self.run_id.removeprefix(of_session) if self.run_id.startswith(of_session) else ""
        return self.user_metadata.get("name") or adapter


@dataclass(frozen=True)
class CheckpointRecord:
    """The checkpoint ``tinker://{run_id}/{kind}/{name}``. ``directory`` has its files and is relative to the data
    directory.
    """

    run_id: str
    kind: CheckpointKind
    name: str
    tenant_id: str
    request_id: str  # the op that wrote it
    directory: str
    created_at: float
    size_bytes: int
    expires_at: float | None = None
    public: bool = False
    user_metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingSessionRecord:
    """One sampling session. ``version_id`` names its immutable weights (None: the base model), ``directory`` their
    files.

    ``size_bytes`` is the size of these files if they belong to this sampling session alone, and 0 if they are those of
    a checkpoint, which is counted already.
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
    replica: str = ""  # the replica of the model that samples, where there are several
    size_bytes: int = 0


@dataclass(frozen=True)
class CustomLossRecord:
    """A custom loss of a session. ``body`` is the request that created it. ``error`` says why the request was invalid;
    then there is no loss, and ``body`` is empty.
    """

    loss_id: str
    session_id: str
    number: int  # custom_loss_seq_id
    tenant_id: str
    digest: bytes  # of the body as the client sent it
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
    """An op in the journal. ``outcome`` is None until the op has ended."""

    adapter_id: str
    seq: int
    kind: OpKind
    digest: bytes  # of what the client sent: another request with the same number is refused
    body: BlobRef
    accepted_at: float
    outcome: BlobRef | None = None
    encoding: Encoding | None = None
    failed: bool = False
    ending: Ending | None = None  # None: written by an earlier version of the server, which did not record the ending


@dataclass(frozen=True)
class SnapshotRecord:
    """A snapshot: an adapter on disk with all ops up to and including ``seq`` applied."""

    adapter_id: str
    seq: int
    directory: str  # relative to the data directory
    failed_seq: int | None  # the first forward_backward in the open window that failed or never arrived, if any
    taken_at: float


# --- metrics of a run over time: points of named numbers --------------------------------------------------------------

Source = Literal["server", "client"]  # measured by the server, or logged by the client


@dataclass(frozen=True)
class MeasuredStep:
    """What was measured of one optimizer step of a run. ``seq`` is the op that took the step."""

    run_id: str
    seq: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class MetricPoint:
    """One point in a run's metrics. ``number`` counts the points of the run.

    ``step`` counts optimizer steps for a point that the server measured; for a logged point it is the client's step.
    """

    number: int
    time: float
    source: Source
    step: int
    values: Mapping[str, float]
