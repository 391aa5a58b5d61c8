"""Collation of sequences into one batch: stacked as padded rows, or concatenated into one row without padding.

Shapes: B sequences, T tokens, A rope axes, L layers, K experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.processor.fields import MULTIMODAL_FIELDS, PADDING

__all__ = [
    "Batch",
    "concatenated",
    "is_packed",
    "like_rows_with_images",
    "padded",
    "sequence_starts",
    "text_positions",
]

Batch = dict[str, Any]


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the positions in the text, [B, T], or None if there are only rope axes of images.

    With four axes, the first one holds the positions in the text. Image axes cannot be used to find sequences, because
    they return to 0 inside of a sequence.
    """
    if position_ids.ndim == 2:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def is_packed(row: Batch) -> bool:
    """Return whether a row, or a batch of one row, holds several sequences: position 0 occurs more than once."""
    if "position_ids" not in row:
        return False
    positions_BT = text_positions(row["position_ids"])
    return positions_BT is not None and len(positions_BT) == 1 and int((positions_BT == 0).sum()) > 1


def sequence_starts(positions_1T: Tensor) -> Tensor:
    """Return the start of each sequence and the end of the last one, [n + 1]."""
    starts = (positions_1T[0] == 0).nonzero().flatten()
    end = torch.tensor([positions_1T.shape[-1]], device=positions_1T.device)
    return torch.cat([starts, end]).to(torch.int32)


def like_rows_with_images(rows: Sequence[Batch]) -> list[Batch]:
    """Return rows [1, T] where those of text have the fields that rows with images have beside them.

    These are ``mm_token_type_ids``, which are 0 for text, and positions with four axes, which are equal for text.
    """
    types = any("mm_token_type_ids" in row for row in rows)
    axes = any("position_ids" in row and row["position_ids"].ndim == 3 for row in rows)
    filled = []
    for row in rows:
        added: Batch = {}
        if types and "mm_token_type_ids" not in row and "input_ids" in row:
            added["mm_token_type_ids"] = torch.zeros_like(row["input_ids"])
        if axes and "position_ids" in row and row["position_ids"].ndim == 2:
            added["position_ids"] = row["position_ids"].expand(4, -1, -1)
        filled.append({**row, **added})
    return filled


def padded(rows: Sequence[Batch], side: str) -> Batch:
    """Pad rows [1, T] on ``side`` and stack them, [B, longest]."""
    return _collate(rows, lambda name, tensors: _pad_and_stack(name, tensors, side))


def concatenated(rows: Sequence[Batch]) -> Batch:
    """Concatenate rows [1, T] to [1, sum of T].

    Positions tell where each sequence begins, so there is no attention mask.
    """
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
    """Return the axis of tokens: 1 for routed experts [1, T, L, K], else the last one."""
    return 1 if name == "routed_experts" else tensor.ndim - 1


def _pad_and_stack(name: str, tensors: Sequence[Tensor], side: str) -> Tensor:
    """Pad and stack [1, T] to [B, longest], and rope positions [A, 1, T] to [A, B, longest]."""
    axis = _sequence_axis(name, tensors[0])
    longest = max(tensor.shape[axis] for tensor in tensors)
    same = [_pad(tensor, axis, longest, PADDING[name], side) for tensor in tensors]
    return torch.cat(same, dim=1 if name == "position_ids" and same[0].ndim == 3 else 0)


def _pad(tensor: Tensor, axis: int, length: int, value: int, side: str) -> Tensor:
    missing = length - tensor.shape[axis]
    widths = [0, 0] * (tensor.ndim - 1 - axis) + ([missing, 0] if side == "left" else [0, missing])
    return F.pad(tensor, widths, value=value)
