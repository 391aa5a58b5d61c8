"""The adapters on experts in the sampler's captured graphs.

Which row belongs to which version is in one buffer for all layers.

Shapes: N rows at most, G versions at most, n projections of experts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.experts.expert_tables import ENTRIES, ExpertTables
from twinkle.model.decoder.experts.on_device import DeviceExperts, DeviceGroups
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.transfer import to_device


class ExpertSlots:
    """The experts of all layers, for up to ``versions`` adapters of a rank of up to ``rank``."""

    def __init__(self, architecture: Architecture, versions: int, rank: int, device: torch.device) -> None:
        self._tables = ExpertTables(architecture.experts, rank)
        self._versions = versions
        groups = -(-(versions + 1) // 2) * 2  # rows of 16 bytes
        self._tables_n5G = torch.zeros(len(self._tables.names), ENTRIES, groups, dtype=torch.int64, device=device)

    @staticmethod
    def takes(layout: RowLayout) -> bool:
        """Return whether the tables can hold adapters of this layout: those that it has on experts are Tinker's."""
        return ExpertTables.takes(layout)

    def bind(self, versions: Sequence[Adapter | None]) -> None:
        """Write the addresses of these versions' weights into the tables. They must be resident."""
        if not self._tables.names:
            return
        entries = np.zeros((*self._tables_n5G.shape[:2], len(versions)), np.int64)
        for number, version in enumerate(versions):
            if version is not None:
                entries[:, :, number] = self._tables.entries(version.layout, version.compute_copy)
        # Entries of earlier versions remain behind these; no row refers to them.
        fresh = to_device(torch.from_numpy(entries), self._tables_n5G.device)
        self._tables_n5G[..., : len(versions)].copy_(fresh)

    def groups(self, group_T: Tensor) -> DeviceGroups:
        """Return the groups of rows whose versions' numbers are in this buffer."""
        return DeviceGroups(self._versions, group_T)

    def layer(self, name: str, groups: DeviceGroups) -> DeviceExperts | None:
        """Return the adapters on the experts of one module; None: it is not known as one."""
        return self._tables.layer(name, self._tables_n5G, groups)
