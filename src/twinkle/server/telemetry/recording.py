"""Recorders of the services of one base model: metrics, and the spans of ops from accepted to settled.

Recorders are called on the event loop and in the compute thread; headings and docstrings say which method where.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import Histogram

from twinkle.errors import ShuttingDownError, TwinkleError, UserError
from twinkle.model.csr import dense
from twinkle.model.types import Datum, FloatArray, TrainerNumbers, TrainItem, TrainResult
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.ids import RequestId
from twinkle.server.scheduling.scheduler import BatchKind
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.logs import note_request_id
from twinkle.server.telemetry.metrics import Metrics
from twinkle.server.telemetry.tracing import NO_TRACING, OpSpan, Tracing
from twinkle.server.types import Op, OpKind, Outcome, Refused


@dataclass
class _Live:
    """An op or a sample that is accepted and not settled. Times are those of ``time.monotonic``."""

    span: OpSpan
    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    streamed: bool = False  # a first token was seen

    @property
    def age(self) -> float:
        return time.monotonic() - self.accepted_at

    def start(self, wait: Histogram) -> None:
        """Note that it runs, and record how long it waited. Later calls do nothing."""
        if self.started_at is None:
            self.started_at = time.monotonic()
            wait.observe(self.started_at - self.accepted_at)
            self.span.start()

    def end(self, outcome: str) -> None:
        self.span.end(outcome, failed=outcome == Outcomes.SERVER_ERROR)


class _BatchSeries:
    """The series of batches of one kind. They are kept: finding a series by its labels takes as long as recording."""

    def __init__(self, metrics: Metrics, *labels: str) -> None:
        self.seconds = metrics.histogram(instruments.BATCH_SECONDS, *labels)
        self.ops = metrics.histogram(instruments.BATCH_OPS, *labels)
        self.tokens = metrics.histogram(instruments.BATCH_TOKENS, *labels)
        self.rate = metrics.histogram(instruments.BATCH_RATE, *labels)
        self.trained = metrics.counter(instruments.TRAINED_TOKENS, *labels)

    def record(self, ops: int, tokens: int, seconds: float) -> None:
        self.seconds.observe(seconds)
        self.ops.observe(ops)
        if tokens:
            self.tokens.observe(tokens)
            self.rate.observe(tokens / max(seconds, 1e-9))
            self.trained.inc(tokens)


class Outcomes:
    """The values of the label ``outcome`` in metrics of ops and samples."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"
    SERVER_ERROR = "server_error"
    CANCELLED = "cancelled"

    @classmethod
    def label(cls, event: SampleResult | TwinkleError | Outcome) -> str:
        """Return the label for the way an op or a sample ended."""
        if isinstance(event, SampleResult) or (isinstance(event, Outcome) and not event.failed):
            return cls.SUCCEEDED
        if isinstance(event, Outcome):
            return cls.USER_ERROR if event.category == "user" else cls.SERVER_ERROR
        if isinstance(event, ShuttingDownError):
            return cls.CANCELLED
        return cls.USER_ERROR if isinstance(event, UserError) else cls.SERVER_ERROR


class TrainingRecorder:
    """Records the ops of one model: metrics of ops and batches, and their spans."""

    def __init__(self, model: str, metrics: Metrics | None = None, tracing: Tracing = NO_TRACING) -> None:
        self._model = model
        self._metrics = metrics = metrics or Metrics()
        self._tracing = tracing
        self._live: dict[str, _Live] = {}
        self._journal = metrics.histogram(instruments.JOURNAL_SECONDS, model)
        self._wait = {kind: metrics.histogram(instruments.OP_WAIT, model, kind) for kind in OpKind}
        self._duration = {kind: metrics.histogram(instruments.OP_SECONDS, model, kind) for kind in OpKind}
        self._batches = {kind: _BatchSeries(metrics, model, kind) for kind in BatchKind}
        self._gap = metrics.histogram(instruments.LOGPROB_GAP, model)
        self._kl = metrics.histogram(instruments.LOGPROB_KL, model)
        self.trainer_numbers: TrainerNumbers | None = None  # of the trainer after its last batch

    # --- on the event loop --------------------------------------------------------------------------------------------

    @contextmanager
    def journalling(self, op: Op) -> Iterator[None]:
        note_request_id(op.request_id)
        started = time.perf_counter()
        with self._tracing.step("journal", {"twinkle.request_id": op.request_id}):
            yield
        self._journal.observe(time.perf_counter() - started)

    def accepted(self, op: Op) -> None:
        """Note that the scheduler has the op. An op that is noted twice counts once."""
        if op.request_id not in self._live:
            attributes = {"twinkle.model": self._model, "twinkle.run_id": op.adapter_id, "twinkle.kind": op.kind.value}
            span = self._tracing.op(op.kind.value, op.request_id, attributes)
            self._live[op.request_id] = _Live(span)

    def settled(self, op: Op, outcome: Outcome, *, repeated: bool) -> None:
        """Note how the op ended. ``repeated``: it already ended before a restart and was counted then."""
        live = self._live.pop(op.request_id, None)
        result = Outcomes.label(outcome)
        if live is not None:
            live.end(result)
        if repeated:
            return
        self._metrics.counter(instruments.OPS, self._model, op.kind.value, result).inc()
        if isinstance(op.payload, Refused) and op.payload.limit is not None:
            self._metrics.counter(instruments.REFUSALS, op.payload.limit).inc()
        if live is not None:
            self._duration[op.kind].observe(live.age)

    # --- anywhere -----------------------------------------------------------------------------------------------------

    def started(self, op: Op) -> None:
        """Note that the op runs, in a batch or beside batches, and record how long it waited."""
        live = self._live.get(op.request_id)
        if live is not None:
            live.start(self._wait[op.kind])

    # --- in the compute thread ----------------------------------------------------------------------------------------

    @contextmanager
    def batch(
        self, ops: Sequence[Op], trainer: TrainingBackend, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[None]:
        """Record a batch, unless it raises. The context lasts as long as the device works on these ops.

        ``clock`` returns seconds, without those of other work in the middle of the batch.
        """
        kind = BatchKind(ops[0].kind.value) if ops[0].kind.is_pass else BatchKind.BARRIERS
        tokens = _tokens(ops)
        started = clock()
        for op in ops:
            self.started(op)
        spans = [live.span for op in ops if (live := self._live.get(op.request_id)) is not None]
        attributes: dict[str, str | int] = {
            "twinkle.model": self._model,
            "twinkle.kind": kind.value,
            "twinkle.tokens": tokens,
            "twinkle.ops": len(ops),
        }
        with self._tracing.batch(spans, attributes):
            yield
        self._batches[kind].record(len(ops), tokens, clock() - started)
        self.trainer_numbers = trainer.numbers()

    def stepped(self, ops: Sequence[Op], trainer: TrainingBackend, seconds: float) -> None:
        """Record a batch of passes that was computed in steps. ``seconds``: without the work of others in between."""
        self._batches[BatchKind(ops[0].kind.value)].record(len(ops), _tokens(ops), seconds)
        self.trainer_numbers = trainer.numbers()

    def passed(self, item: TrainItem, result: TrainResult) -> None:
        """Record how far the log-probabilities of a pass are from those that the sampler returned."""
        gap = gap_of(item.data, result.logprobs)
        if gap is not None:
            self._gap.observe(gap.distance)
            self._kl.observe(gap.divergence)


def _tokens(ops: Sequence[Op]) -> int:
    return sum(op.price.tokens for op in ops)


class SamplingRecorder:
    """Records the sampling requests of one model: their metrics and spans.

    The compute thread calls ``started``, ``progressed`` and ``sampled``, the event loop all others.
    """

    def __init__(self, model: str, metrics: Metrics | None = None, tracing: Tracing = NO_TRACING) -> None:
        self._model = model
        self._metrics = metrics = metrics or Metrics()
        self._tracing = tracing
        self._live: dict[str, _Live] = {}
        self._wait = metrics.histogram(instruments.SAMPLE_WAIT, model)
        self._first_token = metrics.histogram(instruments.SAMPLE_FIRST_TOKEN, model)
        self._duration = metrics.histogram(instruments.SAMPLE_SECONDS, model)
        self._rate = metrics.histogram(instruments.SAMPLE_RATE, model)
        self._tokens = metrics.counter(instruments.SAMPLED_TOKENS, model)
        self._computed = metrics.counter(instruments.PROMPT_TOKENS, model, "computed")
        self._cached = metrics.counter(instruments.PROMPT_TOKENS, model, "cached")

    def accepted(self, request: SampleRequest) -> None:
        note_request_id(request.request_id)
        name = RequestId.parse_or_none(request.request_id)
        attributes: dict[str, str | int] = {
            "twinkle.model": self._model,
            "twinkle.prompt_tokens": len(request.prompt),
            "twinkle.num_samples": request.num_samples,
        }
        if name is not None:
            attributes["twinkle.sampling_session_id"] = name.owner
        span = self._tracing.op("sample", request.request_id, attributes)
        self._live[request.request_id] = _Live(span)

    def started(self, request_id: str) -> None:
        """Note that the engine has the request, and record how long the request waited for that."""
        live = self._live.get(request_id)
        if live is not None:
            live.start(self._wait)

    def progressed(self, request_id: str) -> None:
        """Note that tokens of this request were streamed; the first time, record the time to the first token."""
        live = self._live.get(request_id)
        if live is not None and not live.streamed:
            live.streamed = True
            self._first_token.observe(live.age)

    def sampled(self, request: SampleRequest, result: SampleResult) -> None:
        tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        self._tokens.inc(tokens)
        self._cached.inc(result.cached_prompt_tokens)
        self._computed.inc(max(0, len(request.prompt) - result.cached_prompt_tokens))
        live = self._live.get(request.request_id)
        if live is not None and live.started_at is not None:
            self._rate.observe(tokens / max(time.monotonic() - live.started_at, 1e-9))

    def ended(self, request_id: str, outcome: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.end(outcome)
            self._duration.observe(live.age)
            self._metrics.counter(instruments.SAMPLES, self._model, outcome).inc()


_SAMPLED = "logprobs"  # the loss input that holds the sampler's log-probabilities
_FURTHEST = 30.0  # nats to which differences are clipped: e³⁰ is large enough, and finite


@dataclass(frozen=True)
class LogprobGap:
    """How far the trainer's log-probabilities are from those that the sampler gave when the tokens were drawn.

    ``distance`` is the mean |Δ| over the tokens that were sampled, ``divergence`` the mean of r − 1 − log r with
    r = p_trainer / p_sampler. Policy losses correct for the distance; when it is large although the weights are the
    same, sampler and trainer do not compute the same model, which is the most common silent fault of reinforcement
    learning. After the first optimizer step on the same rollouts it is also the distance of the policy from its start.
    """

    distance: float
    divergence: float


def gap_of(data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> LogprobGap | None:
    """Return the gap of one pass; None without log-probabilities of a sampler that fit the trainer's.

    Tokens with log-probability 0 are left out. Clients write 0 where nothing was sampled, such as in prompts; a sampled
    token of which the sampler was certain is left out with them.
    """
    pairs = [(each.extras[_SAMPLED], lp) for each, lp in zip(data, logprobs, strict=True) if _SAMPLED in each.extras]
    if not pairs or any(given.shape != lp.shape for given, lp in pairs):
        return None
    sampled = np.concatenate([dense(given).ravel() for given, _ in pairs])
    trained = np.concatenate([lp.ravel() for _, lp in pairs])
    mask = sampled != 0
    if not mask.any():
        return None
    ratio = np.clip(trained[mask].astype(np.float64) - sampled[mask], -_FURTHEST, _FURTHEST)
    return LogprobGap(float(np.abs(ratio).mean()), float((np.expm1(ratio) - ratio).mean()))
