"""Computes the requests of calls on a model whose own weights are trained, each training request by itself."""

import dataclasses
from collections.abc import Callable, Generator, Sequence

from twinkle.errors import NonFiniteError, TwinkleError
from twinkle.model.adapters.residency import AdapterPool
from twinkle.model.decoder.layers import GiveWay
from twinkle.model.full.assembly import TrainedModel
from twinkle.model.full.passes import FailedPassError, WholePasses
from twinkle.model.trainer.call import StepLimit, TrainerCall
from twinkle.model.trainer.packing import Budget
from twinkle.model.types import TrainFailure, TrainItem, TrainResult

Outcome = TrainResult | TrainFailure
Steps = Generator[None, None, list[Outcome]]  # yields between micro-batches, and returns an outcome per request
Refusal = Callable[[object], TwinkleError | None]  # returns why a request cannot be computed; None: it can be tried


class RequestRunner:
    """Computes requests, and holds the token budget, which shrinks when the device holds less than was measured."""

    def __init__(self, model: TrainedModel) -> None:
        plan = model.memory
        self._budget = Budget(plan.tokens, plan.tokens_recomputed, most_tokens=plan.most_tokens, logits=plan.logits)
        self._gradient = model.gradient
        self._parallel = model.parallel
        self._no_adapters = AdapterPool(0, model.dtype, model.device)
        self._passes = WholePasses(model.passes)
        self._pipeline = model.pipeline
        self._training = False  # whether a request's gradient is being computed

    def scored(
        self, items: Sequence[TrainItem], refusal: Refusal, limit: StepLimit | None, give_way: GiveWay | None
    ) -> Steps:
        """Compute all requests of a call together, without gradients."""
        refused = {index: error for index, item in enumerate(items) if (error := refusal(item)) is not None}
        accepted = [_without_adapter(item) for index, item in enumerate(items) if index not in refused]
        call = self._call(give_way, train=False)
        results = call.run(accepted) if limit is None else (yield from call.steps(accepted, limit))
        self._budget = call.budget
        rest = iter(results)
        return [TrainFailure(refused[index]) if index in refused else next(rest) for index in range(len(items))]

    def trained(
        self,
        items: Sequence[TrainItem],
        refusal: Refusal,
        limit: StepLimit | None,
        give_way: GiveWay | None,
        keep: Callable[[TrainItem], None],
    ) -> Steps:
        """Compute the requests of a call one after another, with gradients; ``keep`` takes that of a finished request.

        Requests do not share micro-batches: their gradients could not be told apart if one of them failed.
        """
        results: list[Outcome] = []
        for number, item in enumerate(items):
            if number and limit is not None:
                yield
            error = refusal(item)
            if error is not None:
                results.append(TrainFailure(error))
                continue
            result = yield from self._trained_alone(_without_adapter(item), limit, give_way, keep)
            results.append(result)
        return results

    def _trained_alone(
        self,
        item: TrainItem,
        limit: StepLimit | None,
        give_way: GiveWay | None,
        keep: Callable[[TrainItem], None],
    ) -> Generator[None, None, Outcome]:
        assert not self._training, "the gradients of two requests are never computed at the same time"
        self._training = True
        try:
            while True:
                call = self._call(give_way, train=True)
                try:
                    results = call.run([item]) if limit is None else (yield from call.steps([item], limit))
                except FailedPassError as failed:  # parts of its gradient are in the sum: begin the request again
                    self._gradient.drop()
                    self._budget = failed.smaller_budget(self._budget)
                    continue
                self._budget = call.budget
                return self._kept(item, results[0], keep)
        finally:
            self._gradient.drop()
            self._training = False

    def _kept(self, item: TrainItem, result: Outcome, keep: Callable[[TrainItem], None]) -> Outcome:
        """Let the gradient of a request be kept if the request succeeded on all ranks. Return its outcome."""
        if isinstance(result, TrainFailure):
            return result
        self._gradient.finish()
        if not self._parallel.ranks.smallest(int(self._gradient.finite())):
            return TrainFailure(NonFiniteError("the gradient holds NaN or infinity: it was not kept"))
        try:
            keep(item)
        except TwinkleError as error:
            return TrainFailure(error)
        return result

    def _call(self, give_way: GiveWay | None, *, train: bool) -> TrainerCall:
        return TrainerCall(
            self._passes,
            self._no_adapters,
            self._budget,
            train=train,
            parallel=self._parallel,
            pipeline=self._pipeline,
            give_way=give_way,
            leaves_half=False,
            trains_base=True,
        )


def finished(steps: Steps) -> list[Outcome]:
    """Run all steps, and return the outcomes."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            results: list[Outcome] = end.value
            return results


def _without_adapter(item: TrainItem) -> TrainItem:
    """Return a request as the engine sees it: all weights are the model's own, and there is no adapter."""
    return dataclasses.replace(item, base_model=True)
