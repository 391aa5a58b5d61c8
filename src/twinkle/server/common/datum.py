"""Convert between the library's features and the datums of the tinker SDK.

This is for scripts that prepare data with the library and train with the SDK; importing it does not load the server.
Labels are those of a feature: already shifted, −100 where nothing is learnt.

Arguments may hold lists, arrays, or tensors of any library that has ``tolist``. Results hold numpy arrays and lists,
which the library's losses accept like tensors, so torch is not needed here. The SDK is needed, and is imported when a
datum is made.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.extras import missing

if TYPE_CHECKING:
    from tinker.types import Datum, TensorData

__all__ = ["datum_to_input_feature", "extract_rl_features_for_loss", "input_feature_to_datum"]

Kind = Literal["int64", "float32"]

_IGNORED = -100
# Inputs of images that a model reads beside its tokens, with the type in which a datum carries each.
_VISION: Mapping[str, Kind] = {"pixel_values": "float32", "image_grid_thw": "int64"}

Feature = dict[str, Any]


class PositionsTemplate(Protocol):
    """The part of a template that is needed here: it adds the positions that its model expects."""

    def set_mm_position_ids(self, feature: Feature) -> Feature: ...


def input_feature_to_datum(feature: Mapping[str, Any]) -> "Datum":
    """Return a feature as a datum.

    Labels become ``target_tokens`` and ``weights`` (1.0); where a label is −100 these are 0 and 0.0. Inputs of images
    are copied.
    """
    try:
        from tinker import types
    except ImportError as error:
        raise missing("tinker", "input_feature_to_datum") from error
    tokens = _row(feature["input_ids"]).astype(np.int64)
    inputs: dict[str, TensorData] = {}
    if feature.get("labels") is not None:
        labels = _row(feature["labels"]).astype(np.int64)[: len(tokens)]
        if len(labels) != len(tokens):
            raise InvalidInputError("labels", f"{len(labels)} labels", f"{len(tokens)}, one for each token")
        inputs["target_tokens"] = _tensor(np.where(labels == _IGNORED, 0, labels), "int64")
        inputs["weights"] = _tensor(labels != _IGNORED, "float32")
    for name, kind in _VISION.items():
        if feature.get(name) is not None:
            inputs[name] = _tensor(_array(feature[name]), kind)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)


@overload
def datum_to_input_feature(datum: "Datum", template: PositionsTemplate) -> Feature: ...


@overload
def datum_to_input_feature(datum: "Sequence[Datum]", template: PositionsTemplate) -> list[Feature]: ...


def datum_to_input_feature(datum: "Datum | Sequence[Datum]", template: PositionsTemplate) -> Feature | list[Feature]:
    """Return a datum as a feature, or several datums as a list: the inverse of :func:`input_feature_to_datum`.

    The template adds positions; labels are not shifted again. In a datum without weights a target 0 counts as padding,
    and weights that say so are added to the datum.
    """
    if isinstance(datum, Sequence):
        return [datum_to_input_feature(each, template) for each in datum]
    tokens, inputs = np.asarray(datum.model_input.to_ints(), np.int64), datum.loss_fn_inputs
    if "target_tokens" not in inputs:
        raise InvalidInputError("loss_fn_inputs", sorted(inputs), "target_tokens among them")
    targets = _values(inputs["target_tokens"]).astype(np.int64)
    if targets.shape != tokens.shape:
        raise InvalidInputError("target_tokens", f"shape {targets.shape}", f"{tokens.shape}, one for each token")
    if "weights" not in inputs:
        inputs["weights"] = _tensor(targets != 0, "float32")
    weights = _values(inputs["weights"])
    feature: Feature = {
        "input_ids": tokens,
        "labels": np.where(weights != 0, targets, _IGNORED),
        "attention_mask": np.ones(len(tokens), np.int64),
        "length": len(tokens),
    }
    feature |= {name: _values(inputs[name]) for name in _VISION if name in inputs}
    return template.set_mm_position_ids(feature)


def extract_rl_features_for_loss(datums: "Sequence[Datum]") -> dict[str, Any]:
    """Return keywords for a loss of the library: old_logps, advantages and ref_outputs, as far as the datums have them.

    ``ref_outputs["logps"]`` is one array, (B, L), padded with zeros at the right.
    """
    found: dict[str, Any] = {}
    for name, keyword in (("logprobs", "old_logps"), ("advantages", "advantages")):
        rows = _column(datums, name)
        if rows is not None:
            found[keyword] = [row.tolist() for row in rows]
    rows = _column(datums, "ref_logps")
    if rows is not None:
        padded = np.zeros((len(rows), max(map(len, rows))), np.float32)
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row
        found["ref_outputs"] = {"logps": padded}
    return found


def _column(datums: "Sequence[Datum]", name: str) -> list[NDArray[Any]] | None:
    """Return one input of all datums, as rows; None if no datum has it. Raise if only some have it."""
    having = [datum for datum in datums if name in datum.loss_fn_inputs]
    if not having:
        return None
    if len(having) != len(datums):
        raise InvalidInputError(name, f"in {len(having)} of {len(datums)} datums", "in all of them, or in none")
    return [_values(datum.loss_fn_inputs[name]).reshape(-1) for datum in having]


def _tensor(array: NDArray[Any], kind: Kind) -> "TensorData":
    from tinker import types

    return types.TensorData(data=array.astype(kind).reshape(-1).tolist(), dtype=kind, shape=list(array.shape))


def _values(tensor: "TensorData") -> NDArray[Any]:
    return np.asarray(tensor.to_numpy())


def _array(value: Any) -> NDArray[Any]:
    """Return a list, an array, or a tensor on any device as an array."""
    return np.asarray(value if isinstance(value, np.ndarray | list | tuple) else value.tolist())


def _row(value: Any) -> NDArray[Any]:
    """Return the value as a flat array; of a batch, the first row."""
    array = _array(value)
    while array.ndim > 1:
        array = array[0]
    return array
