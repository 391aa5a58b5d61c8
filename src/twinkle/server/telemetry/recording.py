"""What the services record, of one base model each: metrics, and the spans of ops on their way.

Called on the event loop and in the compute thread. An op is known here from when it was accepted until it is settled.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from twinkle.errors import ShuttingDownError, TwinkleError, UserError
from twinkle.model.types import TrainerNumbers, TrainItem, TrainResult
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.backend import TrainingBackend
from twinkle.server.ids import split_request_id
from twinkle.server.scheduling.scheduler import BatchKind
from twinkle.server.telemetry import instruments, request_context
from twinkle.server.telemetry.logprob_gap import gap_of
from twinkle.server.telemetry.metrics import Metrics
from twinkle.server.telemetry.tracing import NO_TRACING, OpSpan, Tracing
from twinkle.server.types import NativePass, Op, OpKind, Outcome, Refused, TrainPass

__all__ = ["Outcomes", "SamplingRecorder", "TrainingRecorder"]


@dataclass
class _Live:
    """Times are those of ``time.monotonic``."""

    span: OpSpan
    accepted_at: float
    started_at: float | None = None
    streamed: bool = False  # a first token was seen


@dataclass(frozen=True)
class _BatchSeries:
    """Of batches of one kind. Bound once: finding a series by its labels takes as long as recording in it."""

    seconds: Histogram
    ops: Histogram
    tokens: Histogram
    rate: Histogram
    trained: Counter

    @classmethod
    def of(cls, metrics: Metrics, *labels: str) -> "_BatchSeries":
        return cls(
            seconds=metrics.histogram(instruments.BATCH_SECONDS, *labels),
            ops=metrics.histogram(instruments.BATCH_OPS, *labels),
            tokens=metrics.histogram(instruments.BATCH_TOKENS, *labels),
            rate=metrics.histogram(instruments.BATCH_RATE, *labels),
            trained=metrics.counter(instruments.TRAINED_TOKENS, *labels),
        )

    def note(self, ops: int, tokens: int, seconds: float) -> None:
        self.seconds.observe(seconds)
        self.ops.observe(ops)
        if tokens:
            self.tokens.observe(tokens)
            self.rate.observe(tokens / max(seconds, 1e-9))
            self.trained.inc(tokens)


class Outcomes:
    """The values of the label outcome."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"
    SERVER_ERROR = "server_error"
    CANCELLED = "cancelled"

    @classmethod
    def of(cls, outcome: Outcome) -> str:
        if not outcome.failed:
            return cls.SUCCEEDED
        return cls.USER_ERROR if outcome.category == "user" else cls.SERVER_ERROR

    @classmethod
    def of_sample(cls, event: SampleResult | TwinkleError | Outcome) -> str:
        if isinstance(event, Outcome):
            return cls.of(event)
        if isinstance(event, SampleResult):
            return cls.SUCCEEDED
        if isinstance(event, ShuttingDownError):
            return cls.CANCELLED
        return cls.USER_ERROR if isinstance(event, UserError) else cls.SERVER_ERROR


class TrainingRecorder:
    def __init__(self, model: str, metrics: Metrics | None = None, tracing: Tracing = NO_TRACING) -> None:
        self._model = model
        self._metrics = metrics = metrics or Metrics()
        self._tracing = tracing
        self._live: dict[str, _Live] = {}
        self._journal = metrics.histogram(instruments.JOURNAL_SECONDS, model)
        self._wait = {kind: metrics.histogram(instruments.OP_WAIT, model, kind) for kind in OpKind}
        self._duration = {kind: metrics.histogram(instruments.OP_SECONDS, model, kind) for kind in OpKind}
        self._batches = {kind: _BatchSeries.of(metrics, model, kind) for kind in BatchKind}
        self._outcomes: dict[tuple[OpKind, str], Counter] = {}
        self._gap = metrics.histogram(instruments.LOGPROB_GAP, model)
        self._kl = metrics.histogram(instruments.LOGPROB_KL, model)
        self.trainer_numbers: TrainerNumbers | None = None  # after its last batch

    # --- on the event loop --------------------------------------------------------------------------------------------

    @contextmanager
    def journalling(self, op: Op) -> Iterator[None]:
        request_context.about(op.request_id)
        started = time.perf_counter()
        with self._tracing.step("journal", {"twinkle.request_id": op.request_id}):
            yield
        self._journal.observe(time.perf_counter() - started)

    def accepted(self, op: Op) -> None:
        """It is the scheduler's now; what comes twice is the same op."""
        if op.request_id not in self._live:
            attributes = {"twinkle.model": self._model, "twinkle.run_id": op.adapter_id, "twinkle.kind": op.kind.value}
            span = self._tracing.op(op.kind.value, op.request_id, attributes)
            self._live[op.request_id] = _Live(span, time.monotonic())

    def settled(self, op: Op, outcome: Outcome, *, repeated: bool) -> None:
        """``repeated``: it had ended before a restart, and was counted then."""
        live = self._live.pop(op.request_id, None)
        result = Outcomes.of(outcome)
        if live is not None:
            live.span.ended(result)
        if repeated:
            return
        if (op.kind, result) not in self._outcomes:
            counter = self._metrics.counter(instruments.OPS, self._model, op.kind.value, result)
            self._outcomes[op.kind, result] = counter
        self._outcomes[op.kind, result].inc()
        if isinstance(op.payload, Refused) and op.payload.limit is not None:
            self._metrics.counter(instruments.REFUSALS, op.payload.limit).inc()
        if live is not None:
            self._duration[op.kind].observe(time.monotonic() - live.accepted_at)

    # --- anywhere -----------------------------------------------------------------------------------------------------

    def started(self, op: Op) -> None:
        """It runs, beside other batches or in one."""
        live = self._live.get(op.request_id)
        if live is not None and live.started_at is None:
            live.started_at = time.monotonic()
            self._wait[op.kind].observe(live.started_at - live.accepted_at)
            live.span.started()

    # --- in the compute thread ----------------------------------------------------------------------------------------

    @contextmanager
    def batch(self, ops: Sequence[Op], trainer: TrainingBackend) -> Iterator[None]:
        """The device works on these now."""
        kind = BatchKind(ops[0].kind.value) if ops[0].kind.is_pass else BatchKind.BARRIERS
        tokens = sum(op.payload.tokens for op in ops if isinstance(op.payload, TrainPass | NativePass))
        started = time.perf_counter()
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
        self._batches[kind].note(len(ops), tokens, time.perf_counter() - started)
        self.trainer_numbers = trainer.numbers()

    def stepped(self, ops: Sequence[Op], trainer: TrainingBackend, seconds: float) -> None:
        """A batch of passes was computed in steps, with others between them; ``seconds``: of its own."""
        tokens = sum(op.payload.tokens for op in ops if isinstance(op.payload, TrainPass | NativePass))
        self._batches[BatchKind(ops[0].kind.value)].note(len(ops), tokens, seconds)
        self.trainer_numbers = trainer.numbers()

    def passed(self, item: TrainItem, result: TrainResult) -> None:
        """A pass of Tinker's protocol was computed."""
        gap = gap_of(item.data, result.logprobs)
        if gap is not None:
            self._gap.observe(gap.distance)
            self._kl.observe(gap.divergence)


class SamplingRecorder:
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
        request_context.about(request.request_id)
        owner = split_request_id(request.request_id)
        attributes: dict[str, str | int] = {
            "twinkle.model": self._model,
            "twinkle.prompt_tokens": len(request.prompt),
            "twinkle.num_samples": request.num_samples,
        }
        if owner is not None:
            attributes["twinkle.sampling_session_id"] = owner[0]
        span = self._tracing.op("sample", request.request_id, attributes)
        self._live[request.request_id] = _Live(span, time.monotonic())

    def started(self, request_id: str) -> None:
        """The engine has it."""
        live = self._live.get(request_id)
        if live is not None:
            live.started_at = time.monotonic()
            self._wait.observe(live.started_at - live.accepted_at)
            live.span.started()

    def progressed(self, request_id: str) -> None:
        """Tokens were streamed."""
        live = self._live.get(request_id)
        if live is not None and not live.streamed:
            live.streamed = True
            self._first_token.observe(time.monotonic() - live.accepted_at)

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
            live.span.ended(outcome)
            self._duration.observe(time.monotonic() - live.accepted_at)
            self._metrics.counter(instruments.SAMPLES, self._model, outcome).inc()
