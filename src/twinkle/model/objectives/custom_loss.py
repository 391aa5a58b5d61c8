"""A request with an objective instead of a named loss: one loss of all its sequences together, evaluated once.

The objective needs every log-probability of the request. In training, if all its sequences are in one batch, it is
called between the forward and the backward pass. Otherwise an extra forward pass computes the log-probabilities
beforehand, and the batches use the derivatives found then. Without training it is called after the forward pass.

Slope means the derivative of the loss with respect to a value, dL/dvalue.

Shapes: n rows of the request in a batch, K targets per row, M values per row, T tokens of a sequence, E numbers of a
row's output (logits or embedding).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import NonFiniteError, TwinkleError, UserError
from twinkle.model.decoder.transfer import to_device
from twinkle.model.types import FloatArray, Objective, ObjectiveValue, TokenValues

_NONE = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int64)


class Evaluation:
    """The objective of one request and, once it was called, its value or its error."""

    def __init__(self, objective: Objective, sequences: int, *, shared: bool = False) -> None:
        """``sequences``: the number of sequences of the request.

        ``shared``: other processes compute the request too. Then an error of a script's loss, whatever it is, is only
        noted: this process must finish the pass with the others.
        """
        self._objective = objective
        self._caught: type[Exception] = Exception if shared else TwinkleError
        self._sequences = sequences
        self._recorded: dict[int, TokenValues] = {}  # values collected so far, by number of the sequence
        self.value: ObjectiveValue | None = None
        self.error: TwinkleError | None = None

    @property
    def done(self) -> bool:
        return self.value is not None or self.error is not None

    @property
    def metrics(self) -> dict[str, float]:
        assert self.value is not None
        return {"loss:sum": self.value.loss, **self.value.metrics}

    def record_values(self, values: Mapping[int, TokenValues]) -> None:
        """Collect the values of some sequences, by their numbers, and call the objective when all are there."""
        self._recorded |= values
        if len(self._recorded) == self._sequences:
            self.run([self._recorded[number] for number in range(self._sequences)])
            self._recorded = {}

    def run(self, values: Sequence[TokenValues]) -> None:
        """Call the objective with ``values``, one entry per datum in the order of the data, and store the result."""
        outputs = (value.output for value in values if value.output is not None)
        if not all(np.isfinite(array).all() for array in (*(value.logprobs for value in values), *outputs)):
            self.error = NonFiniteError("log-probabilities are NaN or infinite: no gradient was kept")
            return
        try:
            value = self._objective(values)
        except torch.OutOfMemoryError:
            raise  # nobody's mistake: the batch may be tried again in smaller pieces
        except self._caught as error:
            self.error = error if isinstance(error, TwinkleError) else _mistake(error)
            return
        if not math.isfinite(value.loss):
            self.error = NonFiniteError(f"the loss is {value.loss}: no gradient was kept")
            return
        assert [slope.shape for slope in value.logprobs] == [each.logprobs.shape for each in values]
        assert not value.entropies or [len(slope) for slope in value.entropies] == [
            len(each.logprobs) for each in values
        ]
        self.value = value

    def slopes(self, numbers: Sequence[int], lengths: Sequence[int], columns: int, width: int) -> Tensor:
        """Return dL/dvalue of the sequences ``numbers``, (n, M); all zero if the objective failed."""
        result = np.zeros((sum(lengths), columns), np.float32)
        if self.value is not None:
            for rows, number in zip(np.split(result, np.cumsum(lengths)[:-1]), numbers, strict=True):
                slope_TK = self.value.logprobs[number].reshape(len(rows), -1)
                rows[:, : slope_TK.shape[1]] = slope_TK
            if self.value.entropies:
                result[:, width] = np.concatenate([self.value.entropies[number] for number in numbers])
            if self.value.outputs:
                slope_nE = np.concatenate([self.value.outputs[number] for number in numbers])
                result[:, -slope_nE.shape[1] :] = slope_nE
        return torch.from_numpy(result)


def _mistake(error: Exception) -> UserError:
    """Return the error of a script's loss in a form that other processes can read."""
    mistake = UserError(f"the loss failed: {type(error).__name__}: {error}")
    mistake.__cause__ = error
    return mistake


class CustomPart:
    """The sequences of a request with an objective that are in one block of a batch, in row order."""

    def __init__(
        self, evaluation: Evaluation, numbers: Sequence[int], shapes: Sequence[tuple[int, ...]], columns: int = 0
    ) -> None:
        """``shapes``: the shape of each sequence's targets, (T,) or (T, K). ``columns``: numbers of a row's output."""
        self._evaluation = evaluation
        self._numbers = tuple(numbers)
        self._shapes = tuple(shapes)
        self._lengths = tuple(shape[0] for shape in shapes)
        self._columns = columns
        self._slopes_nM: Tensor | None = None

    @property
    def pointwise(self) -> bool:
        return self._evaluation.done

    def record_values(self, values_nM: Tensor, width: int) -> None:
        if not self._evaluation.done:
            rows = np.split(values_nM.cpu().numpy(), np.cumsum(self._lengths)[:-1])
            pairs = zip(rows, self._shapes, strict=True)
            values = [token_values(rows_TM, width, shape, self._columns) for rows_TM, shape in pairs]
            self._evaluation.record_values(dict(zip(self._numbers, values, strict=True)))

    def coefficients(self, start: int, stop: int, values_CM: Tensor, width: int) -> Tensor:
        assert self._evaluation.done, "an objective needs its whole request"
        if self._slopes_nM is None:
            slopes_nM = self._evaluation.slopes(self._numbers, self._lengths, values_CM.shape[1], width)
            self._slopes_nM = to_device(slopes_nM, values_CM.device)
        return self._slopes_nM[start:stop]


def token_values(rows_TM: FloatArray, width: int, target_shape: tuple[int, ...], columns: int = 0) -> TokenValues:
    """Split the values of one sequence into log-probabilities and, where present, statistics and the output.

    ``width``: how many columns are log-probabilities. The first of those belong to the sequence's targets. The last
    ``columns`` are the output.
    """
    if columns:
        rest = token_values(rows_TM[:, :-columns], width, target_shape)
        return replace(rest, output=rows_TM[:, -columns:].copy())
    logprobs = rows_TM[:, 0] if len(target_shape) == 1 else rows_TM[:, : target_shape[1]]
    if rows_TM.shape[1] == width:
        return TokenValues(logprobs.copy(), _NONE, _NO_IDS)
    return TokenValues(logprobs.copy(), rows_TM[:, width].copy(), rows_TM[:, width + 1].astype(np.int64))
