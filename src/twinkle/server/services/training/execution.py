"""Runs batches of ops on the device, in the compute thread, and turns results and errors into outcomes."""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from twinkle.errors import NonFiniteError, TwinkleError, UserError
from twinkle.model.objectives.validation import in_terms_of_rows
from twinkle.model.types import Objective, TrainFailure, TrainItem, TrainResult
from twinkle.server.backends.compute_thread import compute_thread
from twinkle.server.services.training.context import TrainingContext
from twinkle.server.services.training.measurements import counted
from twinkle.server.services.training.run_kind import DevicePass, RunKinds
from twinkle.server.types import CreateAdapter, Ending, Op, OpKind, OptimStep, Outcome, Refused, TrainPass
from twinkle.server.wire import responses
from twinkle.server.wire.training import as_sent, encode_training_result
from twinkle.server.wire.training_json import is_json

logger = logging.getLogger(__name__)

_GRAD_NORM = "unclipped_grad_l2:mean"  # the name of this metric in a trainer's result

Steps = Iterator[list[Outcome] | None]  # None after each step except the last
StepLimit = Callable[[], int | None]  # returns the most tokens of the next step; None: no other tenant has work
GiveWay = Callable[[], None]  # called by the trainer in the middle of a step: lets other work run


class Execution:
    """Runs ops on one model. Its methods are called in the compute thread. An op that fails gets a failed outcome; its
    error is not raised.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._trainer = context.model.trainer
        self._kinds = context.kinds
        self._measurements = context.measurements
        self._recorder = context.recorder

    @compute_thread
    def passes(self, ops: Sequence[Op], let_sampling_run: GiveWay | None = None) -> list[Outcome]:
        """Run one batch of passes and return their outcomes in order.

        All are forward, or all are forward_backward; they may belong to many adapters and to both protocols.
        ``let_sampling_run``: called in the middle of the passes where the trainer can be interrupted.
        """
        steps = self.passes_in_steps(ops, None, let_sampling_run)
        return next(outcomes for outcomes in steps if outcomes is not None)

    def passes_in_steps(
        self, ops: Sequence[Op], limit: StepLimit | None = None, give_way: GiveWay | None = None
    ) -> Steps:
        """Run one batch of passes as an iterator. The last item has the outcomes; items before it are None.

        With a ``limit``, each step computes one micro-batch, and ``give_way`` may run all kinds of work. Without it,
        the batch is computed in one step, and ``give_way`` may only let the sampler run. See
        :meth:`~twinkle.server.backends.backend.TrainingBackend.in_steps`.
        """
        outcomes: dict[int, Outcome] = {}
        for batch in _rounds(ops, self._kinds):
            prepared: dict[int, DevicePass] = {}
            for index in batch:
                try:
                    prepared[index] = self._prepared(ops[index])
                except Exception as error:  # noqa: BLE001 - an edge of the service: a bug fails its own request alone
                    outcomes[index] = failure_of(_as_sent(error, ops[index]), ops[index].request_id)
            outcomes |= yield from self._computed(ops, prepared, limit, give_way)
        yield [outcomes[index] for index in range(len(ops))]

    def _prepared(self, op: Op) -> DevicePass:
        """Return the item that the trainer runs for a pass, with the function that encodes its result."""
        trains = op.kind is OpKind.FORWARD_BACKWARD
        match op.payload:
            case TrainPass(data) as sent:

                def encode_sent(result: TrainResult) -> Outcome:
                    # Clients that send JSON read each target's part of the loss, too.
                    outcome = encode_training_result(result, data if is_json(op.body) else ())
                    if trains and "loss:sum" in result.metrics:
                        summed = result.metrics["loss:sum"]
                        self._measurements.passed(op.adapter_id, summed, counted(sent), sent.tokens)
                    return outcome

                return DevicePass(_item(op.adapter_id, sent), encode_sent)
            case Refused(message):
                raise UserError(message)
            case other:
                return self._kinds.by_payload[type(other)].prepare(op, self._measurements)

    def _computed(
        self,
        ops: Sequence[Op],
        prepared: Mapping[int, DevicePass],
        limit: StepLimit | None,
        give_way: GiveWay | None,
    ) -> Generator[None, None, dict[int, Outcome]]:
        if not prepared:
            return {}
        items, trains = [each.item for each in prepared.values()], ops[0].kind is OpKind.FORWARD_BACKWARD
        try:
            results = yield from self._trainer.in_steps(items, train=trains, limit=limit, give_way=give_way)
        except Exception as error:  # noqa: BLE001 - an edge of the service: a bug fails its batch, not the server
            return {index: unexpected(error, ops[index].request_id) for index in prepared}
        return {
            index: self._encoded(ops[index], each, result)
            for (index, each), result in zip(prepared.items(), results, strict=True)
        }

    def _encoded(self, op: Op, prepared: DevicePass, result: TrainResult | TrainFailure) -> Outcome:
        if isinstance(result, TrainFailure):
            return failure_of(_as_sent(result.error, op), op.request_id)
        try:
            if isinstance(op.payload, TrainPass) and not op.payload.without_adapter:
                self._recorder.passed(prepared.item, result)
            return prepared.encode(result)
        except Exception as error:  # noqa: BLE001 - an edge: a result that cannot be encoded fails its own request alone
            return failure_of(error, op.request_id)

    @compute_thread
    def short_barriers(self, ops: Sequence[Op]) -> list[Outcome]:
        """Run barriers that need neither files nor the database, such as creating an adapter or an optimizer step."""
        return [self._guarded(op) for op in ops]

    @compute_thread
    def drop_window(self, adapter_id: str) -> None:
        """Drop the gradient of an adapter's open window, and what its run kind counted and what was measured of it."""
        if adapter_id in self._trainer.adapter_ids():
            self._trainer.zero_grad(adapter_id)
        self._kinds.find(adapter_id).drop_window(adapter_id)
        self._measurements.dropped(adapter_id)

    def _guarded(self, op: Op) -> Outcome:
        try:
            return self._barrier(op)
        except Exception as error:  # noqa: BLE001 - an edge of the service: an error fails its own request alone
            return failure_of(error, op.request_id)

    def _barrier(self, op: Op) -> Outcome:
        match op.payload:
            case CreateAdapter(spec):
                if op.adapter_id not in self._trainer.adapter_ids():
                    self._trainer.create_adapter(op.adapter_id, spec)
                return responses.created(op.adapter_id)
            case OptimStep(params):
                try:
                    metrics = self._trainer.optim_step(op.adapter_id, params)
                except NonFiniteError as error:
                    # No step is possible with such a gradient, so it is dropped and the next window starts clean. After
                    # any other error, such as invalid parameters, the gradient is still there.
                    self.drop_window(op.adapter_id)
                    message = f"{error}; the gradient since the last optim_step is dropped"
                    return Outcome.failure(message, "user", Ending.DROPPED)
                norm = metrics.get(_GRAD_NORM)
                self._measurements.stepped(op.adapter_id, op.seq, params.learning_rate, norm)
                return responses.stepped(metrics)
            case Refused(message):
                return Outcome.failure(message, "user")
            case other:
                return self._kinds.by_payload[type(other)].run_on_device(op, self._measurements)


def _item(adapter_id: str, asked: TrainPass) -> TrainItem:
    objective: Objective
    if asked.custom is not None:
        # It imports torch: only when a request uses a custom loss.
        from twinkle.model.objectives.graph_objective import GraphObjective

        assert asked.custom.graph is not None, "it was looked up when the op was accepted"
        objective = GraphObjective.for_data(asked.custom.graph, asked.data, asked.custom.inputs)
    elif asked.preference is not None:
        from twinkle.model.multi_lora.preference_objective import PreferenceObjective  # imports torch, too

        objective = PreferenceObjective(asked.data, asked.preference)
    else:
        return TrainItem(adapter_id, asked.data, asked.loss, asked.loss_config, base_model=asked.without_adapter)
    return TrainItem(adapter_id, asked.data, objective=objective, base_model=asked.without_adapter)


def _as_sent(error: Exception, op: Op) -> Exception:
    """Return an error with the names that fields have in the client's protocol."""
    return as_sent(error) if isinstance(op.payload, TrainPass) else in_terms_of_rows(error)


def _rounds(ops: Sequence[Op], kinds: RunKinds) -> list[list[int]]:
    """Divide a batch into rounds, as lists of indices into ``ops``, that run one after another.

    Passes that leave nothing behind but a gradient all go into the first round. Where a pass leaves other state behind
    (``passes_leave_state``), the passes of one adapter go into different rounds, in order.
    """
    rounds: list[list[int]] = []
    count: dict[str, int] = {}
    for index, op in enumerate(ops):
        place = count.get(op.adapter_id, 0)
        if kinds.find(op.adapter_id).passes_leave_state:
            count[op.adapter_id] = place + 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(index)
    return rounds


def failure_of(error: Exception, request_id: str) -> Outcome:
    """Return the outcome for an error.

    The message of a user's mistake says what to fix. An error of the server is logged, and its message has the request
    id, by which an operator finds it in the log.
    """
    if not isinstance(error, TwinkleError):
        return unexpected(error, request_id)
    if isinstance(error, UserError):
        return Outcome.failure(str(error), "user")
    logger.error("request %s failed: %s", request_id, error, extra={"request_id": request_id})
    return Outcome.failure(f"{error} (request {request_id})", "server")


def unexpected(error: Exception, request_id: str) -> Outcome:
    """Log an error that is a bug of the server, and return an outcome that does not show its text to the client."""
    logger.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
    return Outcome.failure(f"internal error; the server's log has the details under request {request_id}", "server")
