"""LoRA for captured graphs: the mapping from rows to versions is in buffers whose addresses never change.

For each linear layer, or for each set of layers with the same input, few kernel launches serve any mix of versions of
up to ``MAX_RANK`` (see ``slot_lora_kernels``).

The first products of a few adapters can be left to the base model's own products (see ``spare_rows``).

Shapes: N rows at most (there are never more tiles than rows), M linear layers (the head is the last), S layers of a
set. Where there is one entry for A and one for B, A is the first.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.experts.on_device import DeviceExperts, DeviceGroups
from twinkle.model.decoder.joined import SPARE_ROWS
from twinkle.model.decoder.lora.lora import WithoutExperts
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.lora.expert_slots import ExpertSlots
from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import (
    MAX_RANK,
    TILE_ROWS_OF_A,
    Tiles,
    Tiling,
    add_lora,
    new_counters,
    tile_rows_of_b,
    usual_tiles,
)
from twinkle.sampler.torch_sampler.lora.spare_rows import SpareRows


class SlotLora:
    """The adapters of up to ``rows`` rows.

    :meth:`bind` writes the addresses of the rows' weights into fixed buffers, which a graph reads when it runs.
    """

    def __init__(self, architecture: Architecture, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._architecture = architecture
        self._names = [target.name for target in (*architecture.projections, architecture.head)]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._addresses_M2N = torch.zeros(len(self._names), 2, rows, dtype=torch.int64, device=device)
        self._tiles_2N4 = torch.zeros(2, rows, 4, dtype=torch.int32, device=device)
        self._counts_2 = torch.zeros(2, dtype=torch.int32, device=device)
        self._done_NS = new_counters(rows).to(device)
        self._experts = ExpertSlots(architecture, rows, MAX_RANK, device)
        self._group_N = torch.full((rows,), rows, dtype=torch.int32, device=device)  # the run of each row
        self._offsets: dict[str, np.ndarray] = {}  # by the digest of a layout
        self._bound: tuple[int, tuple[tuple[int, str, int, int], ...]] | None = None
        self._spare_rows: SpareRows | None = None

    def bind(self, runs: Sequence[tuple[Adapter | None, int]], size: int) -> bool:
        """Assign consecutive rows, from row 0, to these versions (None: the base model), for a graph of ``size`` rows.

        Rows beyond the runs, up to ``size``, have no adapter. Return whether the A of all versions are in spare rows.
        """
        versions = [version for version, _ in runs if version is not None]
        held = None
        if self._spare_rows is not None:
            held = self._spare_rows.hold(versions, lambda version: self._addresses(version)[:-1, 0])  # not of the head
        columns = dict.fromkeys(map(id, versions), 0) if held is None else held
        # Compare addresses and layouts, not slots: a version that was paged out may return to the same slot number in
        # another block of memory.
        key = (
            size,
            tuple(
                (0, "", count, 0)
                if version is None
                else (version.compute_copy.data_ptr(), version.layout.digest, count, columns[id(version)])
                for version, count in runs
            ),
        )
        if key == self._bound:
            return held is not None
        self._bound = None  # until everything is written
        groups = np.full(self.rows, self.rows, np.int32)
        row = 0
        for group, (version, count) in enumerate(runs):
            if version is not None:
                groups[row : row + count] = group
            row += count
        everything = [
            (
                count,
                *((0, 0) if version is None else (version.layout.rank, columns[id(version)])),
                self._addresses(version),
            )
            for version, count in (*runs, (None, size - row))
        ]
        for kind, tile_rows in enumerate((TILE_ROWS_OF_A, tile_rows_of_b(size))):
            self._bind_tiles(kind, tile_rows, everything)
        device = self._group_N.device
        self._experts.bind([version for version, _ in runs])
        self._group_N.copy_(to_device(torch.from_numpy(groups), device))
        self._bound = key
        return held is not None

    def _bind_tiles(self, kind: int, tile_rows: int, runs: Sequence[tuple[int, int, int, np.ndarray]]) -> None:
        """Cut the rows into tiles, and write them and their addresses. kind: 0 for A, 1 for B.

        Each run has the number of its rows, and its version's rank, first column of h, and addresses.
        """
        tiles: list[tuple[int, int, int, int]] = []
        addresses = []
        row = 0
        for count, rank, column, addresses_M2 in runs:
            own = [(first, row + count, rank, column) for first in range(row, row + count, tile_rows)]
            addresses.append(np.repeat(addresses_M2[:, kind, None], len(own), 1))
            tiles += own
            row += count
        device, used = self._group_N.device, len(tiles)
        # Entries of earlier passes remain behind these, and are not read.
        self._tiles_2N4[kind, :used].copy_(to_device(torch.tensor(tiles, dtype=torch.int32), device))
        self._counts_2[kind : kind + 1].copy_(to_device(torch.tensor([used], dtype=torch.int32), device))
        self._addresses_M2N[:, kind, :used].copy_(to_device(torch.from_numpy(np.concatenate(addresses, 1)), device))

    @property
    def has_spare_rows(self) -> bool:
        return self._spare_rows is not None

    def use_spare_rows(self, rows: Mapping[str, Tensor] | None) -> None:
        """Use the spare rows of all linear layers of the decoder, by their names. None: there are none."""
        assert SPARE_ROWS <= MAX_RANK, "kernels write x A.T of the head to the same columns"
        self._spare_rows = None if rows is None else SpareRows([rows[name] for name in self._names[:-1]])

    def layers(self, rows: int) -> tuple["SlotLayer", ...]:
        """Return one entry for each decoder layer, for a graph of ``rows`` rows."""
        path, count = self._architecture.layers_path, self._architecture.layer_count
        groups = self._experts.groups(self._group_N[:rows])
        return tuple(SlotLayer(self, f"{path}.{index}.", rows, groups) for index in range(count))

    @staticmethod
    def takes(version: Adapter) -> bool:
        """Return whether graphs can run a version: one small rank everywhere, and on experts the form of Tinker."""
        layout = version.layout
        return layout.ranks is None and layout.rank <= MAX_RANK and ExpertSlots.takes(layout)

    def has(self, name: str) -> bool:
        return name in self._places

    def experts(self, name: str, groups: DeviceGroups) -> DeviceExperts | None:
        """Return the adapters on the experts of one module, for rows of these groups."""
        return self._experts.layer(name, groups)

    def tiling(self, rows: int) -> Tiling:
        """Return the tiles of a graph of ``rows`` rows, which runs only after :meth:`bind` with this size."""
        of_a, of_b = (
            Tiles(tile_rows, self._tiles_2N4[kind], self._counts_2[kind : kind + 1], usual_tiles(rows, tile_rows))
            for kind, tile_rows in enumerate((TILE_ROWS_OF_A, tile_rows_of_b(rows)))
        )
        return Tiling(of_a, of_b, self._done_NS)

    def addresses(self, names: Sequence[str]) -> Tensor:
        """Return where the addresses of some linear layers will be, (S, 2, N). The layers must follow each other."""
        first = self._places[names[0]]
        places = [self._places[name] for name in names]
        assert places == list(range(first, first + len(names))), "layers of a set follow each other"
        return self._addresses_M2N[first : first + len(names)]

    def follow(self, names: Sequence[str]) -> bool:
        """Return whether adapters may be on all of these linear layers, and the layers follow each other."""
        places = [self._places.get(name, -1) for name in names]
        return places[0] >= 0 and places == list(range(places[0], places[0] + len(names)))

    def add(self, name: str, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add x A.T B.T to y, in place. y may have a wider dtype than x."""
        add_lora(x_TI, y_TO, self.addresses([name]), self.tiling(len(x_TI)))

    def add_to_logits(self, hidden_TH: Tensor, logits_TV: Tensor) -> None:
        self.add(self._architecture.head.name, hidden_TH, logits_TV)

    def _addresses(self, version: Adapter | None) -> np.ndarray:
        """Return the addresses of A and B for each linear layer, (M, 2); 0 where the version has no LoRA."""
        if version is None:
            return np.zeros((len(self._names), 2), np.int64)
        layout, row_P = version.layout, version.compute_copy
        if layout.digest not in self._offsets:
            self._offsets[layout.digest] = _offsets(layout, self._names)
        offsets_M2 = self._offsets[layout.digest]
        return np.where(offsets_M2 >= 0, row_P.data_ptr() + offsets_M2 * row_P.itemsize, 0)


class SlotLayer(WithoutExperts):
    """The LoRA of one decoder layer; implements :class:`~twinkle.model.decoder.lora.lora.LayerAdapters`."""

    width = 0  # no buffer for x A.T is needed: the kernels allocate their own

    def __init__(self, lora: SlotLora, prefix: str, rows: int, groups: DeviceGroups) -> None:
        self._lora = lora
        self._prefix = prefix
        self._rows = rows
        self._groups = groups

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        return self._lora.experts(self._prefix + name, self._groups)

    def has(self, name: str) -> bool:
        return self._lora.has(self._prefix + name)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        assert len(x_TI) == self._rows, "one row a sequence"
        self._lora.add(self._prefix + name, x_TI, y_TO)


def _offsets(layout: RowLayout, names: Sequence[str]) -> np.ndarray:
    return np.array([layout.offsets(name) if layout.has(name) else (-1, -1) for name in names])
