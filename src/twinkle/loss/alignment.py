"""Brings values of any of the shapes callers have them in to the shape of a batch.

Shapes: B sequences, T positions. Old and reference log-probabilities and advantages come from samplers, other models
and JSON: as tensors, or as lists with one number or one row a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.interface import IGNORE_INDEX

Row = Tensor | NDArray[Any] | Sequence[float] | float
TokenValues = Tensor | NDArray[Any] | Sequence[Row]


def compute_dtype(values: Tensor) -> torch.dtype:
    """Losses are computed in float32, or in float64 if they are given that."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def align_to_mask(field: str, values: TokenValues, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` as (B, T) on the mask's device, without gradient, and 0 wherever the mask is False.

    A (B, T) tensor is taken as it is. Otherwise each sequence has one number, which all its tokens get, or a row: with
    one value for each True position, or with one value for each position from the first up to the last True one at
    least (what comes after the row's padding starts is not read).
    """
    with torch.no_grad():
        rows = _rows(field, values, mask_BT)
        if isinstance(rows, Tensor):
            aligned_BT = rows.to(device=mask_BT.device, dtype=dtype)
        else:
            masks = mask_BT.cpu()  # one wait for the device instead of several a row
            aligned = [_aligned_row(field, i, row, masks[i], dtype) for i, row in enumerate(rows)]
            aligned_BT = torch.stack(aligned).to(mask_BT.device)
        return torch.where(mask_BT, aligned_BT, 0.0)


def align_logps_to_mask(ragged: TokenValues, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """:func:`align_to_mask` under the name that callers of the library know."""
    return align_to_mask("logps", ragged, mask, dtype)


def labels_of(inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """ "labels" as (B, T): of a padded batch, or of features one by one, padded here."""
    if isinstance(inputs, Mapping):
        labels = torch.as_tensor(inputs["labels"])
        return labels.unsqueeze(0) if labels.dim() == 1 else labels
    rows = [torch.as_tensor(feature["labels"]).reshape(-1) for feature in inputs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)


def _rows(field: str, values: TokenValues, mask_BT: Tensor) -> Tensor | list[Row]:
    """The whole as one (B, T) tensor if it is one already, else one entry a sequence."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    if isinstance(values, Tensor) and values.shape == mask_BT.shape:
        return values
    if isinstance(values, Tensor) and values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if not isinstance(values, Tensor | Sequence):
        raise InvalidInputError(field, values, _allowed(mask_BT))
    if isinstance(values, Tensor) and values.dim() not in (1, 2):
        raise InvalidInputError(field, f"shape {tuple(values.shape)}", _allowed(mask_BT))
    if len(values) != len(mask_BT):
        raise InvalidInputError(field, f"{len(values)} entries", _allowed(mask_BT))
    return list(values)


def _aligned_row(field: str, index: int, row: Row, mask_T: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        values = torch.as_tensor(row, dtype=dtype, device=mask_T.device)
    except (TypeError, ValueError, RuntimeError):  # what torch raises for None, text and rows of rows
        raise InvalidInputError(f"{field}[{index}]", row, "a number, or a row of numbers") from None
    if values.dim() == 0:
        return values.expand(len(mask_T))
    positions = torch.nonzero(mask_T).squeeze(-1)
    aligned = torch.zeros(len(mask_T), dtype=dtype, device=mask_T.device)
    if values.dim() == 1 and len(values) == len(positions):
        aligned[positions] = values
    elif values.dim() == 1 and (len(positions) == 0 or len(values) > positions[-1]):
        aligned[positions] = values[positions]
    else:
        covering = int(positions[-1]) + 1
        allowed = f"{len(positions)} values, one for each label, or from position 0 on at least {covering}"
        raise InvalidInputError(f"{field}[{index}]", f"shape {tuple(values.shape)}", allowed)
    return aligned


def _allowed(mask_BT: Tensor) -> str:
    return f"a tensor of shape {tuple(mask_BT.shape)}, or one number or row for each of the {len(mask_BT)} sequences"
