"""A sampler on the trainer's own model: no second copy of the base, and log-probabilities by the trainer's own code.

``step`` is one turn on the device. It first makes the versions of its sequences resident (see ``versions``), because
training may have paged them out since the last turn. Then it alternates two kinds of passes until its time is up: one
token (with CUDA graphs, several) for each sequence whose other tokens are all in the cache, then a piece of the prompts
that are not computed yet. With CUDA graphs the host prepares the next passes while the device computes the last ones.
Between turns only the tokens and the cache remain. The sampler is used from one thread, the compute thread, in turns
with training.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from twinkle.errors import CapacityError, InvalidInputError, NonFiniteError, TwinkleError
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler.torch_sampler.cache import BLOCK, default_places
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs, capture_decoding
from twinkle.sampler.torch_sampler.drawing import Drawn
from twinkle.sampler.torch_sampler.jobs import Job, Sequence, Tokenizer
from twinkle.sampler.torch_sampler.model_pass import Ahead, Computed, ModelPass, PendingAhead, PendingPass, make_cache
from twinkle.sampler.torch_sampler.prompts.graphs import PromptGraphs, capture_prompts
from twinkle.sampler.torch_sampler.prompts.prompt_images import decoded_images
from twinkle.sampler.torch_sampler.schedule import Eligible, Schedule, Step
from twinkle.sampler.torch_sampler.versions import AdapterVersions, Versions
from twinkle.sampler.types import Finished, Progress, SampleFailure, SampleRequest, SampleResult, SamplerNumbers
from twinkle.sampler.validation import Limits, check_request

_TURN_SECONDS = 0.05  # a turn starts no new pass after this time
_CHUNK_TOKENS = {"cuda": 4096, "cpu": 64}  # prompt tokens computed in one pass
_MAX_SEQUENCES = {"cuda": 512, "cpu": 64}
_AHEAD = 8  # tokens of a sequence that captured graphs draw before the host checks them
# The same while most sequences wait for their prompts: a step takes almost as long for few sequences as for many, so
# it is better to take most steps when more sequences decode.
_AHEAD_OF_PROMPTS = 2
_ROUNDS_WITHOUT_GRAPHS = 64  # after there was no memory to draw several tokens in a row, in a model with states
_PASSES_UNTIL_LARGER = 256  # so many passes after one that ran out of memory, passes may have twice as many sequences


@dataclass(frozen=True)
class _Flight:
    """Several tokens for each of some sequences, which the device is drawing."""

    steps: list[Step]
    rows: list[Ahead]
    tokens: int  # of each row
    pending: PendingAhead

    def continuing(self) -> dict[Sequence, int]:
        """Return the sequences whose drawn tokens will be stored, with their rows.

        A sequence that ended, was cancelled or was preempted meanwhile no longer has the blocks of its row.
        """
        pairs = enumerate(zip(self.steps, self.rows, strict=True))
        return {step.sequence: place for place, (step, row) in pairs if step.sequence.blocks is row.blocks}


class TorchSampler:
    """The sampler in plain torch; implements :class:`~twinkle.sampler.types.Sampler`."""

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer | None,
        *,
        kv_budget_bytes: int | None = None,
        max_sequences: int | None = None,
        versions: Versions | None = None,
        publisher: Trainer | None = None,
    ) -> None:
        """Take part of the trainer's memory for a cache of keys and values, unless the architecture cannot use one.

        tokenizer: needed for stop strings, which are refused without one; its end token is used beside the model's own.
        kv_budget_bytes: taken from the memory that the trainer set aside for adapters; None: up to a third of it, or
        more if a third does not hold ``max_sequences`` sequences of 1024 tokens, as long as adapters keep 12 GiB.
        max_sequences: samples that run at the same time; None: 64 on CPU, and 512 on CUDA, or fewer, at least 256, if
        the cache has too little room for 512.
        versions: what there is to sample from beside the base model; None: adapters of the publisher.
        publisher: the trainer whose adapters are published, on the same base model; None: ``trainer`` itself.
        """
        if max_sequences is not None and max_sequences < 1:
            raise InvalidInputError("max_sequences", max_sequences, "an integer ≥ 1 or None")
        places = max_sequences or _MAX_SEQUENCES[trainer.device.type]
        self._trainer = trainer
        self._tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.eos_token_id
        self._end_tokens = trainer.end_tokens | (frozenset() if own is None else {own})
        architecture = trainer.architecture
        self._cache = make_cache(trainer, kv_budget_bytes, places) if architecture.samples_with_cache else None
        if max_sequences is None and self._cache is not None:
            places = default_places(places, self._cache.capacity)
        self._versions: Versions = AdapterVersions(trainer, publisher) if versions is None else versions
        self._places = places
        chunk = trainer.memory.tokens if self._cache is None else _CHUNK_TOKENS[trainer.device.type]
        self._chunk_tokens = min(chunk, max(BLOCK, trainer.memory.tokens))
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._capture()
        tokens = architecture.max_length if self._cache is None else self._cache.capacity * BLOCK
        # Images are for one tower. Complete sets of weights may each bring another.
        self._features = trainer.engine.features if versions is None else None
        vision = None if self._features is None else architecture.vision
        self._limits = Limits(
            architecture.vocab_size,
            architecture.max_length,
            tokens,
            stop_strings=tokenizer is not None,
            vision=vision,
            routing=architecture.routing,
        )
        self._schedule = Schedule(
            self._cache,
            max_sequences=places,
            chunk_tokens=self._chunk_tokens,
            length_class=architecture.length_class,
        )
        self._pass = ModelPass(trainer.engine, self._cache, self._graphs, self._prompts)
        self._versions.forget_with(self._schedule.forget)
        self._jobs: dict[str, Job] = {}
        self._numbers = count()
        self._events: list[Finished | Progress] = []
        self._other_work_is_next: Callable[[], bool] = lambda: False
        self._numbers_so_far = SamplerNumbers(0, 0)
        self._flight: _Flight | None = None  # always None between turns
        # How many sequences with states may share a pass: fewer after a pass that ran out of memory, see `restart` of
        # the schedule. A pass that is only repeated would fail again.
        self._most_together = places
        self._passes_until_larger = 0
        self._rounds_without_graphs = 0

    @property
    def memory(self) -> str:
        """Describe the cache in one readable line, for logs."""
        cache = "no cache, every token computes its whole sequence again"
        if self._cache is not None:
            cache = f"cache {self._cache.nbytes / 2**30:.2f} GiB = {self._limits.cache_tokens} tokens"
            states = self._cache.states
            if states is not None:
                cache += f" and the states of {states.running} sequences ({states.nbytes / 2**30:.2f} GiB)"
        return ", ".join(filter(None, (f"sampler: {cache}", self._versions.memory)))

    # --- the base model and the cache ---------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Return the bytes that the cache takes now."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def cached_prefixes(self) -> int:
        """Return how many blocks of earlier prompts could be found again."""
        return 0 if self._cache is None else self._cache.remembered

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks of earlier prompts."""
        if self._cache is not None:
            self._cache.forget_all()

    def base_changed(self, *, moved: bool) -> None:
        """Forget what was computed with the base model's old weights. No request may be under way.

        moved: whether some weights are at another address, so that graphs must be captured again.
        """
        assert not self._jobs, "the weights of requests under way never change"
        self.reset_prefix_cache()
        self._forget_features()
        self._pass.forget_versions()
        if moved and self._graphs is not None and self.cache_bytes:
            self._recapture()

    def free_cache(self) -> None:
        """Free the memory of cache, captured graphs and features until :meth:`restore_cache`. No request may run."""
        assert not self._jobs, "requests under way need the cache"
        self._forget_features()
        self._graphs = self._prompts = None
        self._pass = ModelPass(self._trainer.engine, self._cache, None)
        if self._cache is not None:
            self._cache.free_memory()

    def restore_cache(self) -> None:
        if self._cache is not None:
            self._cache.take_memory()
            self._recapture()

    def reset_encoder_cache(self) -> None:
        """Forget the features of images. They are computed again when they are needed."""
        self._forget_features()

    def _forget_features(self) -> None:
        if self._features is not None:
            self._features.forget()

    def _recapture(self) -> None:
        if self._cache is not None:
            self._cache.reset()  # gives back the blocks that the old graphs reserved
        # Free the memory of the old graphs before the new ones take theirs.
        self._graphs = self._prompts = None
        self._pass = ModelPass(self._trainer.engine, self._cache, None)
        self._capture()
        self._pass = ModelPass(self._trainer.engine, self._cache, self._graphs, self._prompts)

    def _capture(self) -> None:
        if self._cache is not None:
            longest = self._trainer.architecture.max_length + _AHEAD
            engine = self._trainer.engine
            states = self._cache.states
            rows = self._places if states is None else min(self._places, states.running)
            self._graphs = capture_decoding(engine, self._cache, rows, longest, self._versions)
            # Where decoding cannot be captured, prompts cannot either. Prompts with linear attention depend on lengths.
            if self._graphs is not None and states is None:
                self._prompts = capture_prompts(engine, self._cache, self._chunk_tokens, self._versions)

    # --- versions -----------------------------------------------------------------------------------------------------

    def publish(self, version_id: str, adapter_id: str) -> None:
        self._versions.publish(version_id, adapter_id)

    def load_version(self, version_id: str, directory: str) -> None:
        self._versions.load(version_id, directory)

    def receive_version(self, version_id: str, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
        """Add a version from weights of another process.

        They are an adapter's, named as PEFT does, with its adapter_config.json; or, for a sampler of complete sets of
        weights, all weights of a model by the names of its checkpoint, with an empty ``config``.
        """
        self._versions.receive(version_id, config, weights)

    def version_saved(self, version_id: str, directory: str) -> None:
        """Note that a version's weights are in this directory too, so that they need not stay in memory."""
        self._versions.saved(version_id, directory)

    def retire(self, version_id: str) -> None:
        self._versions.retire(version_id)

    def version_ids(self) -> list[str]:
        return self._versions.ids()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> None:
        if request.request_id in self._jobs:
            raise InvalidInputError("request_id", request.request_id, "an id that no request under way has")
        checked = check_request(request, self._limits)
        if self._features is not None:
            checked = replace(checked, images=decoded_images(checked.images, self._features))
        ends = frozenset(checked.params.stop_tokens)
        if checked.params.stop_at_eos:
            ends |= self._end_tokens
        version = None if request.version_id is None else self._versions.take(request.version_id)
        job = Job(checked, version, next(self._numbers), ends, self._tokenizer)
        self._jobs[checked.request_id] = job
        self._schedule.add(job.sequences[0])

    def cancel(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._remove(self._jobs[request_id])

    def end_turns_when(self, other_work_is_next: Callable[[], bool]) -> None:
        self._other_work_is_next = other_work_is_next

    def numbers(self) -> SamplerNumbers:
        return self._numbers_so_far

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def step(self) -> list[Finished | Progress]:
        deadline = perf_counter() + _TURN_SECONDS
        turn = self._versions.bring(self._schedule.candidates())
        if turn.stuck:  # requests that could be computed wait for the places of requests that cannot
            self._schedule.preempt_all()
            turn = self._versions.bring(list(self._jobs.values()))
        self._fail_lost(turn.lost)
        if self._graphs is not None:
            self._graphs.weights = turn.weights
        if self._prompts is not None:
            self._prompts.weights = turn.weights
        try:
            while self._advance(turn.eligible, deadline):
                if self._is_over(deadline):
                    break
            self._land()
        finally:
            self._flight = None
            self._pass.forget_versions()  # training may move versions, and needs the memory of the gathered copies
        for job in self._jobs.values():
            if job.request.stream:
                self._events += job.progress()
        events, self._events = self._events, []
        return events

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_over(self, deadline: float) -> bool:
        """Return whether the turn is to start no further pass."""
        return perf_counter() >= deadline or self._other_work_is_next()

    def _count_decoded(self, sequences: int, tokens: int = 1) -> None:
        """Count decode steps that have started: one for each token of the sequences."""
        before = self._numbers_so_far
        steps = before.decode_steps + (tokens if sequences else 0)
        self._numbers_so_far = SamplerNumbers(steps, before.decoded_tokens + sequences * tokens)

    def _fail_lost(self, lost: Mapping[int, TwinkleError]) -> None:
        for job in list(self._jobs.values()):
            if job.version is not None and id(job.version) in lost:
                self._finish(job, SampleFailure(lost[id(job.version)]))

    def _advance(self, eligible: Eligible, deadline: float) -> bool:
        """Draw for each decoding sequence, and compute a piece of the prompts. Return False if nothing was to do."""
        self._schedule.admit(eligible)
        if self._graphs is not None and not self._rounds_without_graphs:
            return self._advance_ahead(self._graphs, eligible, deadline)
        # Two passes, because rows of single tokens all have the same shape. The first pass may end sequences, which
        # frees room for the second.
        assert self._flight is None, "its sequences would draw the same tokens again"
        decoded = self._decode(self._schedule.decode_steps(eligible))
        if decoded and self._rounds_without_graphs:
            self._rounds_without_graphs -= 1
        prompted = self._compute_all(self._schedule.prompt_steps(eligible))
        return decoded or prompted

    def _advance_ahead(self, graphs: DecodeGraphs, eligible: Eligible, deadline: float) -> bool:
        """Draw several tokens for each decoding sequence, and compute a piece of the prompts.

        The device works in the order in which passes are started: first on the tokens of the sequences, the flight,
        then on the prompts. While it works on the flight, the host prepares the prompts, or, without prompts, the
        flight after this one; and while it works on that, the host reads the results of the first flight. Prompts and
        their next flight do not overlap, because the sequences of the prompts should take part in the flight.
        """

        def captured(job: Job) -> bool:
            # Penalties need the tokens before each draw on the host, and captured passes do not record routes.
            eager = job.request.params.penalises or job.request.routed_experts
            return eligible(job) and graphs.takes(job.adapter) and not eager

        if self._flight is None:
            tokens = _AHEAD_OF_PROMPTS if self._schedule.mostly_prompts else _AHEAD
            self._flight = self._launch(graphs, captured, tokens, None)
        flown, flight, following = self._flight is not None, self._flight, None
        # Sequences of the flight must not be preempted, so prompts that need their room wait until it has landed.
        overlap = self._schedule.room_for_prompts
        prompts = self._start_all(self._schedule.prompt_steps(eligible)) if overlap else []
        if flight is not None and overlap and not prompts and not self._is_over(deadline):
            following = self._launch(graphs, captured, _AHEAD, flight)
        self._land()
        self._flight = following
        prompted = self._finish_all(prompts) if overlap else self._compute_all(self._schedule.prompt_steps(eligible))
        crowded = not flown and not self._schedule.room_ahead(_AHEAD)
        others = self._schedule.decode_steps(lambda job: eligible(job) and (crowded or not captured(job)))
        return self._decode(others) or flown or prompted

    def _launch(self, graphs: DecodeGraphs, captured: Eligible, tokens: int, before: _Flight | None) -> _Flight | None:
        """Start to draw several tokens for each decoding sequence, without waiting for the device.

        Return None if no sequence decodes, or if there is no memory. before: the flight that is under way, after which
        this one starts.
        """
        if not self._schedule.room_ahead(tokens):
            return None
        drawing = {} if before is None else dict.fromkeys(before.continuing(), before.tokens)
        steps, most = self._schedule.decode_steps(captured, tokens, drawing), graphs.max_rows
        if before is not None and len(steps) > most:
            return None
        for start in range(most, len(steps), most):
            self._flight = self._start_flight(steps[start : start + most], tokens, None)
            self._land()  # if a request fails here, its samples among the first rows end too
        first = [step for step in steps[:most] if self._is_live(step.sequence.job)]
        return self._start_flight(first, tokens, before) if first else None

    def _start_flight(self, steps: list[Step], tokens: int, before: _Flight | None) -> _Flight | None:
        places = {} if before is None else before.continuing()
        ahead = 0 if before is None else before.tokens
        rows = [
            step.sequence.job.ahead(step.sequence, ahead, places[step.sequence])
            if step.sequence in places
            else step.sequence.job.ahead(step.sequence)
            for step in steps
        ]
        try:
            pending = self._pass.start_ahead(rows, tokens, None if before is None else before.pending)
        except torch.OutOfMemoryError:
            self._free_memory()
            if self._cache is not None and self._cache.states is not None:
                # The first of the tokens may have changed states. Single tokens are drawn in batches that get smaller.
                self._schedule.begin_anew(steps)
                self._rounds_without_graphs = _ROUNDS_WITHOUT_GRAPHS
            elif before is None:
                self._decode(steps)  # one token each, in batches that are halved until they fit
            return None
        self._count_decoded(len(steps), tokens)
        return _Flight(steps, rows, tokens, pending)

    def _land(self) -> None:
        """Wait for the flight, if there is one, and store its tokens."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        for step, row, drawn in zip(flight.steps, flight.rows, flight.pending.results(), strict=True):
            if step.sequence.blocks is row.blocks:  # see _Flight.continuing
                self._absorb_ahead(step, drawn)

    def _absorb_ahead(self, step: Step, drawn: list[Drawn]) -> None:
        sequence, job = step.sequence, step.sequence.job
        try:
            count = job.absorb_ahead(sequence, drawn)
        except NonFiniteError as error:
            self._fail(job, error)
            return
        self._schedule.computed(Step(sequence, step.start, step.start + count), ahead=True)
        self._end(sequence)

    def _decode(self, steps: list[Step]) -> bool:
        self._count_decoded(len(steps))
        return self._compute_all(steps)

    def _compute_all(self, steps: list[Step]) -> bool:
        for batch in self._batches(steps):
            self._compute(batch)
        return bool(steps)

    def _start_all(self, steps: list[Step]) -> list[tuple[list[Step], PendingPass | None]]:
        """Start to compute steps, without waiting for the device."""
        return [(batch, self._start(batch)) for batch in self._batches(steps)]

    def _finish_all(self, started: list[tuple[list[Step], PendingPass | None]]) -> bool:
        for steps, pending in started:
            self._finish_pass(steps, pending)
        return bool(started)

    def _batches(self, steps: list[Step]) -> Iterator[list[Step]]:
        """Yield steps that may share a pass: of one length class and, if padded, within the trainer's token budget."""
        by_class: dict[int, list[Step]] = {}
        for step in steps:
            by_class.setdefault(self._trainer.architecture.length_class(step.stop), []).append(step)
        for alike in by_class.values():
            if self._cache is not None:
                while alike:
                    most = self._most_together
                    yield alike[:most]
                    alike = alike[most:]
                continue
            batch: list[Step] = []
            for step in sorted(alike, key=lambda each: each.stop):
                if batch and (len(batch) + 1) * step.stop > self._trainer.memory.tokens:
                    yield batch
                    batch = []
                batch.append(step)
            yield batch

    def _compute(self, steps: list[Step]) -> None:
        steps = [step for step in steps if self._is_live(step.sequence.job)]
        if steps:
            self._finish_pass(steps, self._start(steps))

    def _start(self, steps: list[Step]) -> PendingPass | None:
        """Start a pass. Return None if the device runs out of memory even after freeing what can be freed."""
        for _ in range(2):
            try:
                return self._pass.start(
                    [step.sequence.job.piece(step.sequence, step.start, step.stop) for step in steps]
                )
            except torch.OutOfMemoryError:
                self._free_memory()
                if any(step.start > 0 for step in steps) and self._cache is not None and self._cache.states is not None:
                    break  # see Schedule.restart
        return None

    def _finish_pass(self, steps: list[Step], pending: PendingPass | None) -> None:
        """Wait for a pass and store its results. None: it did not fit into memory, so smaller passes are tried."""
        if pending is not None:
            for step, result in zip(steps, pending.results(), strict=True):
                self._absorb(step, result)
            self._count_until_larger()
        elif self._schedule.restart(steps):
            self._most_together = max(1, len(steps) // 2)
            self._passes_until_larger = _PASSES_UNTIL_LARGER
            logging.getLogger(__name__).warning("a pass ran out of memory; its %d sequences begin anew", len(steps))
        elif len(steps) > 1:
            self._compute(steps[: len(steps) // 2])
            self._compute(steps[len(steps) // 2 :])
        else:
            error = CapacityError(f"a sequence of {steps[0].stop} tokens does not fit this device's memory")
            self._finish(steps[0].sequence.job, SampleFailure(error))

    def _count_until_larger(self) -> None:
        """Note that a pass succeeded. After enough of them, try twice as many sequences with states in a pass."""
        if self._most_together < self._places:
            self._passes_until_larger -= 1
            if not self._passes_until_larger:
                self._most_together = min(self._places, 2 * self._most_together)
                self._passes_until_larger = _PASSES_UNTIL_LARGER

    def _free_memory(self) -> None:
        """Free memory that is kept for later passes: gathered weights, and blocks that torch has cached."""
        self._pass.forget_versions()
        torch.cuda.empty_cache()

    def _absorb(self, step: Step, computed: Computed) -> None:
        sequence, job = step.sequence, step.sequence.job
        if not self._is_live(job):  # another of its samples failed in the same pass
            return
        self._schedule.computed(step)
        try:
            samples = job.absorb(sequence, step.start, step.stop, computed)
        except NonFiniteError as error:
            self._fail(job, error)
            return
        unfinished = [sample for sample in samples if sample.stop_reason is None]
        if unfinished:
            self._schedule.keep_stem(sequence)
        for sample in unfinished:
            self._schedule.add(sample)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Remove a finished sample from the schedule, and finish its request if it was the last one."""
        if sequence.stop_reason is not None:
            self._schedule.remove(sequence)
            if sequence.job.done:
                self._finish(sequence.job, sequence.job.result())

    def _fail(self, job: Job, error: NonFiniteError) -> None:
        self._finish(job, SampleFailure(error))
        self._schedule.forget(job.version_key)  # its cached blocks may hold NaN as well

    def _is_live(self, job: Job) -> bool:
        return self._jobs.get(job.request.request_id) is job

    def _finish(self, job: Job, outcome: SampleResult | SampleFailure) -> None:
        self._remove(job)
        if job.request.stream and isinstance(outcome, SampleResult):
            self._events += job.progress()
        self._events.append(Finished(job.request.request_id, outcome))

    def _remove(self, job: Job) -> None:
        for sequence in job.sequences:
            self._schedule.remove(sequence)
        del self._jobs[job.request.request_id]
        if job.version is not None:
            self._versions.give_back(job.version)
