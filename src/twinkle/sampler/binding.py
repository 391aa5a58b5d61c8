"""The LoRA of the rows of one forward pass: which rows belong to which version, for every layer and for the head.

Rows come ordered by stack and slot, those of the base model last; the layers leave these alone. Gathering versions that
do not lie side by side copies their weights, so what was gathered is kept for the next pass with the same versions.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from twinkle.model.adapter import Adapter
from twinkle.model.architecture import Architecture
from twinkle.model.grouped import Groups
from twinkle.model.head import HeadLora
from twinkle.model.layers import BoundLayer, split_name
from twinkle.model.lora import BoundLora, Segment

RowsOf = tuple[Adapter | None, int]  # a version and how many consecutive rows it has


class LoraBinder:
    """Remembers the last versions and the last layout; :meth:`forget` when versions may have moved."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self._architecture = architecture
        self._device = device
        self._gathered: dict[tuple[int, ...], Tensor] = {}
        self._last: tuple[tuple[tuple[int, int], ...], tuple[BoundLayer, ...]] | None = None

    def forget(self) -> None:
        self._gathered.clear()
        self._last = None

    def layers(self, runs: Sequence[RowsOf]) -> tuple[BoundLayer, ...]:
        """One entry a decoder layer."""
        key = tuple((id(version), rows) for version, rows in runs)
        if self._last is None or self._last[0] != key:
            self._last = key, self._bind(runs)
        return self._last[1]

    def head(self, runs: Sequence[RowsOf]) -> tuple[HeadLora, ...]:
        name = self._architecture.head.name
        return tuple(
            HeadLora(BoundLora(segment, *versions[0].layout.views(rows_GP, name)))
            for versions, segment, rows_GP in self._segments(runs)
            if versions[0].layout.has(name)
        )

    def _bind(self, runs: Sequence[RowsOf]) -> tuple[BoundLayer, ...]:
        layers: list[dict[str, tuple[BoundLora, ...]]] = [{} for _ in range(self._architecture.layer_count)]
        for versions, segment, rows_GP in self._segments(runs):
            layout = versions[0].layout
            for target in layout.targets:
                if target.name != self._architecture.head.name:
                    index, short = split_name(target.name, self._architecture)
                    bound = BoundLora(segment, *layout.views(rows_GP, target.name))
                    layers[index][short] = (*layers[index].get(short, ()), bound)
        return tuple(layers)

    def _segments(self, runs: Sequence[RowsOf]) -> list[tuple[list[Adapter], Segment, Tensor]]:
        """Versions of one stack with their rows and their weights (G, P)."""
        segments, start = [], 0
        for _, run in groupby(runs, key=lambda entry: None if entry[0] is None else id(entry[0].stack)):
            members = list(run)
            rows = tuple(count for _, count in members)
            versions = [version for version, _ in members if version is not None]
            if versions:
                segment = Segment(start, start + sum(rows), Groups.of(rows, self._device))
                segments.append((versions, segment, self._gather(versions)))
            start += sum(rows)
        return segments

    def _gather(self, versions: Sequence[Adapter]) -> Tensor:
        key = tuple(id(version) for version in versions)
        if key not in self._gathered:
            if len(self._gathered) > 8:  # sequences end one by one: most compositions are not seen again
                self._gathered.clear()
            slots = [version.slot for version in versions]
            assert all(slot is not None for slot in slots), "versions of a pass must be resident"
            self._gathered[key] = versions[0].stack.gather([slot for slot in slots if slot is not None])
        return self._gathered[key]
