"""The A of a few adapters in the spare rows behind the base model's weights, so that one product computes x A.T, too.

Such a product is hardly slower, and LoRA's own kernels for x A.T are not launched. That pays as long as these rows are
few beside those of the weights. So there is room for ranks of ``SPARE_ROWS`` in total.

Shapes: M linear layers, I inputs of a layer, E pieces to copy.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.joined import SPARE_ROWS
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import copy_pieces

AddressesOfA = Callable[[Adapter], np.ndarray]  # by linear layer, (M,); 0 where the adapter has no LoRA


class SpareRows:
    """The spare rows of all linear layers, and the versions whose A is there now. Nobody else may write to them."""

    def __init__(self, rows_MRI: Sequence[Tensor]) -> None:
        """``rows_MRI``: those of each linear layer, (SPARE_ROWS, I)."""
        self._rows = rows_MRI
        self._targets_M = np.array([rows.data_ptr() for rows in rows_MRI])
        self._row_bytes_M = np.array([rows[0].nbytes for rows in rows_MRI])
        self._inputs_M = np.array([rows.shape[1] for rows in rows_MRI])
        self._held: list[tuple[weakref.ref[Adapter], int]] = []  # with their first row
        nothing_13 = torch.zeros(1, 3, dtype=torch.int64, device=rows_MRI[0].device)
        copy_pieces(nothing_13, rows_MRI[0])  # compiles the kernel, so that no request waits for it

    def hold(self, versions: Sequence[Adapter], addresses_of_a: AddressesOfA) -> Mapping[int, int] | None:
        """Copy the A of these versions into the spare rows, unless they are there already.

        Return the first row of each version by its ``id``, or None if there is no room for all of them.
        """
        assert all(version.frozen for version in versions), "the weights of other adapters change"
        held = {id(version): row for reference, row in self._held if (version := reference()) is not None}
        if all(id(version) in held for version in versions):
            return held
        different = list({id(version): version for version in versions}.values())
        ends = list(accumulate(version.layout.rank for version in different))
        if ends[-1] > SPARE_ROWS:
            return None
        rows = {id(version): end - version.layout.rank for version, end in zip(different, ends, strict=True)}
        pieces_E3 = np.concatenate(
            [self._pieces(version, rows[id(version)], addresses_of_a(version)) for version in different]
        )
        self._held = []  # whatever happens now, the rows may have changed
        if len(pieces_E3):
            copy_pieces(to_device(torch.from_numpy(pieces_E3), self._rows[0].device), self._rows[0])
        self._held = [(weakref.ref(version), rows[id(version)]) for version in different]
        return rows

    def _pieces(self, version: Adapter, first_row: int, sources_M: np.ndarray) -> np.ndarray:
        """Return the addresses of a version's A, those of their copies, and their sizes, (E, 3)."""
        targets_M = self._targets_M + first_row * self._row_bytes_M
        pieces_M3 = np.stack([sources_M, targets_M, version.layout.rank * self._inputs_M], 1)
        return pieces_M3[sources_M != 0]
