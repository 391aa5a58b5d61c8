"""The LoRA of the rows of one forward pass: which rows belong to which version, for every layer and for the head.

Rows come ordered by stack and slot, those of the base model last; the layers leave these alone. Gathering versions that
do not lie side by side copies their weights, so what was gathered is kept for the next pass with the same versions.
"""

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from twinkle.model.adapter import Adapter
from twinkle.model.architecture import Architecture
from twinkle.model.grouped import Groups
from twinkle.model.layers import bind_layers
from twinkle.model.lora import LayerLora
from twinkle.model.segments import BoundLora, Segment, SegmentLora

RowsOf = tuple[Adapter | None, int]  # a version and how many consecutive rows it has


class LoraBinder:
    """Remembers the last versions and the last layout; :meth:`forget` when versions may have moved."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._gathered: dict[tuple[int, ...], Tensor] = {}
        self._last: tuple[tuple[tuple[int, int], ...], tuple[LayerLora, ...]] | None = None

    def forget(self) -> None:
        self._gathered.clear()
        self._last = None

    def layers(self, runs: Sequence[RowsOf]) -> tuple[LayerLora, ...]:
        """One entry a decoder layer."""
        key = tuple((id(version), rows) for version, rows in runs)
        if self._last is None or self._last[0] != key:
            self._last = key, bind_layers(self._segments(runs), self._architecture)
        return self._last[1]

    def head(self, runs: Sequence[RowsOf]) -> tuple[BoundLora, ...]:
        name = self._architecture.head.name
        return tuple(segment.bound(name) for segment in self._segments(runs) if segment.layout.has(name))

    def _segments(self, runs: Sequence[RowsOf]) -> list[SegmentLora]:
        """Versions of one stack with their rows and their weights."""
        segments, start = [], 0
        for _, run in groupby(runs, key=lambda entry: None if entry[0] is None else id(entry[0].stack)):
            members = list(run)
            rows = tuple(count for _, count in members)
            versions = [version for version, _ in members if version is not None]
            if versions:
                segment = Segment(start, start + sum(rows), Groups(rows))
                segments.append(SegmentLora(segment, versions[0].layout, self._gather(versions), None))
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
