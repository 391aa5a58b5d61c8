"""The batches of the library's models: sequences without padding for the model, padded rows for the loss.

Shapes: B sequences, T tokens of one sequence, L tokens of the longest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.loss.interface import IGNORE_INDEX
from twinkle.model.types import FloatArray, Image, IntArray, VisionSpec
from twinkle.model.vision.patches import UNREAD_MEDIA, place_patches, read_patches

# The fields that a processor's batch of text may have, with the values of their padding.
_PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0, "position_ids": 0, "completion_mask": 0}
# Fields with the bounds of sequences, which are ignored: positions define them already.
_BOUNDS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_kv", "max_length_q", "max_length_k", "length"}
)


_TYPES = "mm_token_type_ids"  # 1 for the tokens of images, 0 for text
_PIXELS = ("pixel_values", "image_grid_thw")
_MEDIA = (*_PIXELS, *UNREAD_MEDIA)
_KNOWN = frozenset({*_PADDING, *_BOUNDS, *_PIXELS, _TYPES, "routed_experts"})
ROUTES = "routed_experts"  # (T, layers, K): the experts of each token
# The key of a row whose images are placed already: a tuple of Images, instead of the two fields above.
PLACED = "placed_images"

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class SequenceBatch:
    """B sequences, each a dict of (T,) tensors in host memory: input_ids, and the other fields of the batch.

    ``device`` is where losses are computed. ``images``: those of each sequence; empty for a batch of text.
    """

    rows: tuple[Mapping[str, Tensor], ...]
    pooled_labels: Tensor | None = None  # (B,), one label per text, if labels are not per token
    device: torch.device = _HOST
    images: tuple[tuple[Image, ...], ...] = ()

    @property
    def empty(self) -> bool:
        """Return whether this is the batch of a rank without data, while other ranks have some."""
        return not self.rows

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(row["input_ids"]) for row in self.rows)

    @cached_property
    def tokens(self) -> list[IntArray]:
        return [row["input_ids"].numpy() for row in self.rows]

    @cached_property
    def labels(self) -> list[IntArray]:
        """Return the labels of each sequence, (T,), −100 where there is nothing to predict."""
        if any("labels" not in row for row in self.rows):
            raise InvalidInputError("inputs", "no labels", "features with labels, one per token")
        return [row["labels"].numpy() for row in self.rows]

    @cached_property
    def targets(self) -> list[IntArray]:
        """Return the labels as valid token ids: 0 instead of −100, and 0 everywhere if there are no labels."""
        if any("labels" not in row for row in self.rows):
            return [np.zeros(length, np.int64) for length in self.lengths]
        return [np.where(labels == IGNORE_INDEX, 0, labels) for labels in self.labels]

    @property
    def has_targets(self) -> bool:
        """Return whether a sequence has no labels, or a label other than −100."""
        return any("labels" not in row or bool((row["labels"] != IGNORE_INDEX).any()) for row in self.rows)

    @cached_property
    def mask(self) -> Tensor:
        """Return a mask (B, L) that is True for tokens and False for padding."""
        lengths_B1 = torch.tensor(self.lengths)[:, None]
        return torch.arange(max(self.lengths))[None] < lengths_B1

    @cached_property
    def loss_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a loss: tensors (B, L), padded on the right; labels of whole texts are (B,)."""
        names = [name for name in _PADDING if all(name in row for row in self.rows)]
        padded = {name: _padded([row[name] for row in self.rows], _PADDING[name]) for name in names}
        padded["attention_mask"] = self.mask.long()
        if self.pooled_labels is not None:
            padded["labels"] = self.pooled_labels
        return {name: tensor.to(self.device) for name, tensor in padded.items()}

    def reordered(self, order: Sequence[int]) -> "SequenceBatch":
        """Return the batch whose sequence number i is number ``order[i]`` of this one."""
        labels = None if self.pooled_labels is None else self.pooled_labels[list(order)]
        images = tuple(self.images[i] for i in order) if self.images else ()
        return SequenceBatch(tuple(self.rows[i] for i in order), labels, self.device, images)

    def part(self, start: int, stop: int) -> "SequenceBatch":
        """Return the sequences from number ``start`` up to ``stop``."""
        images = self.images[start:stop]
        return replace(self, rows=self.rows[start:stop], images=images if any(images) else ())

    def with_images(self, images: Sequence[tuple[Image, ...]]) -> "SequenceBatch":
        """Return the batch with the images of each sequence."""
        if len(images) != len(self.rows):
            given = f"{len(images)} rows with images, of {len(self.rows)} sequences"
            raise InvalidInputError(f"inputs.{PLACED}", given, "one sequence in a row")
        return replace(self, images=tuple(images) if any(images) else ())

    def padded(self, values: Sequence[FloatArray]) -> Tensor:
        """Return values per token, one array per sequence, as a tensor (B, L) with 0 in the padding."""
        return _padded([torch.from_numpy(each) for each in values], 0.0)

    def unpadded(self, values_BL: Tensor) -> list[FloatArray]:
        """Return the values (B, L) without padding, one array per sequence: the inverse of :meth:`padded`."""
        return [row[:length].numpy() for row, length in zip(values_BL, self.lengths, strict=True)]


NO_SEQUENCES = SequenceBatch(())


def as_feature_list(inputs: object) -> list[Mapping[str, Any]]:
    """Return ``inputs``, one feature or trajectory or several, as a list."""
    features = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(features, Sequence) or isinstance(features, str) or not features:
        raise InvalidInputError("inputs", inputs, "a list of at least one InputFeature or Trajectory")
    if not all(isinstance(feature, Mapping) for feature in features):
        allowed = "InputFeatures or Trajectories; None is the feature of an answer without tokens, such as an API's"
        raise InvalidInputError("inputs", features, allowed)
    return list(features)


def encode(features: Sequence[Mapping[str, Any]], template: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Return features: encode trajectories with the template, or add to features what they lack.

    Features may lack positions, and what their images become, if they have ``images`` beside their tokens.
    """
    encoded = ["input_ids" in feature for feature in features]
    if all(encoded):
        features = [template().add_images(each) if _has_raw_images(each) else each for each in features]
        return [_with_positions(feature) for feature in features]
    if any(encoded):
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    rows = list(template().batch_encode(list(features)))
    if len(rows) != len(features):
        raise InvalidInputError(
            "inputs",
            f"{len(features)} trajectories, of which the template makes {len(rows)}",
            "one feature each: 'delete' and 'split' are for datasets, not for a batch that is being trained on",
        )
    if not all("input_ids" in row for row in rows):
        raise InvalidInputError("inputs", sorted(rows[0]), "one sequence each: put 'positive' and 'negative' in turn")
    return rows


def _has_raw_images(feature: Mapping[str, Any]) -> bool:
    return bool(feature.get("images")) and feature.get("pixel_values") is None and PLACED not in feature


def _with_positions(feature: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a feature with positions: they distinguish tokens from padding, and show where a sequence begins."""
    if feature.get("position_ids") is not None:
        return feature
    return {**feature, "position_ids": np.arange(np.asarray(feature["input_ids"]).shape[-1])}


def check_vocabulary(batch: SequenceBatch, vocab_size: int) -> None:
    """Raise for token ids that do not exist: on a GPU they would crash the process."""
    for name, columns in (("input_ids", batch.tokens), ("labels", batch.targets)):
        for column in columns:
            wrong = column[(column < 0) | (column >= vocab_size)]
            if len(wrong):
                allowed = f"0 to {vocab_size - 1}" + (f", or {IGNORE_INDEX}" if name == "labels" else "")
                raise InvalidInputError(f"inputs.{name}", wrong[0].item(), allowed)


def check_micro_batch_size(micro_batch_size: object) -> None:
    if not isinstance(micro_batch_size, int) or isinstance(micro_batch_size, bool) or micro_batch_size < 1:
        raise InvalidInputError("micro_batch_size", micro_batch_size, "an integer ≥ 1: sequences computed at a time")


def take_placed(features: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[tuple[Image, ...]]]:
    """Return features without images that are placed already, and these images of each; no images if none has some."""
    if not any(PLACED in feature for feature in features):
        return list(features), []
    dropped = {PLACED, *_PIXELS}  # grids of such images may be there as well
    images = [tuple(feature.get(PLACED, ())) for feature in features]
    return [{name: each[name] for name in each if name not in dropped} for each in features], images


def split_batch(batch: Mapping[str, Any], vision: VisionSpec | None = None) -> SequenceBatch:
    """Split the batch of a processor, padded (B, L) or packed (1, ΣT), into sequences without padding.

    ``vision``: what the model wants of images; None: it reads text only.
    """
    patches = read_patches({name: _numpy(batch[name]) for name in _MEDIA if name in batch}, vision, "inputs")
    for name, value in batch.items():
        if value is not None and name not in _KNOWN:
            raise UnsupportedError(f"inputs hold {name!r}, which is not read here ({', '.join(_PADDING)} are)")
    columns = {name: _host(batch[name]) for name in (*_PADDING, _TYPES, ROUTES) if batch.get(name) is not None}
    ids_BL = columns.get("input_ids")
    if ids_BL is None or ids_BL.is_floating_point():
        raise InvalidInputError("inputs.input_ids", "none" if ids_BL is None else ids_BL.dtype, "token ids, integers")
    pooled = None
    if "labels" in columns and columns["labels"].shape != ids_BL.shape:
        pooled = columns.pop("labels").reshape(-1)
    positions = columns.get("position_ids")
    if positions is not None and positions.dim() == 3:  # the text's axis is the first of four, and images' follow
        columns["position_ids"] = positions[0]
        if len(positions) == 3 and patches is not None:  # no text's axis; without images all three are as the text's
            del columns["position_ids"]
    for name, column in columns.items():
        if column.shape[:2] != ids_BL.shape or column.dim() != (4 if name == ROUTES else 2):
            allowed = f"{tuple(ids_BL.shape)}" + (", then layers and experts" if name == ROUTES else "")
            raise InvalidInputError(f"inputs.{name}", f"shape {tuple(column.shape)}", allowed)
    rows: list[Mapping[str, Tensor]] = []
    for index in range(len(ids_BL)):
        rows += _sequences({name: column[index] for name, column in columns.items()})
    if not rows:
        raise InvalidInputError("inputs", "only padding", "at least one token")
    made = SequenceBatch(tuple(rows), pooled)
    if patches is None or vision is None:
        return made
    types = [row[_TYPES].numpy() for row in rows] if _TYPES in columns else None
    return made.with_images(place_patches(made.tokens, types, patches, vision, ""))


def _sequences(row: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """Return the sequences of one row: remove padding, and begin a new sequence where positions restart at 0."""
    length = len(row["input_ids"])
    keep = torch.ones(length, dtype=torch.bool)
    if "attention_mask" in row:
        keep &= row["attention_mask"] != 0
    if "position_ids" in row:
        keep &= row["position_ids"] >= 0
    real = {name: column[keep] for name, column in row.items()}
    count = int(keep.sum())
    if count == 0:
        return []
    positions = real.get("position_ids", torch.arange(count))
    starts = [0, *(index for index in torch.nonzero(positions == 0)[:, 0].tolist() if index > 0), count]
    parts: list[Mapping[str, Tensor]] = []
    for start, stop in pairwise(starts):
        expected = torch.arange(stop - start)
        if not torch.equal(positions[start:stop], expected):
            raise InvalidInputError("inputs.position_ids", positions[start:stop].tolist(), "0, 1, 2 … in each sequence")
        parts.append({name: column[start:stop] for name, column in real.items()})
    return parts


def _numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _host(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach().cpu()
    tensor = tensor[None] if tensor.dim() == 1 else tensor
    return tensor if tensor.is_floating_point() else tensor.long()


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
