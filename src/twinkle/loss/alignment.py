"""Conversion of per-token values, in the shapes that :func:`align_to_mask` lists, to the shape of a batch.

Shapes: B sequences, T positions. Old log-probabilities, reference log-probabilities and advantages come from samplers,
other models and JSON: as tensors, or as lists with one number or one row for each sequence.
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
    """Return the dtype in which a loss is computed: float64 if its values are float64, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def align_to_mask(field: str, values: TokenValues, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as (B, T) on the mask's device, without gradient, and 0 wherever the mask is False.

    A (B, T) tensor is taken as it is. Otherwise each sequence has either one number, which all its tokens get, or a
    row. A row has one value for each True position of the mask, or one value for each position from 0 on, up to the
    last True position at least; values after that position are not read.
    """
    with torch.no_grad():
        rows = _rows(field, values, mask_BT)
        if isinstance(rows, Tensor):
            aligned_BT = rows.to(device=mask_BT.device, dtype=dtype)
        else:
            masks = mask_BT.cpu()  # synchronise with the device once instead of several times for each row
            aligned = [_aligned_row(field, i, row, masks[i], dtype) for i, row in enumerate(rows)]
            aligned_BT = torch.stack(aligned).to(mask_BT.device)
        return torch.where(mask_BT, aligned_BT, 0.0)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in host memory, without gradient, after one transfer for all of one device and dtype.

    Each transfer waits until the device has finished what it was told to do, so one for each row would be slow.
    """
    found = [each.detach() for each in tensors]
    kinds = {(each.device, each.dtype) for each in found if each.device.type != "cpu"}
    for device, dtype in kinds:
        places = [i for i, each in enumerate(found) if (each.device, each.dtype) == (device, dtype)]
        flat = torch.cat([found[i].reshape(-1) for i in places]).cpu()
        for i, part in zip(places, flat.split([found[i].numel() for i in places]), strict=True):
            found[i] = part.reshape(found[i].shape)
    return found


def align_logps_to_mask(ragged: TokenValues, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Call :func:`align_to_mask`; this is the public name."""
    return align_to_mask("logps", ragged, mask, dtype)


def labels_of(inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the labels as (B, T). A list of features is padded here; a mapping is a batch that is padded already."""
    if isinstance(inputs, Mapping):
        labels = torch.as_tensor(inputs["labels"])
        return labels.unsqueeze(0) if labels.dim() == 1 else labels
    rows = [torch.as_tensor(feature["labels"]).reshape(-1) for feature in inputs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)


def _rows(field: str, values: TokenValues, mask_BT: Tensor) -> Tensor | list[Row]:
    """Return ``values`` as one (B, T) tensor if it has that shape, else as a list with one entry for each sequence."""
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
    if isinstance(values, Tensor):
        return list(values.cpu())
    if all(isinstance(row, Tensor) for row in values):
        return list(to_host([row for row in values if isinstance(row, Tensor)]))
    return list(values)


def _aligned_row(field: str, index: int, row: Row, mask_T: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        values = torch.as_tensor(row, dtype=dtype, device=mask_T.device)
    except (TypeError, ValueError, RuntimeError):  # raised by torch for None, text and nested rows
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
