"""A loss graph as the objective of a Trainer's request: evaluated for each sequence by itself, and summed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, TwinkleError, UserError
from twinkle.loss.graph.interpreter import DatumLoss, Limits, Meter, evaluate
from twinkle.loss.graph.nodes import LOGPROBS, LossGraph, LossInput
from twinkle.model.csr import Csr, dense
from twinkle.model.types import Datum, ObjectiveValue, TokenValues

Arrays = Mapping[str, NDArray[Any] | Csr]


@dataclass(frozen=True)
class GraphObjective:
    """A loss graph with its inputs.

    ``inputs``: for every sequence the arrays that the graph reads beside log-probabilities. Sparse arrays are written
    out for one sequence at a time.
    """

    graph: LossGraph
    inputs: tuple[Arrays, ...]
    limits: Limits = Limits()  # noqa: RUF009 - frozen

    @classmethod
    def for_data(cls, graph: LossGraph, data: Sequence[Datum], given: Sequence[Arrays]) -> "GraphObjective":
        """Select the graph's inputs from ``given``, which has all arrays of each sequence by name.

        Raises if an input of the graph is missing or has the wrong rank.
        """
        inputs = []
        for number, (datum, arrays) in enumerate(zip(data, given, strict=True)):
            _check_rank(graph, f"data[{number}].target_tokens", graph.inputs[0].rank, datum.targets.ndim)
            where = f"data[{number}].loss_fn_inputs"
            inputs.append({each.name: _array(graph, each, arrays, where) for each in graph.inputs[1:]})
        return cls(graph, tuple(inputs))

    def __call__(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        try:
            return self._value(values)
        except TwinkleError:
            raise
        except Exception as error:  # broad on purpose: it must not fail the other tenants' requests in this batch
            raise UserError(f"custom loss {self.graph.name!r} failed: {type(error).__name__}") from error

    def _value(self, values: Sequence[TokenValues]) -> ObjectiveValue:
        meter = Meter(self.limits)
        losses = [
            evaluate(self.graph, {**_written_out(inputs), LOGPROBS: value.logprobs}, f"data[{number}]", meter)
            for number, (inputs, value) in enumerate(zip(self.inputs, values, strict=True))
        ]
        metrics = {name: _reduced(name, losses) for name in self.graph.metrics}
        return ObjectiveValue(math.fsum(each.loss for each in losses), [each.slope for each in losses], (), metrics)


def _written_out(inputs: Arrays) -> dict[str, NDArray[Any]]:
    return {name: dense(array) for name, array in inputs.items()}


def _array(graph: LossGraph, declared: LossInput, given: Arrays, where: str) -> NDArray[Any] | Csr:
    where = f"{where}[{declared.name!r}]"
    if declared.name not in given:
        raise InvalidInputError(where, None, f"a tensor of rank {declared.rank}: {graph.name} reads it")
    array = given[declared.name]
    if (
        declared.rank == 0 and not isinstance(array, Csr) and array.shape == (1,)
    ):  # the wire format does not distinguish a number from a list of one
        array = array.reshape(())
    _check_rank(graph, where, declared.rank, array.ndim)
    return array


def _check_rank(graph: LossGraph, where: str, declared: int, rank: int) -> None:
    if rank != declared:
        raise InvalidInputError(where, f"rank {rank}", f"rank {declared}, as {graph.name} was created with")


def _reduced(name: str, losses: Sequence[DatumLoss]) -> float:
    """Return the sum or the mean of a metric over sequences, as the suffix of its name says."""
    total = math.fsum(each.metrics[name] for each in losses)
    return total / len(losses) if name.endswith(":mean") else total
