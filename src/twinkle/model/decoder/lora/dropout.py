"""Dropout on the inputs of adapters: which elements are dropped is computed, not drawn from a generator.

Whether an element is dropped is a hash of the adapter's seed, the number of its training pass, the number of the
sequence within the request, the position of the token, the name of the module, and the number of the feature. It
depends on nothing else. So an element is dropped or not whatever else is in the batch, however the request is divided
into micro-batches, when a layer is computed a second time for the backward pass, and when a server replays a step.

All arithmetic is in 32-bit integers that wrap around, which CPUs and GPUs compute alike.

Shapes: T rows, I input features.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.transfer import to_device

_STEP = 0x9E3779B9  # odd and irregular: multiples of it, for consecutive numbers, spread over all 32-bit integers
_FACTORS = (0x7FEB352D, 0x846CA68B)  # with shifts of 16, 15 and 16 bits a good 32-bit hash: C. Wellons, "lowbias32"
_SHIFTS = (16, 15, 16)
_ELEMENTS = 1 << 20  # of the mask that are computed at once on a CPU, which limits the memory of their integers


@dataclass(frozen=True)
class DropoutDraw:
    """What decides which elements one request of an adapter drops.

    ``number``: of the adapter's training pass. ``sequences``: the number of each sequence within the whole request, of
    which this process may have only some.
    """

    probability: float
    seed: int
    number: int
    sequences: Sequence[int]

    def keys(self, place: int, length: int) -> NDArray[np.uint32]:
        """Return a key for each position of a sequence, which is ``sequences[place]``."""
        digest = hashlib.sha256(f"{self.seed}:{self.number}:{self.sequences[place]}".encode()).digest()
        start, change = np.frombuffer(digest[:8], "<u4")
        return _mixed(np.arange(length, dtype=np.uint32) * np.uint32(_STEP) + start) ^ change


@dataclass(frozen=True)
class RowDropout:
    """The dropout of consecutive rows, which may belong to several requests."""

    keys_T1: Tensor  # int32
    thresholds_T1: Tensor  # int32: an element is dropped if its hash is below
    scales_T1: Tensor  # fp32: 1 / (1 - probability), the factor of elements that stay

    @classmethod
    def from_keys(cls, drawn: Sequence[tuple[float, NDArray[np.uint32]]], device: torch.device) -> "RowDropout":
        """Build it from the probability and the row keys of each request."""
        counts = [len(keys) for _, keys in drawn]
        keys = np.concatenate([keys for _, keys in drawn]).view(np.int32)
        thresholds = np.repeat(np.array([_threshold(probability) for probability, _ in drawn], np.int32), counts)
        scales = np.repeat(np.array([1 / (1 - probability) for probability, _ in drawn], np.float32), counts)
        columns = (to_device(torch.from_numpy(column[:, None]), device) for column in (keys, thresholds, scales))
        return cls(*columns)

    def rows(self, start: int, stop: int) -> "RowDropout":
        return RowDropout(self.keys_T1[start:stop], self.thresholds_T1[start:stop], self.scales_T1[start:stop])

    def apply(self, x_TI: Tensor, module: str, first_input: int = 0) -> Tensor:
        """Return x with dropped elements 0 and the others scaled. The gradient of x is this function of its gradient.

        ``module``: the module's name in the base model. ``first_input``: the number of x's first feature there, if x
        has only some of the module's input features.
        """
        dropped_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
        self._write(dropped_TI, x_TI, module, first_input, add=False)
        return dropped_TI

    def add(self, out_TI: Tensor, x_TI: Tensor, module: str, first_input: int = 0) -> None:
        """Add what :meth:`apply` returns to ``out``, in place."""
        self._write(out_TI, x_TI, module, first_input, add=True)

    def _write(self, out_TI: Tensor, x_TI: Tensor, module: str, first_input: int, *, add: bool) -> None:
        # A feature is hashed as key + number · step, so the key of the first feature counts on from its number.
        key = _signed((_module_key(module) + first_input * _STEP) % 2**32)
        if x_TI.is_cuda:
            from twinkle.model.decoder.lora.dropout_kernels import drop  # needs Triton, which CUDA builds of torch have

            rows = (self.keys_T1, self.thresholds_T1, self.scales_T1)
            drop(out_TI, x_TI, *rows, key, step=_STEP, factors=_FACTORS, shifts=_SHIFTS, add=add)
            return
        feature_I = torch.arange(x_TI.shape[1], dtype=torch.int32).mul_(_signed(_STEP)).add_(key)
        chunk = max(1, _ELEMENTS // x_TI.shape[1])
        for start in range(0, len(x_TI), chunk):
            part, out = self.rows(start, start + chunk), out_TI[start : start + chunk]
            hash_CI = _mixed_in_place(part.keys_T1 ^ feature_I)
            kept_CI = torch.mul(x_TI[start : start + chunk].float(), part.scales_T1)
            kept_CI = kept_CI.masked_fill_(hash_CI < part.thresholds_T1, 0).to(out.dtype)
            if add:
                out += kept_CI
            else:
                out.copy_(kept_CI)


def _threshold(probability: float) -> int:
    """Return the number below which a share of ``probability`` of all signed 32-bit integers lies."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


def _module_key(module: str) -> int:
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "little")


def _signed(value: int) -> int:
    """Return the signed 32-bit integer with the same bits."""
    return value - 2**32 if value >= 2**31 else value


def _mixed(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for factor, shift in zip(_FACTORS, _SHIFTS, strict=False):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return values ^ (values >> np.uint32(_SHIFTS[-1]))


def _mixed_in_place(values: Tensor) -> Tensor:
    """Compute :func:`_mixed` of int32 values. Torch shifts signed integers with their sign, hence the masks."""
    for factor, shift in zip((*map(_signed, _FACTORS), 1), _SHIFTS, strict=True):
        values ^= (values >> shift) & ((1 << (32 - shift)) - 1)
        if factor != 1:
            values *= factor
    return values
