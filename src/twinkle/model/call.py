"""One call of ``forward`` or ``forward_backward``: many requests in, one result or failure each out.

Requests are checked one by one, cut into micro-batches together, and finished one by one as soon as their last sequence
is computed. Out of memory is never a tenant's problem: a batch that does not fit after all is cut in halves.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import CapacityError, InvalidInputError, NonFiniteError, TwinkleError
from twinkle.model.adapter import Adapter
from twinkle.model.batch import Part
from twinkle.model.custom_loss import CustomPart, Evaluation, token_values
from twinkle.model.engine import Computed, Engine
from twinkle.model.objective import evaluate
from twinkle.model.packing import Budget, MicroBatch, SequenceRef, halves, plan
from twinkle.model.residency import AdapterPool
from twinkle.model.types import FloatArray, TokenValues, TrainFailure, TrainItem, TrainResult
from twinkle.model.validation import CheckedItem, check_item


@dataclass
class _Request:
    """A request under way: what has been computed of it so far."""

    item: CheckedItem
    adapter: Adapter | None  # None: the base model
    evaluation: Evaluation | None = None  # of an objective in the place of a named loss
    keeps_values: bool = False
    values: dict[int, TokenValues] = field(default_factory=dict)  # datum → all that is known of it, if kept
    logprobs: dict[int, FloatArray] = field(default_factory=dict)  # datum → (T, K)
    metrics: dict[str, float] = field(default_factory=dict)  # once complete
    gradient_P: Tensor | None = None
    finite: bool = True

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == len(self.item.data)

    @property
    def ordered_logprobs(self) -> list[FloatArray]:
        return [self.logprobs[number] for number in range(len(self.item.data))]

    @property
    def ordered_values(self) -> list[TokenValues]:
        return [self.values[number] for number in range(len(self.item.data))]


class Call:
    """Runs requests on an engine; ``budget`` shrinks when the device turns out to hold less than measured."""

    def __init__(self, engine: Engine, pool: AdapterPool, budget: Budget, *, train: bool) -> None:
        self.budget = budget
        self._engine = engine
        self._pool = pool
        self._train = train
        self._requests: dict[int, _Request] = {}
        self._results: dict[int, TrainResult | TrainFailure] = {}

    def run(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        for index, item in enumerate(items):
            self._check(index, item)
        self._compute_all()
        return [self._results[index] for index in range(len(items))]

    def _compute_all(self) -> None:
        queue = self._plan()
        running: tuple[MicroBatch, Computed] | None = None
        while queue:
            batch = queue.pop(0)
            computed = self._compute(batch)
            if computed is None:
                queue = self._smaller(batch) + queue
            else:
                if running is not None:
                    self._absorb(*running)  # while the device is busy with the next one
                running = batch, computed
        if running is not None:
            self._absorb(*running)

    def _check(self, index: int, item: TrainItem) -> None:
        architecture = self._engine.architecture
        longest = min(architecture.max_length, self.budget.longest)
        try:
            if not isinstance(item, TrainItem):
                raise InvalidInputError("item", type(item), "a TrainItem")
            if not isinstance(item.adapter_id, str):
                raise InvalidInputError("adapter_id", item.adapter_id, "a string")
            adapter = None if item.base_model else self._pool.get(item.adapter_id)
            if adapter is None and self._train:
                raise InvalidInputError("base_model", True, "False: the base model is not trained")
            checked = check_item(item, vocab_size=architecture.vocab_size, max_length=longest)
        except TwinkleError as error:
            self._results[index] = TrainFailure(error)
        else:
            evaluation = None if checked.objective is None else Evaluation(checked.objective)
            keeps_values = checked.statistics or evaluation is not None
            self._requests[index] = _Request(checked, adapter, evaluation, keeps_values)

    def _plan(self) -> list[MicroBatch]:
        """Order by stack, loss and slot: a stack's rows are one range, equal losses and neighbouring slots adjoin."""

        def order(index: int) -> tuple[int, str, str, int, int]:
            request = self._requests[index]
            if request.adapter is None:
                return 0, "", request.item.loss.name, -1, index
            layout, slot = request.adapter.layout, request.adapter.slot
            return layout.rank, layout.digest, request.item.loss.name, -1 if slot is None else slot, index

        architecture = self._engine.architecture
        sequences = []
        for index in sorted(self._requests, key=order):
            data = self._requests[index].item.data
            numbers = list(range(len(data)))
            if architecture.padded:  # neighbours of like length waste least
                numbers.sort(key=lambda number: len(data[number].tokens))
            sequences += [SequenceRef(index, number, len(data[number].tokens)) for number in numbers]
        return plan(
            sequences,
            self.budget,
            padded=architecture.padded,
            length_class=architecture.length_class,
            fits=lambda indices: self._pool.fit(self._adapters(indices)),
        )

    def _adapters(self, indices: Sequence[int] | frozenset[int]) -> list[Adapter]:
        used = (self._requests[index].adapter for index in indices)
        return list({id(adapter): adapter for adapter in used if adapter is not None}.values())

    def _compute(self, batch: MicroBatch) -> Computed | None:
        """None when the device ran out of memory; nothing has changed then."""
        for index in batch.items:
            self._evaluate_early(batch, index)
        self._pool.make_resident(self._adapters(batch.items))
        parts = [self._part(batch, index) for index in batch.items]
        try:
            if self._train:
                return self._engine.forward_backward(parts, recompute=batch.recompute)
            return self._engine.forward(parts)
        except torch.OutOfMemoryError:
            return None

    def _part(self, batch: MicroBatch, index: int) -> Part:
        request = self._requests[index]
        sequences = [sequence for sequence in batch.sequences if sequence.item == index]
        data = tuple(request.item.data[sequence.datum] for sequence in sequences)
        custom = None
        if request.evaluation is not None and self._train:
            numbers, lengths = [s.datum for s in sequences], [s.length for s in sequences]
            custom = CustomPart(request.evaluation, numbers, lengths)
        return Part(index, request.item, request.adapter, data, custom)

    def _evaluate_early(self, batch: MicroBatch, index: int) -> None:
        """An objective whose sequences are not all in this batch needs a forward pass over all of them first."""
        request = self._requests[index]
        evaluation, item = request.evaluation, request.item
        present = sum(sequence.item == index for sequence in batch.sequences)
        if evaluation is None or evaluation.done or not self._train or present == len(item.data):
            return
        first = Call(self._engine, self._pool, self.budget, train=False)
        first._requests[0] = _Request(dataclasses.replace(item, objective=None), request.adapter, keeps_values=True)
        first._compute_all()
        self.budget = first.budget
        outcome = first._results[0]
        if isinstance(outcome, TrainFailure):
            evaluation.error = outcome.error
        else:
            evaluation.run(first._requests[0].ordered_values)

    def _smaller(self, batch: MicroBatch) -> list[MicroBatch]:
        """What to try instead of a batch that did not fit."""
        torch.cuda.empty_cache()
        tokens = sum(sequence.length for sequence in batch.sequences)
        if not batch.recompute:
            self.budget = dataclasses.replace(self.budget, tokens=min(self.budget.tokens, max(1, tokens // 2)))
        smaller = halves(batch)
        if not smaller:
            self._fail(
                batch.items[0], CapacityError(f"a sequence of {tokens} tokens does not fit this device's memory")
            )
        return smaller

    def _absorb(self, batch: MicroBatch, computed: Computed) -> None:
        row, all_values_TM = 0, computed.values
        width = max(self._requests[s.item].item.data[s.datum].targets.shape[1] for s in batch.sequences)
        for index in batch.items:
            request = self._requests[index]
            for sequence in (s for s in batch.sequences if s.item == index):
                rows_TM = all_values_TM[row : row + sequence.length]
                own_width = request.item.data[sequence.datum].targets.shape[1]
                request.logprobs[sequence.datum] = np.ascontiguousarray(rows_TM[:, :own_width])
                if request.keeps_values:
                    request.values[sequence.datum] = token_values(rows_TM, width)
                row += sequence.length
            if request.complete:
                self._evaluate(request)
        for gradient in computed.gradients:
            request = self._requests[gradient.index]
            request.finite = request.finite and gradient.finite
            if request.gradient_P is None:
                request.gradient_P = gradient.row_P
            else:  # finite parts may overflow together
                request.gradient_P = request.gradient_P + gradient.row_P
                request.finite = request.finite and bool(request.gradient_P.sum().isfinite())
        for index in batch.items:
            if self._requests[index].complete and index not in self._results:
                self._finish(index, self._requests[index])

    def _evaluate(self, request: _Request) -> None:
        evaluation = request.evaluation
        if evaluation is None:
            request.metrics = evaluate(request.item, request.ordered_logprobs)
            return
        if not evaluation.done:  # nothing was trained
            evaluation.run(request.ordered_values)
        if evaluation.error is None:
            request.metrics = evaluation.metrics

    def _finish(self, index: int, request: _Request) -> None:
        logprobs, metrics = request.ordered_logprobs, request.metrics
        if request.evaluation is not None and request.evaluation.error is not None:
            self._fail(index, request.evaluation.error)
        elif not all(np.isfinite(lp).all() for lp in logprobs) or not math.isfinite(metrics["loss:sum"]):
            self._fail(
                index, NonFiniteError(f"loss {request.item.loss.name!r} is {metrics['loss:sum']}: nothing was kept")
            )
        elif not request.finite:
            self._fail(index, NonFiniteError("the gradient holds NaN or infinity: nothing was kept"))
        else:
            if request.gradient_P is not None:
                assert request.adapter is not None
                request.adapter.add_gradient(request.gradient_P)
            shaped = [lp.reshape(d.target_shape) for lp, d in zip(logprobs, request.item.data, strict=True)]
            values = tuple(request.ordered_values) if request.item.statistics else ()
            self._results[index] = TrainResult(shaped, metrics, values)
        request.gradient_P = None

    def _fail(self, index: int, error: TwinkleError) -> None:
        self._results[index] = TrainFailure(error)
