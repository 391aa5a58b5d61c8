"""Sequences of one batch in one tensor: side by side with padding, or end to end without.

Shapes: B sequences, T tokens, A rope axes, L layers, K experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.processor.fields import MULTIMODAL_FIELDS, PADDING

__all__ = ["Batch", "concatenated", "is_packed", "padded", "sequence_starts", "text_positions"]

Batch = dict[str, Any]


def text_positions(position_ids: Tensor) -> Tensor | None:
    """The positions in the text, [B, T]; None for rope axes of images only, which start over for reasons of their own.

    With four axes the first is the text's.
    """
    if position_ids.ndim == 2:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def is_packed(row: Batch) -> bool:
    """Whether a row, or a batch of one row, holds several sequences: position 0 occurs more than once."""
    if "position_ids" not in row:
        return False
    positions_BT = text_positions(row["position_ids"])
    return positions_BT is not None and len(positions_BT) == 1 and int((positions_BT == 0).sum()) > 1


def sequence_starts(positions_1T: Tensor) -> Tensor:
    """Where sequences start, and the end of the last: [n + 1]."""
    starts = (positions_1T[0] == 0).nonzero().flatten()
    end = torch.tensor([positions_1T.shape[-1]], device=positions_1T.device)
    return torch.cat([starts, end]).to(torch.int32)


def padded(rows: Sequence[Batch], side: str) -> Batch:
    """Rows [1, T] side by side, [B, longest]."""
    return _collate(rows, lambda name, tensors: _pad_and_stack(name, tensors, side))


def concatenated(rows: Sequence[Batch]) -> Batch:
    """Rows [1, T] end to end, [1, sum of T]. Positions say where each begins, so there is no attention mask."""
    if len(rows) > 1 and not all("position_ids" in row for row in rows):
        raise InvalidInputError("inputs", "no position_ids", "positions: they alone say where each sequence begins")
    batch = _collate(rows, lambda name, tensors: torch.cat(tensors, dim=_sequence_axis(name, tensors[0])))
    batch.pop("attention_mask", None)
    return batch


def _collate(rows: Sequence[Batch], join: Any) -> Batch:
    batch: Batch = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in MULTIMODAL_FIELDS:  # rows without images have no such field
            batch[name] = torch.cat(values)
        elif len(values) != len(rows):
            raise InvalidInputError(
                name, f"{len(values)} of {len(rows)} rows have it", "a field of all rows or of none"
            )
        elif name in PADDING:
            batch[name] = join(name, values)
        else:
            batch[name] = values
    return batch


def _sequence_axis(name: str, tensor: Tensor) -> int:
    """The axis of tokens: the last, except for [1, T, L, K]."""
    return 1 if name == "routed_experts" else tensor.ndim - 1


def _pad_and_stack(name: str, tensors: Sequence[Tensor], side: str) -> Tensor:
    """[1, T] to [B, longest]; rope positions [A, 1, T] to [A, B, longest]."""
    axis = _sequence_axis(name, tensors[0])
    longest = max(tensor.shape[axis] for tensor in tensors)
    same = [_pad(tensor, axis, longest, PADDING[name], side) for tensor in tensors]
    return torch.cat(same, dim=1 if name == "position_ids" and same[0].ndim == 3 else 0)


def _pad(tensor: Tensor, axis: int, length: int, value: int, side: str) -> Tensor:
    missing = length - tensor.shape[axis]
    widths = [0, 0] * (tensor.ndim - 1 - axis) + ([missing, 0] if side == "left" else [0, missing])
    return F.pad(tensor, widths, value=value)
