"""The interface of the library's losses: functions of a padded batch and of the model's outputs for it.

Shapes: B sequences, T positions, V vocabulary entries, N pooled texts, D their width.

    inputs:  "labels" (B, T) int, already shifted: labels[b, t] is the target of position t, −100 = no target;
             for embeddings (N,) or (N, 1), 1 at each anchor
    outputs: "logps" (B, T), and, if the loss asks for them, "entropies" (B, T), "logits" (B, T, V),
             "embeddings" (N, D); of a value model "values" (B, T) alone

A loss returns {"loss": scalar, "num_tokens": n}. If n > 0, the loss is a sum over n tokens, and the gradients of
several batches are divided by their total number of tokens. If n = 0, the loss is a mean, and each batch counts once.

The model passes outputs that require gradients and continues its backward pass from d loss / d outputs, so a loss is
differentiable only in ``outputs``. Everything else that a loss reads (advantages, reference log-probabilities …) are
keyword arguments of its call. The model gives the same keywords to the loss and to the metrics, which is why every call
also takes ``**_``; ``call_arguments`` names the keywords that a loss uses, so that the model can refuse keywords that
no loss or metric uses (:func:`check_call_arguments`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from twinkle.data_format import LossOutput
from twinkle.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORE_INDEX", "Inputs", "Loss", "LossOutput", "Outputs", "TakesCallArguments", "check_call_arguments"]
__all__ += ["other_name"]

IGNORE_INDEX = -100

Inputs = Mapping[str, "Tensor"]
Outputs = Mapping[str, "Tensor"]


class Loss(ABC):
    """The base class of losses. The flags say which outputs the model must keep or compute."""

    require_logits: bool = False
    require_entropy: bool = False
    require_logps: bool = True
    require_embeddings: bool = False
    require_values: bool = False  # only a value model has them
    reduction: str = "mean"  # "sum" where num_tokens is above 0
    call_arguments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput: ...


def other_name(given: str, value: float | None, field: str, own: float, default: float) -> float:
    """Return the value of an option that may be given by its other name, ``given``, instead of its own, ``field``.

    Raise if both are given and differ.
    """
    if value is None:
        return own
    if own not in (default, value):
        raise InvalidInputError(given, value, f"nothing beside {field}={own}: both names mean the same option")
    return value


class TakesCallArguments(Protocol):
    """A loss or a metric, with the keywords that it uses."""

    @property
    def call_arguments(self) -> tuple[str, ...]: ...


def check_call_arguments(
    given: Iterable[str], takers: Iterable[TakesCallArguments], reserved: Iterable[str] = ()
) -> None:
    """Raise UnknownNameError for a keyword that none of ``takers`` uses, instead of ignoring it silently.

    reserved: keywords that the model itself passes to the takers, and that a caller may therefore not give.
    """
    known = {name for taker in takers for name in taker.call_arguments} - set(reserved)
    for name in given:
        if name not in known:
            raise UnknownNameError("argument of the loss and the metrics", name, known or ("none",))
