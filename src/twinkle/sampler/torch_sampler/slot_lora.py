"""LoRA for captured graphs: the mapping from rows to versions is in buffers whose addresses never change.

For each linear layer, two kernel launches serve any mix of versions of up to ``MAX_RANK`` (see ``slot_lora_kernels``).
Their grid is sized for the worst case, in which every row has its own version; programs without work return at once.

Shapes: N rows at most, M linear layers (the head is the last), G = N + 1 groups, of which the last has no adapter.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.slot_lora_kernels import MAX_RANK, TILE_ROWS, add_lora


class SlotLora:
    """The adapters of up to ``rows`` rows.

    :meth:`bind` writes the addresses of the rows' weights into fixed buffers, which a graph reads when it runs.
    """

    def __init__(self, architecture: Architecture, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._architecture = architecture
        self._names = [target.name for target in (*architecture.linear, architecture.head)]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._addresses_M2G = torch.zeros(len(self._names), 2, rows + 1, dtype=torch.int64, device=device)
        self._tiles_N4 = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        self._tiles_N4[:, 0] = rows
        self._offsets: dict[str, np.ndarray] = {}  # by the digest of a layout
        self._bound: tuple[tuple[int, str, int], ...] = ()

    def bind(self, runs: Sequence[tuple[Adapter | None, int]]) -> None:
        """Assign consecutive rows, from row 0, to these versions (None: the base model)."""
        # Compare addresses and layouts, not slots: a version that was paged out may return to the same slot number in
        # another block of memory.
        key = tuple(
            (0, "", count) if version is None else (version.compute_copy.data_ptr(), version.layout.digest, count)
            for version, count in runs
        )
        if key == self._bound:
            return
        tiles = np.zeros((self.rows, 4), np.int32)
        tiles[:, 0] = self.rows  # no adapter
        addresses = np.zeros((len(self._names), 2, self.rows + 1), np.int64)
        row = used = 0
        for group, (version, count) in enumerate(runs):
            if version is not None:
                addresses[:, :, group] = self._addresses(version)
                for first in range(row, row + count, TILE_ROWS):
                    tiles[used] = group, first, row + count, version.layout.rank
                    used += 1
            row += count
        self._tiles_N4.copy_(to_device(torch.from_numpy(tiles), self._tiles_N4.device))
        self._addresses_M2G.copy_(to_device(torch.from_numpy(addresses), self._tiles_N4.device))
        self._bound = key

    def layers(self, rows: int) -> tuple["SlotLayer", ...]:
        """Return one entry for each decoder layer, for the first ``rows`` rows."""
        path, count = self._architecture.layers_path, self._architecture.layer_count
        return tuple(SlotLayer(self, f"{path}.{index}.", rows) for index in range(count))

    @staticmethod
    def takes(version: Adapter) -> bool:
        """Return whether graphs can run a version: its rank is small, and the same for all modules."""
        return version.layout.ranks is None and version.layout.rank <= MAX_RANK

    def has(self, name: str) -> bool:
        return name in self._places

    def add(self, name: str, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add x A.T B.T to y, in place. y may have a wider dtype than x."""
        a_G, b_G = self._addresses_M2G[self._places[name]]
        add_lora(x_TI, y_TO, a_G, b_G, self._tiles_N4[: len(x_TI)])

    def add_to_logits(self, hidden_TH: Tensor, logits_TV: Tensor) -> None:
        self.add(self._architecture.head.name, hidden_TH, logits_TV)

    def _addresses(self, version: Adapter) -> np.ndarray:
        """Return the addresses of A and B for each linear layer, (M, 2); 0 where the version has no LoRA."""
        layout, row_P = version.layout, version.compute_copy
        if layout.digest not in self._offsets:
            self._offsets[layout.digest] = _offsets(layout, self._names)
        offsets_M2 = self._offsets[layout.digest]
        return np.where(offsets_M2 >= 0, row_P.data_ptr() + offsets_M2 * row_P.itemsize, 0)


class SlotLayer:
    """The LoRA of one decoder layer; implements :class:`~twinkle.model.decoder.lora.lora.LayerAdapters`."""

    width = 0  # no buffer for x A.T is needed: the kernels allocate their own

    def __init__(self, lora: SlotLora, prefix: str, rows: int) -> None:
        self._lora = lora
        self._prefix = prefix
        self._rows = rows

    def has(self, name: str) -> bool:
        return self._lora.has(self._prefix + name)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        assert len(x_TI) == self._rows, "one row a sequence"
        self._lora.add(self._prefix + name, x_TI, y_TO)


def _offsets(layout: RowLayout, names: Sequence[str]) -> np.ndarray:
    return np.array([layout.offsets(name) if layout.has(name) else (-1, -1) for name in names])
