"""Ops on the device: what the compute thread does with a batch, and how errors become outcomes."""

import logging
from collections.abc import Sequence

from twinkle.errors import TwinkleError, UserError
from twinkle.model.types import TrainFailure, TrainItem
from twinkle.server.backend import ServedModel, TrainingBackend
from twinkle.server.types import (
    CreateAdapter,
    Op,
    OpKind,
    OptimStep,
    Outcome,
    Refused,
    TrainPass,
)
from twinkle.server.wire import responses
from twinkle.server.wire.training import encode_training_result

logger = logging.getLogger(__name__)


class Execution:
    """Runs ops on one model. Every method is called from the compute thread and never raises for a tenant's sake."""

    def __init__(self, model: ServedModel) -> None:
        self._trainer: TrainingBackend = model.trainer

    def passes(self, ops: Sequence[Op]) -> list[Outcome]:
        """One device batch: forward or forward_backward, all alike, of many adapters."""
        outcomes: dict[int, Outcome] = {}
        items: list[tuple[int, TrainItem]] = []
        for index, op in enumerate(ops):
            if isinstance(op.payload, TrainPass):
                payload = op.payload
                items.append((index, TrainItem(op.adapter_id, payload.data, payload.loss, payload.loss_config)))
            else:
                assert isinstance(op.payload, Refused), op.payload
                outcomes[index] = responses.failed(op.payload.message, "user")
        if items:
            run = self._trainer.forward_backward if ops[0].kind is OpKind.FORWARD_BACKWARD else self._trainer.forward
            try:
                results = run([item for _, item in items])
            except Exception as error:  # noqa: BLE001 - the trainer loop is an edge: a bug fails its batch, not the server
                failure = unexpected(error, ops[0].request_id)
                outcomes |= {index: failure for index, _ in items}
            else:
                for (index, _), result in zip(items, results, strict=True):
                    if isinstance(result, TrainFailure):
                        outcomes[index] = failure_of(result.error, ops[index].request_id)
                    else:
                        outcomes[index] = encode_training_result(result)
        return [outcomes[index] for index in range(len(ops))]

    def short_barriers(self, ops: Sequence[Op]) -> list[Outcome]:
        """Barriers that touch nothing but the device: creating an adapter and stepping its optimizer."""
        return [self._guarded(op) for op in ops]

    def drop_window(self, adapter_id: str) -> None:
        """Forget the gradient of a window that failed."""
        if adapter_id in self._trainer.adapter_ids():
            self._trainer.zero_grad(adapter_id)

    def _guarded(self, op: Op) -> Outcome:
        try:
            return self._barrier(op)
        except TwinkleError as error:
            return failure_of(error, op.request_id)
        except Exception as error:  # noqa: BLE001 - as above
            return unexpected(error, op.request_id)

    def _barrier(self, op: Op) -> Outcome:
        match op.payload:
            case CreateAdapter(spec):
                if op.adapter_id not in self._trainer.adapter_ids():
                    self._trainer.create_adapter(op.adapter_id, spec)
                return responses.created(op.adapter_id)
            case OptimStep(params):
                try:
                    return responses.stepped(self._trainer.optim_step(op.adapter_id, params))
                except TwinkleError:
                    self._trainer.zero_grad(op.adapter_id)  # the window is closed: the next one starts clean
                    raise
            case Refused(message):
                return responses.failed(message, "user")
            case _:
                raise AssertionError(f"{op.kind} is not a short barrier")


def failure_of(error: TwinkleError, request_id: str) -> Outcome:
    """A tenant's mistake says what to fix; what is ours is logged and says whom to ask."""
    if isinstance(error, UserError):
        return responses.failed(str(error), "user")
    logger.error("request %s failed: %s", request_id, error)
    return responses.failed(f"{error} (request {request_id})", "server")


def unexpected(error: Exception, request_id: str) -> Outcome:
    logger.error("request %s failed", request_id, exc_info=error)
    return responses.failed(f"internal error; the server's log has the details under request {request_id}", "server")
