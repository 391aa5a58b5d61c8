"""The LoRA of the rows of one forward pass: which rows belong to which version, for every layer and for the head.

Rows are ordered by stack and slot. Rows of the base model come last, and the LoRA layers skip them. Versions whose
slots are not adjacent have to be gathered, which copies their weights; the copy is kept for the next pass with the same
versions. On CPUs, the LoRA of a few versions is computed as two matrix products for each linear layer (see
:mod:`twinkle.sampler.torch_sampler.lora.dense_lora`).
"""

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.layers import bind_layers
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.lora import LayerAdapters
from twinkle.model.decoder.lora.segments import BoundLora, Segment, SegmentLora
from twinkle.sampler.torch_sampler.lora.dense_lora import DenseLora

RowsOf = tuple[Adapter | None, int]  # a version and how many consecutive rows it has


class LoraBinder:
    """Binds versions to rows, and caches the result for the next pass with the same versions.

    The caller must call :meth:`forget` whenever versions may have moved to other slots.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._gathered: dict[tuple[int, ...], Tensor] = {}
        self._last: tuple[tuple[tuple[int, int], ...], tuple[LayerAdapters, ...]] | None = None
        self._dense: DenseLora | None = None  # made of copies of the weights, so :meth:`forget` need not clear it

    def forget(self) -> None:
        self._gathered.clear()
        self._last = None

    def layers(self, runs: Sequence[RowsOf]) -> tuple[LayerAdapters, ...]:
        """Return the LoRA of each decoder layer for consecutive rows of these versions (None: the base model)."""
        key = tuple((id(version), rows) for version, rows in runs)
        if self._last is None or self._last[0] != key:
            self._last = key, self._bind(runs)
        return self._last[1]

    def _bind(self, runs: Sequence[RowsOf]) -> tuple[LayerAdapters, ...]:
        versions = list({id(version): version for version, _ in runs if version is not None}.values())
        on_cpu = all(version.stack.device.type == "cpu" for version in versions)
        if not versions or not on_cpu or not DenseLora.takes(versions):
            return bind_layers(self._segments(runs), self._architecture)
        if self._dense is None or not self._dense.covers(versions):
            self._dense = DenseLora(self._with_earlier(versions), self._architecture)
        return self._dense.layers(runs)

    def _with_earlier(self, versions: list[Adapter]) -> list[Adapter]:
        """Return these versions plus those of the previous set that are still resident, if all of them fit.

        Prompt passes and decode passes alternate, often with different versions; one common set serves both.
        """
        known = {id(version) for version in versions}
        earlier = [version for version in (self._dense.versions if self._dense else ()) if id(version) not in known]
        resident = [version for version in earlier if version.slot is not None]
        return [*versions, *resident] if DenseLora.takes([*versions, *resident]) else versions

    def head(self, runs: Sequence[RowsOf]) -> tuple[BoundLora, ...]:
        name = self._architecture.head.name
        return tuple(segment.bound(name) for segment in self._segments(runs) if segment.layout.has(name))

    def _segments(self, runs: Sequence[RowsOf]) -> list[SegmentLora]:
        """Return one segment for each stack: the rows of its versions and the weights of those versions."""
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
            if len(self._gathered) > 8:  # sequences end one by one, so most combinations of versions never recur
                self._gathered.clear()
            slots = [version.slot for version in versions]
            assert all(slot is not None for slot in slots), "versions of a pass must be resident"
            self._gathered[key] = versions[0].stack.gather([slot for slot in slots if slot is not None])
        return self._gathered[key]
