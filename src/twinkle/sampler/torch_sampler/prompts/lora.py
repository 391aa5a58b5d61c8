"""The LoRA of prompt passes: the addresses of the versions' weights, in a table that captured graphs read.

Shapes: G versions, M linear layers (the head is the last).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.experts.on_device import DeviceExperts, DeviceGroups
from twinkle.model.decoder.lora.lora import WithoutExperts
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.types import IntArray
from twinkle.sampler.torch_sampler.lora.expert_slots import ExpertSlots
from twinkle.sampler.torch_sampler.prompts.lora_kernels import MAX_RANK, add_lora
from twinkle.sampler.torch_sampler.prompts.tables import HEAD_ROWS, MOST_VERSIONS


class PromptLora:
    """The weights of the versions of one pass, by their numbers in its tables."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self._architecture = architecture
        self._names = [target.name for target in (*architecture.projections, architecture.head)]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._weights_GM4 = torch.zeros(MOST_VERSIONS, len(self._names), 4, dtype=torch.int64, device=device)
        self._experts = ExpertSlots(architecture, MOST_VERSIONS, MAX_RANK, device)
        self._offsets: dict[str, tuple[IntArray, IntArray]] = {}  # by the digest of a layout
        self._bound: list[tuple[int, str]] = []

    @staticmethod
    def takes(version: Adapter) -> bool:
        """Return whether the kernels can compute a version: a small rank, and on experts the form of Tinker."""
        return version.layout.rank <= MAX_RANK and ExpertSlots.takes(version.layout)

    def bind(self, versions: Sequence[Adapter]) -> None:
        """Write the addresses of these versions' weights into the table. They must be resident."""
        # Compare addresses and layouts, not slots: a version that was paged out may return to the same slot number in
        # another block of memory.
        rows = [version.compute_copy for version in versions]
        key = [(row_P.data_ptr(), version.layout.digest) for row_P, version in zip(rows, versions, strict=True)]
        if key == self._bound[: len(key)]:
            return
        entries = np.stack(
            [self._entries(row_P, version.layout) for row_P, version in zip(rows, versions, strict=True)]
        )
        fresh = torch.from_numpy(entries)
        if self._weights_GM4.is_cuda:
            fresh = fresh.pin_memory()
        self._weights_GM4[: len(versions)].copy_(fresh, non_blocking=True)
        self._experts.bind(versions)
        self._bound = key

    def layers(self, tiles_n4: Tensor, tile_rows: int, version_T: Tensor) -> tuple["PromptLayer", ...]:
        """Return one entry for each decoder layer. version_T: the number of each row's version, as int32."""
        path, count = self._architecture.layers_path, self._architecture.layer_count
        groups = self._experts.groups(version_T)
        return tuple(PromptLayer(self, f"{path}.{index}.", tiles_n4, tile_rows, groups) for index in range(count))

    def has(self, name: str) -> bool:
        return name in self._places

    def experts(self, name: str, groups: DeviceGroups) -> DeviceExperts | None:
        """Return the adapters on the experts of one module, for rows of these groups."""
        return self._experts.layer(name, groups)

    def add(self, name: str, x_TI: Tensor, y_TO: Tensor, tiles_n4: Tensor, tile_rows: int) -> None:
        """Add x A.T B.T to y, in place. y may have a wider dtype than x."""
        add_lora(x_TI, y_TO, self._weights_GM4[:, self._places[name]], tiles_n4, tile_rows)

    def add_to_logits(self, hidden_nH: Tensor, logits_nV: Tensor, tiles_n4: Tensor) -> None:
        self.add(self._architecture.head.name, hidden_nH, logits_nV, tiles_n4, HEAD_ROWS)

    def _entries(self, row_P: Tensor, layout: RowLayout) -> IntArray:
        """Return the addresses of A and B, 0 where the version has no LoRA, the rank, and 0, for each layer: (M, 4)."""
        if layout.digest not in self._offsets:
            offsets = [layout.offsets(name) if layout.has(name) else (-1, -1) for name in self._names]
            ranks = [(layout.bucket(name), 0) for name in self._names]
            self._offsets[layout.digest] = np.array(offsets, np.int64), np.array(ranks, np.int64)
        offsets_M2, ranks_M2 = self._offsets[layout.digest]
        addresses_M2 = np.where(offsets_M2 >= 0, row_P.data_ptr() + offsets_M2 * row_P.itemsize, 0)
        return np.concatenate([addresses_M2, ranks_M2], 1)


class PromptLayer(WithoutExperts):
    """The LoRA of one decoder layer; implements :class:`~twinkle.model.decoder.lora.lora.LayerAdapters`."""

    width = 0  # no buffer for x A.T is needed: the kernels allocate their own

    def __init__(self, lora: PromptLora, prefix: str, tiles_n4: Tensor, tile_rows: int, groups: DeviceGroups) -> None:
        self._lora = lora
        self._prefix = prefix
        self._tiles_n4 = tiles_n4
        self._tile_rows = tile_rows
        self._groups = groups

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        return self._lora.experts(self._prefix + name, self._groups)

    def has(self, name: str) -> bool:
        return self._lora.has(self._prefix + name)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        self._lora.add(self._prefix + name, x_TI, y_TO, self._tiles_n4, self._tile_rows)
