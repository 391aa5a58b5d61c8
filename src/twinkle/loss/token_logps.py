"""Log-probabilities of the labels: read from the model's outputs, or computed from its logits.

Shapes: B sequences, T positions, V vocabulary entries, N = B·T rows, C rows of one chunk.
"""

from typing import Any

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import compute_dtype
from twinkle.loss.interface import Inputs, Outputs


def label_mask(inputs: Inputs, ignore_index: int) -> Tensor:
    if "labels" not in inputs:
        raise InvalidInputError("inputs", sorted(inputs), "must hold 'labels' for this loss")
    return inputs["labels"] != ignore_index


def masked_logps(outputs: Outputs, mask_BT: Tensor) -> Tensor:
    """Return outputs["logps"] in the dtype of the computation; 0, with gradient 0, where the mask is False."""
    return masked(required(outputs, "logps"), mask_BT)


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    if values_BT.shape != mask_BT.shape:
        raise InvalidInputError("outputs", f"shape {tuple(values_BT.shape)}", f"that of labels, {tuple(mask_BT.shape)}")
    return torch.where(mask_BT, values_BT.to(compute_dtype(values_BT)), 0.0)


def zero_of(values: Tensor) -> Tensor:
    """Return a 0 that depends on ``values`` with gradient 0, even where they are not finite."""
    return torch.where(torch.zeros_like(values, dtype=torch.bool), values.to(compute_dtype(values)), 0.0).sum()


def required(outputs: Outputs, name: str) -> Tensor:
    value = outputs.get(name)
    if value is None:
        raise InvalidInputError("outputs", sorted(outputs), f"must hold {name!r} for this loss")
    return value


def logps_from_logits(logits_BTV: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return log p(label), and 0 where the mask is False. Rows outside the mask are not read."""
    rows_NV = logits_BTV[mask_BT].to(compute_dtype(logits_BTV))
    picked_N = rows_NV.gather(-1, labels_BT[mask_BT].unsqueeze(-1)).squeeze(-1)
    logps_BT = torch.zeros(mask_BT.shape, dtype=rows_NV.dtype, device=rows_NV.device)
    return logps_BT.masked_scatter(mask_BT, picked_N - torch.logsumexp(rows_NV, dim=-1))


def chunked_logps_from_logits(logits: Tensor, labels: Tensor, mask: Tensor, chunk_size: int) -> Tensor:
    """Return log p(label), converting ``chunk_size`` rows at a time to the dtype of the computation.

    Outside the mask the result is the log-probability of vocabulary entry 0.
    """
    rows_NV = logits.reshape(-1, logits.shape[-1])
    target_N = torch.where(mask, labels, 0).reshape(-1)
    logps_N: Tensor = _ChunkedLogps.apply(rows_NV, target_N, chunk_size)
    return logps_N.reshape(labels.shape)


class _ChunkedLogps(torch.autograd.Function):
    """Log-probabilities in chunks. Only logits and targets are saved; backward computes the gradient chunk by chunk.

    The gradient gets a tensor of its own and does not overwrite the logits, because callers may have asked for them and
    metrics read them later.
    """

    @staticmethod
    def forward(ctx: Any, rows_NV: Tensor, target_N: Tensor, chunk_size: int) -> Tensor:
        ctx.save_for_backward(rows_NV, target_N)
        ctx.chunk_size = chunk_size
        dtype = compute_dtype(rows_NV)
        logps_N = torch.empty(len(rows_NV), dtype=dtype, device=rows_NV.device)
        for start in range(0, len(rows_NV), chunk_size):
            part = slice(start, start + chunk_size)
            rows_CV = rows_NV[part].to(dtype)
            picked_C = rows_CV.gather(-1, target_N[part].unsqueeze(-1)).squeeze(-1)
            logps_N[part] = picked_C - torch.logsumexp(rows_CV, dim=-1)
        return logps_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        rows_NV, target_N = ctx.saved_tensors
        grad_NV = torch.empty_like(rows_NV)
        for start in range(0, len(rows_NV), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            grad_C1 = grad_N[part].unsqueeze(-1)
            grad_CV = -torch.softmax(rows_NV[part].to(grad_N.dtype), dim=-1) * grad_C1
            grad_CV.scatter_add_(-1, target_N[part].unsqueeze(-1), grad_C1)
            grad_NV[part] = torch.where(grad_C1 != 0, grad_CV, 0.0)  # rows without a gradient get 0, even if not finite
        return grad_NV, None, None
