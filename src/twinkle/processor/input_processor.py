"""The input processor: makes the tensors of a model's forward from encoded rows.

Shapes: B sequences, T tokens, A rope axes, L layers, K experts of a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.processor.collation import (
    Batch,
    concatenated,
    is_packed,
    like_rows_with_images,
    padded,
    sequence_starts,
    text_positions,
)
from twinkle.processor.fields import MODEL_FIELDS, MULTIMODAL_FIELDS, SEQUENCE_FIELDS
from twinkle.processor.unpacking import last_token_embeddings, unpack_inputs, unpack_packed_sequences
from twinkle.utils.logger import note_once

__all__ = ["InputProcessor"]

_FRAMEWORKS = ("transformers", "megatron")
_SIDES = ("left", "right")
_TOKEN_FIELDS = frozenset(SEQUENCE_FIELDS) - {"input_ids", "routed_experts"}  # experts may lack the last tokens


class InputProcessor:
    """Makes one batch from a list of encoded rows.

    Rows are stacked, padded on ``padding_side``. With ``padding_free``, or if a row is already packed (its positions
    return to 0), they are concatenated into one row, and ``cu_seq_lens_q``/``_k`` tell where each sequence begins.
    Tensors are made on the CPU; the model moves them to its device. ``device_mesh`` has no effect: a model that divides
    sequences among processes does that itself. ``framework`` has none either: models of both backends take this batch.
    """

    def __init__(
        self,
        device_mesh: object = None,
        padding_free: bool = False,
        framework: str = "transformers",
        padding_side: str = "right",
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise UnknownNameError("framework", framework, _FRAMEWORKS)
        if device_mesh is not None:
            note_once("device_mesh of InputProcessor: no effect; models divide sequences themselves")
        self.device_mesh = device_mesh
        if padding_side not in _SIDES:
            raise InvalidInputError("padding_side", padding_side, "'left' or 'right'")
        self.padding_free = padding_free
        self.framework = framework
        self.padding_side = padding_side

    def __call__(self, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch of one or several rows, without the fields that models do not read."""
        rows = [inputs] if isinstance(inputs, Mapping) else inputs
        (batch,) = self.collate_fn([self.align_routed_experts(row) for row in self.prepare_inputs(rows)])
        kept = MODEL_FIELDS | {"mm_token_type_ids"} if "pixel_values" in batch else MODEL_FIELDS
        batch = {name: value for name, value in batch.items() if name in kept}
        return self._add_sequence_bounds(batch)

    def prepare_inputs(self, inputs: Sequence[Mapping[str, Any]]) -> list[Batch]:
        """Convert token and media fields to tensors, and sequences [T] to [1, T]. Check lengths, and drop None."""
        if not inputs or not all(isinstance(row, Mapping) for row in inputs):
            raise InvalidInputError("inputs", inputs, "a list of at least one encoded row")
        rows = [{name: _tensor(name, value) for name, value in row.items() if value is not None} for row in inputs]
        for row in rows:
            _check_lengths(row)
        return rows

    def align_routed_experts(self, row: Batch) -> Batch:
        """Pad experts [T', L, K] to [1, T, L, K]. T' may be less than T, because the last tokens were never routed."""
        if "routed_experts" not in row:
            return row
        experts = row["routed_experts"]
        length = int(row["length"]) if "length" in row else row["input_ids"].shape[-1]
        return {**row, "routed_experts": F.pad(experts, (0, 0, 0, 0, 0, length - experts.shape[0]))[None]}

    def collate_fn(
        self, inputs: Sequence[Batch], micro_batch_size: int | None = None, variable_seq_lengths: bool = False
    ) -> list[Batch]:
        """Collate rows into one batch, or into several batches of ``micro_batch_size`` rows.

        Fields with one entry for each token may be [1, T], as :meth:`prepare_inputs` returns them, or [T]. All
        micro-batches have the same length, unless ``variable_seq_lengths`` is set or rows are packed.
        """
        inputs = like_rows_with_images([{name: _tokens(name, value) for name, value in row.items()} for row in inputs])
        packed = self.padding_free or any(map(is_packed, inputs))
        if micro_batch_size is None:
            return [self._join(inputs, packed)]
        if micro_batch_size < 1 or len(inputs) % micro_batch_size:
            raise InvalidInputError("micro_batch_size", micro_batch_size, f"a divisor of {len(inputs)}, the rows")
        starts = range(0, len(inputs), micro_batch_size)
        if packed or variable_seq_lengths:
            return [self._join(inputs[start : start + micro_batch_size], packed) for start in starts]
        if any(name in row for row in inputs for name in MULTIMODAL_FIELDS):
            raise UnsupportedError("micro_batch_size: images cannot be assigned to rows; use variable_seq_lengths=True")
        whole = padded(inputs, self.padding_side)
        return [_rows_of(whole, slice(start, start + micro_batch_size)) for start in starts]

    def unpack_packed_sequences(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, task: str = "causal_lm"
    ) -> tuple[Batch, Batch]:
        """Call :func:`twinkle.processor.unpacking.unpack_packed_sequences`."""
        return unpack_packed_sequences(inputs, outputs, task)

    def unpack_inputs(self, inputs: Sequence[Mapping[str, Any]], task: str = "causal_lm") -> list[Batch]:
        return unpack_inputs(inputs, task)

    def postprocess_tensor_sp(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], sp_strategy: None = None, task: str = "causal_lm"
    ) -> Batch:
        """For ``task="embedding"``, replace ``features`` [B, T, H] by ``embeddings``, a unit vector per sequence."""
        if sp_strategy is not None:
            raise UnsupportedError("sp_strategy: sequence parallelism is not supported yet, allowed: None")
        if task != "embedding":
            return dict(outputs)
        kept = {name: value for name, value in outputs.items() if name != "features"}
        return {**kept, "embeddings": last_token_embeddings(inputs, outputs["features"])}

    def _join(self, rows: Sequence[Batch], packed: bool) -> Batch:
        return concatenated(rows) if packed else padded(rows, self.padding_side)

    def _add_sequence_bounds(self, batch: Batch) -> Batch:
        """Add the bounds of sequences, under the names that Transformers' attention functions use."""
        if not (self.padding_free or is_packed(batch)) or "position_ids" not in batch:
            return batch
        positions_1T = text_positions(batch["position_ids"])
        if positions_1T is None:
            raise UnsupportedError("position_ids: rope axes without the text's positions have no sequence bounds")
        bounds = sequence_starts(positions_1T)
        longest = int(bounds.diff().max())
        return {
            **batch,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _tensor(name: str, value: Any) -> Any:
    if name in MULTIMODAL_FIELDS:
        tensor = _media(value)
        return tensor[..., None] if name == "input_features" and tensor.ndim == 2 else tensor
    return _tokens(name, value)


def _tokens(name: str, value: Any) -> Any:
    """Return a field with one entry for each token as a tensor [1, T]; other fields as they are."""
    if name not in SEQUENCE_FIELDS:
        return value
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
    return tensor[None] if tensor.ndim == 1 else tensor


def _check_lengths(row: Batch) -> None:
    """Check that token fields are as long as their sequence, because padding would hide a shorter one.

    A single label is allowed: it belongs to the whole text.
    """
    sequence = row.get("input_ids", row.get("inputs_embeds"))
    if not isinstance(sequence, Tensor):
        raise InvalidInputError("inputs", sorted(row), "encoded rows: each has 'input_ids' or 'inputs_embeds'")
    length = sequence.shape[1]
    for name in _TOKEN_FIELDS & row.keys():
        found = row[name].shape[-1]
        if found != length and not (name == "labels" and found == 1):
            raise InvalidInputError(f"inputs.{name}", f"{found} entries", f"{length}, one for each token")


def _media(value: Any) -> Tensor:
    """Return the media of a row as one tensor; several tensors are concatenated."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return torch.cat(list(value))
    return torch.from_numpy(np.asarray(value))


def _rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some sequences of a padded batch. Rope positions have sequences on the second axis."""
    return {
        name: value[:, rows] if name == "position_ids" and value.ndim == 3 else value[rows]
        for name, value in batch.items()
    }
