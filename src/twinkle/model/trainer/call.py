"""One call of ``forward`` or ``forward_backward``: many requests in, one result or failure each out.

Requests are checked one by one, cut into micro-batches together, and finished one by one as soon as their last sequence
is computed. Running out of memory does not fail a request: the batch is split in halves and tried again. Only a single
sequence that does not fit fails. (In a sharded model it fails the whole call, see ``lockstep``.)

Where several ranks train together, all ranks get the same requests, each with some of their sequences or none. At the
end the ranks exchange their results: a request that failed on one rank fails on all, and only the gradients of requests
that succeeded everywhere are added to adapters. Ranks that hold the cuts of one model also agree before they compute:
they must run the same micro-batches in the same order (see ``agreement``).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from twinkle.errors import CapacityError, InvalidInputError, NonFiniteError, TwinkleError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.decoder.lora.dropout import DropoutDraw
from twinkle.model.objectives.custom_loss import Evaluation, token_values
from twinkle.model.objectives.objective import evaluate
from twinkle.model.objectives.validation import CheckedItem, check_item
from twinkle.model.parallel import SINGLE, Parallelism
from twinkle.model.trainer.agreement import Plan, RankReport, agree, agree_on_plan, contents_digest
from twinkle.model.trainer.batch import GradientRow, Part
from twinkle.model.trainer.engine import Computed
from twinkle.model.trainer.packing import Budget, MicroBatch, cut, halves, plan, schedules
from twinkle.model.trainer.request import Request, describe, ordered_sequences
from twinkle.model.types import FloatArray, Image, OutputKind, TrainFailure, TrainItem, TrainResult
from twinkle.model.vision.feature_store import FeatureStore

_NOT_FINITE = "the gradient holds NaN or infinity: it was not kept"

StepLimit = Callable[[], int | None]  # returns the most tokens of the next micro-batch; None: as many as fit


class Passes(Protocol):
    """What computes micro-batches: an :class:`Engine` of ``trainer.engine``, or a ``Lockstep`` around one."""

    @property
    def architecture(self) -> Architecture: ...

    def forward(self, parts: Sequence[Part], give_way: GiveWay | None = None) -> Computed: ...

    def forward_backward(
        self, parts: Sequence[Part], *, recompute: bool, give_way: GiveWay | None = None
    ) -> Computed: ...

    def finish(self) -> None:
        """Note that this call has no more micro-batches."""
        ...


class Pipeline(Protocol):
    """What computes several micro-batches at once, because the model's layers are divided into pipeline stages."""

    @property
    def fewest(self) -> int:
        """Return how many micro-batches fill the pipeline."""
        ...

    @property
    def most(self) -> int:
        """Return how many micro-batches may run at once."""
        ...

    def forward(self, batches: Sequence[Sequence[Part]]) -> list[Computed]: ...

    def forward_backward(self, batches: Sequence[Sequence[Part]], recompute: Sequence[bool]) -> list[Computed]: ...


class RemoteRequests(Protocol):
    """What computes a part of the requests of other ranks, which have other data but use this rank's experts."""

    @property
    def block(self) -> int:
        """Return how many ranks with different data compute for each other."""
        ...

    def begin(self, pool: AdapterPool) -> None:
        """Note that a call begins. It takes the adapters of other ranks' requests from ``pool``."""
        ...

    def gradients(self) -> list[GradientRow]:
        """Return gradients of micro-batches that only other ranks had. Called once, at the end of a call."""
        ...


class TrainerCall:
    """Runs the requests of one call. ``budget`` shrinks when the device turns out to hold less than was measured."""

    def __init__(
        self,
        engine: Passes,
        pool: AdapterPool,
        budget: Budget,
        *,
        train: bool,
        parallel: Parallelism = SINGLE,
        pipeline: Pipeline | None = None,
        give_way: GiveWay | None = None,
        leaves_half: bool = True,
        trains_base: bool = False,
        features: FeatureStore | None = None,
        remote: RemoteRequests | None = None,
    ) -> None:
        """``trains_base``: requests train the weights of the model itself, and all of them are for the base model.

        Their gradients are not seen here: the caller adds those of requests that succeeded.

        ``features``: those of images; None: images are refused.

        ``pipeline``: computes the micro-batches instead of ``engine``, several at once.

        ``remote``: computes in these micro-batches for requests of other ranks, too. Their gradients come with those of
        this rank's requests.

        ``give_way`` is called between layers of micro-batches that leave enough memory.

        ``leaves_half``: whether an interrupted micro-batch leaves half of the memory free. Then ``give_way`` may run
        other calls of the trainer; otherwise only a sampler, whose passes are small.
        """
        self.budget = budget
        self._give_way = give_way
        self._leaves_half = leaves_half
        self._trains_base = trains_base
        self._engine = engine
        self._pool = pool
        self._train = train
        self._parallel = parallel
        self._pipeline = pipeline
        self._features = features
        self._remote = remote
        self._elsewhere: dict[int, GradientRow] = {}  # of requests that have no sequences on this rank
        self._requests: dict[int, Request] = {}
        self._results: dict[int, TrainResult | TrainFailure] = {}
        self._begun: Counter[str] = Counter()  # requests of each adapter that passed their checks
        self._held_images: list[Image] = []  # their features are kept until the end of the call
        self._held: Counter[int] = Counter()  # for each request, its gradients on the device that nobody has added yet

    def run(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        try:
            for index, item in enumerate(items):
                self._check(index, item)
            if self._parallel.model.size > 1:
                self._agree_on_requests(items)
            if self._remote is not None:
                self._remote.begin(self._pool)
            for _ in self._compute_all(None):
                pass
        finally:
            self._release_images()
            self._let_go(list(self._held))
        self._engine.finish()
        if self._remote is not None:
            self._absorb_remote(self._remote)
        if self._parallel.ranks.size > 1:
            self._agree_on_results(items)
        return [self._results[index] for index in range(len(items))]

    def steps(
        self, items: Sequence[TrainItem], limit: StepLimit
    ) -> Generator[None, None, list[TrainResult | TrainFailure]]:
        """Do the same as :meth:`run`, but yield between micro-batches, so that other calls can use the model meanwhile.

        Those calls must use other adapters. ``limit`` is called before each micro-batch and returns the most tokens it
        may have, or None for as many as fit. Gradients computed so far are held in this object: an adapter changes
        only when all sequences of its request are done.
        """
        assert self._parallel.ranks.size == 1, "ranks compute in step with each other"
        try:
            for index, item in enumerate(items):
                self._check(index, item)
            yield from self._compute_all(limit)
        finally:
            self._release_images()
            self._let_go(list(self._held))
        self._engine.finish()
        return [self._results[index] for index in range(len(items))]

    def _compute_all(self, limit: StepLimit | None) -> Iterator[None]:
        """Compute all micro-batches. If there is a limit, yield after each of them but the last.

        Without a limit the results of one micro-batch are absorbed while the device computes the next one.
        """
        if self._pipeline is not None:
            yield from self._compute_at_once(self._pipeline)
            return
        queue = [batch for group in self._plan() for batch in group]
        running: tuple[MicroBatch, Computed] | None = None
        while queue:
            batch, *rest = cut(queue.pop(0), None if limit is None else limit())
            queue = rest + queue
            for index in batch.items:
                yield from self._evaluate_early(batch, index, limit)
            computed = self._compute(batch)
            if computed is None:
                queue = self._smaller(batch) + queue
            else:
                if running is not None:
                    self._absorb(*running)  # while the device is busy with the next one
                running = batch, computed
            if limit is not None and queue:
                if running is not None:  # before other calls run: free the device memory of this one
                    self._absorb(*running)
                    running = None
                yield
        if running is not None:
            self._absorb(*running)

    def _compute_at_once(self, pipeline: Pipeline) -> Iterator[None]:
        """Compute all micro-batches, in groups that run through the pipeline together. Nothing is yielded."""
        for group in self._plan():
            for batch in group:
                for index in batch.items:
                    yield from self._evaluate_early(batch, index, None)
            self._pool.make_resident(self._adapters(_requests_of(group)), trains=self._train)
            parts = [[self._part(batch, index) for index in batch.items] for batch in group]
            for batch in group:
                self._hold(batch)
            if self._train:
                computed = pipeline.forward_backward(parts, [batch.recompute for batch in group])
            else:
                computed = pipeline.forward(parts)
            for batch, results in zip(group, computed, strict=True):
                self._absorb(batch, results)

    def _check(self, index: int, item: TrainItem) -> None:
        architecture = self._engine.architecture
        longest = min(architecture.max_length, self.budget.longest)
        try:
            if not isinstance(item, TrainItem):
                raise InvalidInputError("item", type(item), "a TrainItem")
            if not isinstance(item.adapter_id, str):
                raise InvalidInputError("adapter_id", item.adapter_id, "a string")
            adapter = None if item.base_model else self._pool.get(item.adapter_id)
            if adapter is None and self._train and not self._trains_base:
                raise InvalidInputError("base_model", True, "False: the base model is not trained")
            if self._parallel.data.size > 1 and isinstance(item.data, Sequence) and not item.data:
                self._results[index] = TrainResult([], {"loss:sum": 0.0})
                self._begun[item.adapter_id] += 1
                return
            columns: dict[OutputKind, int] = {
                "logits": architecture.head.out_features,
                "embeddings": architecture.head.in_features,
            }
            checked = check_item(
                item,
                vocab_size=architecture.vocab_size,
                max_length=longest,
                columns=columns,
                vision=None if self._features is None else architecture.vision,
                routing=architecture.routing,
            )
            checked = self._decoded_images(checked)
            self._check_logits(checked)
            dropout = None if adapter is None else self._draw(item, adapter)
            self._begun[item.adapter_id] += 1
        except TwinkleError as error:
            self._results[index] = TrainFailure(error)
        else:
            evaluation = None
            if checked.objective is not None:
                shared = self._parallel.ranks.size > 1
                evaluation = Evaluation(checked.objective, len(checked.data), shared=shared)
            keeps_values = checked.statistics or evaluation is not None or checked.output != "logps"
            self._requests[index] = Request(checked, adapter, evaluation, keeps_values, dropout)

    def _decoded_images(self, item: CheckedItem) -> CheckedItem:
        """Return a request whose images are decoded, except those whose features are known, which are held.

        An image that cannot be decoded fails its request here.
        """
        features = self._features
        if features is None or not any(datum.images for datum in item.data):
            return item
        images = [image for datum in item.data for image in datum.images]
        features.hold(images)
        self._held_images += images
        data = [
            dataclasses.replace(
                datum,
                images=tuple(
                    features.decoded(image, f"data[{index}].images[{number}]")
                    for number, image in enumerate(datum.images)
                ),
            )
            for index, datum in enumerate(item.data)
        ]
        return dataclasses.replace(item, data=tuple(data))

    def _release_images(self) -> None:
        if self._features is not None:
            self._features.release(self._held_images)
            self._held_images = []

    def _draw(self, item: TrainItem, adapter: Adapter) -> DropoutDraw | None:
        """Return what decides the dropout of a request; None if the request has none.

        The number of a training pass is the number of the adapter's passes that succeeded before it. Among requests of
        one adapter in the same call, those before it count as if they will succeed.
        """
        if not self._train and not item.training:
            return None
        before = self._begun[item.adapter_id] if self._train else 0
        sequences = item.numbers or range(len(item.data))
        if len(sequences) != len(item.data):
            raise InvalidInputError("numbers", item.numbers, f"nothing, or {len(item.data)} integers")
        if not adapter.spec.dropout:
            return None
        assert adapter.spec.seed is not None, "check_spec draws one"
        return DropoutDraw(adapter.spec.dropout, adapter.spec.seed, adapter.passes + before, tuple(sequences))

    def _check_logits(self, item: CheckedItem) -> None:
        """Raise CapacityError if the logits of one sequence, which are held at once, do not fit the memory plan."""
        longest = max(len(datum.tokens) for datum in item.data)
        if item.output == "logits" and longest * item.columns > self.budget.logits:
            raise CapacityError(
                f"logits: a sequence of {longest} tokens has {longest * item.columns}; "
                f"the memory plan has room for {self.budget.logits}"
            )

    def _plan(self) -> Plan:
        """Return the micro-batches of this call. The ranks that hold the cuts of one model have the same plan."""
        if self._parallel.model.size == 1:
            return self._make_plan(len(self._requests))
        return agree_on_plan(
            self._parallel.model, self._make_plan, self._fits, lambda made: describe(made, self._requests)
        )

    def _fits(self, indices: frozenset[int]) -> bool:
        """Return whether the adapters of these requests fit, beside as many that other ranks may need at that time."""
        times = 1 if self._remote is None or len(indices) == 1 else self._remote.block
        return self._pool.fit(self._adapters(indices), times)

    def _make_plan(self, most: int) -> Plan:
        """Cut all requests into micro-batches. ``most``: the most requests of a group that runs together."""
        architecture = self._engine.architecture

        def fits(indices: frozenset[int]) -> bool:
            return len(indices) <= most and self._fits(indices)

        batches = plan(
            ordered_sequences(self._requests, architecture),
            self.budget,
            padded=architecture.padded,
            length_class=architecture.length_class,
            fits=fits,
            at_least=1 if self._pipeline is None else self._pipeline.fewest,
        )
        return schedules(batches, 1 if self._pipeline is None else self._pipeline.most, fits)

    def _adapters(self, indices: Sequence[int] | frozenset[int]) -> list[Adapter]:
        used = (self._requests[index].adapter for index in indices)
        return list({id(adapter): adapter for adapter in used if adapter is not None}.values())

    def _compute(self, batch: MicroBatch) -> Computed | None:
        """Compute one micro-batch. Return None if the device ran out of memory; no gradient is kept then."""
        self._pool.make_resident(self._adapters(batch.items), trains=self._train)
        parts = [self._part(batch, index) for index in batch.items]
        give_way, recompute = self._interruption(batch)
        self._hold(batch)
        try:
            if self._train:
                return self._engine.forward_backward(parts, recompute=recompute, give_way=give_way)
            return self._engine.forward(parts, give_way)
        except torch.OutOfMemoryError:
            self._let_go(batch.items, 1)
            return None

    def _hold(self, batch: MicroBatch) -> None:
        """Note that a micro-batch has a gradient for each of its requests, which takes memory until it is added."""
        for index in batch.items:
            adapter = self._requests[index].adapter
            if self._train and adapter is not None:
                adapter.held += 1
                self._held[index] += 1

    def _let_go(self, indices: Sequence[int], most: int | None = None) -> None:
        """Note that gradients of these requests take no memory any more: all of each, or ``most`` of them."""
        for index in indices:
            count = self._held[index] if most is None else min(most, self._held[index])
            self._held[index] -= count
            adapter = self._requests[index].adapter
            if adapter is not None:
                adapter.held -= count

    def _interruption(self, batch: MicroBatch) -> tuple[GiveWay | None, bool]:
        """Return what interrupts this micro-batch (None: it is not interrupted) and whether activations are recomputed.

        Other calls need memory, too: if kept activations leave too little, they are recomputed; if that still leaves
        too little, the batch is not interrupted. A sampler needs next to nothing, and nothing is recomputed for it; but
        without a cache it computes whole sequences and needs as much as other calls.
        """
        if self._give_way is None:
            return None, batch.recompute
        architecture = self._engine.architecture
        lean, padded = dataclasses.replace(batch, recompute=True), architecture.padded
        if not self._leaves_half:
            room = self.budget.leaves_room(batch, train=self._train, padded=padded)
            return self._give_way if room or architecture.samples_with_cache else None, batch.recompute
        if not batch.recompute and self.budget.leaves_room(batch, train=self._train, padded=padded):
            return self._give_way, False
        if self.budget.leaves_room(lean, train=self._train, padded=padded):
            return self._give_way, True
        return None, batch.recompute

    def _part(self, batch: MicroBatch, index: int) -> Part:
        request = self._requests[index]
        numbers = tuple(sequence.datum for sequence in batch.by_item[index])
        data = tuple(request.item.data[number] for number in numbers)
        evaluation = request.evaluation if self._train else None
        return Part(index, request.item, request.adapter, data, evaluation, numbers, request.dropout)

    def _evaluate_early(self, batch: MicroBatch, index: int, limit: StepLimit | None) -> Iterator[None]:
        """Evaluate the objective of a request before its first batch, if that batch does not hold all its sequences.

        An objective needs the log-probabilities of the whole request, so this runs an extra forward pass over all
        sequences. Afterwards each batch can be computed forward and backward by itself.
        """
        request = self._requests[index]
        evaluation, item = request.evaluation, request.item
        present = len(batch.by_item[index])
        if evaluation is None or evaluation.done or not self._train or present == len(item.data):
            return
        first = TrainerCall(
            self._engine,
            self._pool,
            self.budget,
            train=False,
            give_way=self._give_way,
            leaves_half=self._leaves_half,
            parallel=Parallelism(model=self._parallel.model),
            pipeline=self._pipeline,
            remote=self._remote,
        )
        plain = dataclasses.replace(item, objective=None, records_routes=False)
        first._requests[0] = Request(plain, request.adapter, keeps_values=True, dropout=request.dropout)
        yield from first._compute_all(limit)
        self.budget = first.budget
        outcome = first._results[0]
        if isinstance(outcome, TrainFailure):
            evaluation.error = outcome.error
        else:
            evaluation.run(first._requests[0].ordered_values)

    def _smaller(self, batch: MicroBatch) -> list[MicroBatch]:
        """Return what to try instead of a batch that did not fit; with nothing left to try, fail its request.

        A batch that was not recomputed also lowers the token budget of later calls.
        """
        torch.cuda.empty_cache()
        tokens = batch.tokens
        if not batch.recompute:
            self.budget = dataclasses.replace(self.budget, tokens=min(self.budget.tokens, max(1, tokens // 2)))
        smaller = halves(batch)
        if not smaller:
            self._fail(
                batch.items[0], CapacityError(f"a sequence of {tokens} tokens does not fit this device's memory")
            )
        return smaller

    def _absorb(self, batch: MicroBatch, computed: Computed) -> None:
        """Take the results of a micro-batch from the device, and finish the requests that are complete now."""
        values = iter(computed.values)
        routes = iter(computed.routes([sequence.length for sequence in batch.sequences]))
        for index, sequences in batch.by_item.items():
            request = self._requests[index]
            for sequence in sequences:
                rows_TM, own_routes = next(values), next(routes, None)
                if request.item.records_routes and own_routes is not None:
                    request.routes[sequence.datum] = own_routes
                datum = request.item.data[sequence.datum]
                request.logprobs[sequence.datum] = np.ascontiguousarray(rows_TM[:, : datum.width])
                if request.keeps_values:
                    columns, pooled = request.item.columns, request.item.output == "embeddings"
                    shape = (1,) if pooled else datum.target_shape
                    request.values[sequence.datum] = token_values(rows_TM, datum.width, shape, columns)
            if request.complete:
                self._evaluate(request)
        for gradient in computed.gradients:
            self._add_gradient(gradient)
        for index in batch.items:
            if self._requests[index].complete and index not in self._results:
                self._finish(index, self._requests[index])
        self._let_go([index for index in batch.items if self._requests[index].gradient_P is None])

    def _add_gradient(self, gradient: GradientRow) -> None:
        """Add a gradient to what its request has so far."""
        index, request = gradient.index, self._requests.get(gradient.index)
        if request is None:
            self._elsewhere[index] = gradient.added_to(self._elsewhere.get(index))
            return
        before = None
        if request.gradient_P is not None:  # two become one
            before = GradientRow(index, request.gradient_P, request.finite)
            self._let_go([index], 1)
        total = gradient.added_to(before)
        request.gradient_P, request.finite = total.row_P, request.finite and total.finite

    def _absorb_remote(self, remote: RemoteRequests) -> None:
        """Take the rest of the gradients, and fail requests of which a part is not finite."""
        for gradient in remote.gradients():
            self._add_gradient(gradient)
        finite = {index: request.finite for index, request in self._requests.items()}
        finite |= {index: each.finite for index, each in self._elsewhere.items()}
        for index, each in finite.items():
            if not each and not isinstance(self._results.get(index), TrainFailure):
                self._fail(index, NonFiniteError(_NOT_FINITE))

    def _evaluate(self, request: Request) -> None:
        evaluation = request.evaluation
        if evaluation is None and request.item.output == "embeddings":  # no named loss reads them
            request.metrics = {"loss:sum": 0.0}
            return
        if evaluation is None:
            request.metrics = evaluate(request.item, request.ordered_logprobs)
            return
        if not evaluation.done:  # a forward pass: it has no backward pass before which the objective would have run
            evaluation.run(request.ordered_values)
        if evaluation.error is None:
            request.metrics = evaluation.metrics

    def _finish(self, index: int, request: Request) -> None:
        logprobs, metrics = request.ordered_logprobs, request.metrics
        if request.evaluation is not None and request.evaluation.error is not None:
            self._fail(index, request.evaluation.error)
        elif not math.isfinite(metrics["loss:sum"]):
            loss = f"loss {request.item.loss.name!r} is {metrics['loss:sum']}"
            self._fail(index, NonFiniteError(f"{loss}: no gradient was kept"))
        elif not all(np.isfinite(lp).all() for lp in logprobs):
            # The loss may ignore the target, for example because its weight is 0, and be finite nevertheless.
            self._fail(index, NonFiniteError(f"{_first_not_finite(logprobs)}: no gradient was kept"))
        elif not request.finite:
            self._fail(index, NonFiniteError(_NOT_FINITE))
        else:
            if self._parallel.ranks.size == 1:
                request.keep_gradient()
                if self._train and request.adapter is not None:
                    request.adapter.passes += 1
            item = request.item
            if item.output == "embeddings":
                logprobs = [np.zeros(0, np.float32) for _ in logprobs]
            else:
                logprobs = [lp.reshape(d.target_shape) for lp, d in zip(logprobs, item.data, strict=True)]
            values = tuple(request.ordered_values) if item.statistics or item.output != "logps" else ()
            routes = tuple(request.routes[number] for number in sorted(request.routes))
            self._results[index] = TrainResult(logprobs, metrics, values, routes)

    def _agree_on_requests(self, items: Sequence[TrainItem]) -> None:
        """Before the ranks of one model compute together: fail requests on all ranks whose check failed on any."""
        reports = []
        for index, item in enumerate(items):
            request, report = self._requests.get(index), self._report(index, item)
            if request is not None:
                digest = contents_digest(request.item, request.layout_digest, request.dropout)
                report = dataclasses.replace(report, count=len(request.item.data), digest=digest)
            reports.append(report)
        for index, error in enumerate(agree(self._parallel.ranks, reports)):
            if error is not None:
                self._fail(index, error)
                self._requests.pop(index, None)

    def _agree_on_results(self, items: Sequence[TrainItem]) -> None:
        """Exchange results between ranks: fail requests that failed on any rank; keep gradients of the others.

        Each rank adds the gradient of its own sequences to its own copy of the adapter.
        """
        reports = [self._report(index, item) for index, item in enumerate(items)]
        for index, error in enumerate(agree(self._parallel.ranks, reports)):
            if error is None:
                self._keep_part(index, items[index])
            else:
                self._fail(index, error)

    def _report(self, index: int, item: TrainItem) -> RankReport:
        name = str(item.adapter_id) if isinstance(item, TrainItem) else ""
        result, number = self._results.get(index), self._parallel.data.number
        if isinstance(result, TrainFailure):
            return RankReport(name, 0, result.error, data=number)
        return RankReport(name, 0 if result is None else len(result.logprobs), data=number)

    def _keep_part(self, index: int, item: TrainItem) -> None:
        if self._train and not self._trains_base:
            adapter = self._pool.get(item.adapter_id)
            adapter.divide_gradient(keeps=self._parallel.data.number == 0)
            adapter.passes += 1  # on all ranks, also on those that have none of its sequences
            request = self._requests.get(index)
            if request is not None:
                request.keep_gradient()
            elif index in self._elsewhere:
                adapter.add_gradient(self._elsewhere[index].row_P)

    def _fail(self, index: int, error: TwinkleError) -> None:
        self._results[index] = TrainFailure(error)
        if index in self._requests:
            self._requests[index].gradient_P = None


def _requests_of(group: Sequence[MicroBatch]) -> frozenset[int]:
    return frozenset(index for batch in group for index in batch.items)


def _first_not_finite(logprobs: Sequence[FloatArray]) -> str:
    """Return where the first log-probability is that is NaN or infinite. ``logprobs``: (T, K) for each datum."""
    number, rows = next((number, rows) for number, rows in enumerate(logprobs) if not np.isfinite(rows).all())
    token = int(np.argwhere(~np.isfinite(rows))[0][0])
    return f"a log-probability of token {token} of data[{number}] is NaN or infinite"
