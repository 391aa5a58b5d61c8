"""The receiving side of ``sync_weights`` for the torch sampler: what it samples with, and whether it may.

A sampler whose base model was only partly replaced refuses to sample, and so does one that shares tensors with a model
that was trained since the last synchronisation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError, TwinkleError, UnsupportedError, UserError
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.offer import LiveWeights, WeightsOffer
from twinkle.sampler.script.base_weights import BaseWeights
from twinkle.sampler.script.in_one_call import AdapterVersions
from twinkle.sampler.torch_sampler.sampler import TorchSampler

__all__ = ["CACHE", "MERGED", "WEIGHTS", "ReceivedTensors", "WeightReceiver"]

WEIGHTS, CACHE = "weights", "kv_cache"  # what sleeps, as vLLM names it
MERGED = (
    "sample: the last sync_weights merged an adapter into the base model, and a second adapter cannot be added to it; "
    "name no adapter, or call sync_weights(merge_and_sync=False) first"
)
_STALE = "sample: the model was trained after the last sync_weights; call sync_weights before sample"


class ReceivedTensors:
    """Tensors that arrive in pieces, such as those of an adapter."""

    def __init__(self, expected: tuple[TensorMeta, ...]) -> None:
        self._missing = {tensor.name: tensor.count for tensor in expected}
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._missing

    def add(self, piece: TensorMeta, numbers: Tensor) -> None:
        if piece.name not in self._tensors:
            self._tensors[piece.name] = torch.empty(piece.shape, dtype=piece.dtype)
        self._tensors[piece.name].view(-1)[piece.start : piece.stop].copy_(numbers)
        self._missing[piece.name] -= piece.count

    def complete(self) -> Mapping[str, Tensor]:
        """Return the tensors by name. Raise if numbers are missing."""
        require_complete(self._missing)
        return self._tensors


def require_complete(missing: Mapping[str, int]) -> None:
    for name, count in missing.items():
        if count != 0:
            raise TwinkleError(f"sync_weights: {count} numbers of {name} did not arrive")


class WeightReceiver:
    """Receives weights for one sampler, and knows what it samples with.

    ``base``: the sampler's base model; None for a sampler on the model's own engine, whose base model never changes.
    ``base_id``: see :class:`~twinkle.model.weights.offer.WeightsOffer`. ``live``: the weights with which ``base``
    shares tensors.
    """

    def __init__(
        self,
        engine: TorchSampler,
        versions: AdapterVersions,
        base: BaseWeights | None,
        base_id: str | None,
        live: LiveWeights | None = None,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._base = base
        self._base_id = base_id
        self._owner = None if live is None else live.owner
        self._live = live
        self._seen = 0 if live is None else live.changes()
        self.base_name = "base"  # the name of the base model's weights in responses
        self._count = 0  # synchronisations so far, with those that failed; the same number on all workers of a group
        self._merged = False  # whether the base model has an adapter merged into it
        self._refusal: str | None = None  # why there are no weights to sample with
        self._asleep: set[str] = set()
        # The synchronisation under way:
        self._offer: WeightsOffer | None = None
        self._links: dict[str, Tensor] = {}
        self._adapter = ReceivedTensors(())
        self._missing: dict[str, int] = {}  # numbers of the base model that have not arrived, by tensor
        self._installed: str | None = None  # the new adapter's version
        self._touched = False  # whether weights of the base model were replaced
        self._finished = False  # whether the last synchronisation has ended here; it may still fail elsewhere

    def require_usable(self, *, with_adapter: bool = False) -> None:
        """Raise if the sampler has nothing whole to sample with, or not ``with_adapter``, which a call names."""
        if self._asleep:
            raise UserError(f"sample: the sampler is asleep ({', '.join(sorted(self._asleep))}); call wake_up first")
        if self._touched:
            raise UserError(
                "sample: sync_weights is replacing the weights in another thread; sample after it has ended"
            )
        if self._refusal is not None:
            raise UserError(f"sample: {self._refusal}")
        if self._live is not None and self._live.changes() != self._seen:
            raise UserError(_STALE)
        if with_adapter and self._merged:
            raise UserError(MERGED)

    # --- one synchronisation ------------------------------------------------------------------------------------------

    def prepare(self, offer: WeightsOffer) -> tuple[TensorMeta, ...]:
        self._count += 1
        self._finished = False
        if WEIGHTS in self._asleep:
            raise UserError("sync_weights: the sampler's weights are asleep; call wake_up first")
        copied = self._wanted_of_base(offer)
        self._offer, self._touched, self._installed = offer, False, None
        self._adapter = ReceivedTensors(offer.adapter)
        self._missing = {tensor.name: tensor.count for tensor in copied}
        return (*offer.adapter, *copied)  # the adapter first: if it is refused, the base model is still the old one

    def _wanted_of_base(self, offer: WeightsOffer) -> list[TensorMeta]:
        known = offer.base_id is not None and offer.base_id == self._base_id
        self._links = {}
        if self._base is None:
            if not known:
                raise UnsupportedError(
                    "merge_and_sync: this sampler uses the base model of a MultiLoraTransformersModel, which its "
                    "adapters share; allowed: False with that model, or a LocalSampler(model_id) with its own weights"
                )
            return []
        self._base.check(offer.base)
        if offer.live is not None and offer.live.owner is self._owner:
            for name, tensor in offer.live.tensors.items():
                if self._base.can_share(name, tensor):
                    self._links[name] = tensor
        return [] if known else [tensor for tensor in offer.base if tensor.name not in self._links]

    def receive(self, bucket: Bucket) -> None:
        assert self._offer is not None, "prepare comes first"
        for piece, numbers in bucket:
            if piece.name in self._adapter:
                self._adapter.add(piece, numbers)
                continue
            if piece.name not in self._missing or self._base is None:
                raise InvalidInputError("bucket", piece.name, "weights that were asked for")
            self._install_adapter()
            self._touched = True
            self._base.write(piece, numbers)
            self._missing[piece.name] -= piece.count

    def finish(self) -> str:
        offer = self._offer
        assert offer is not None, "prepare comes first"
        require_complete(self._missing)
        self._install_adapter()
        if self._base is not None:
            self._touched = self._touched or offer.base_id is None
            relinked = [name for name in self._links if name not in self._base.shared]
            if relinked:
                self._touched = True
            for name, tensor in self._links.items():
                self._base.share(name, tensor)
            moved = self._base.settle()
            if moved or self._touched:
                self._touched = True
                self._engine.base_changed(moved=moved)
            shares = bool(self._base.shared)
            self._live = offer.live if shares and offer.live is not None else self._live if shares else None
            self._seen = 0 if self._live is None else self._live.changes()
        self._versions.draw_with(self._installed)
        name = self._name()
        if self._touched:
            self.base_name = name
        self._base_id, self._merged, self._refusal = offer.base_id, offer.merged, None
        self._end()
        self._finished = True
        return name

    def abandon(self, why: str, *, finishing: bool) -> None:
        if finishing and self._finished:  # another process failed: its sampler does not have these weights
            self._touched = True
        elif self._offer is None:
            return
        if self._installed is not None:
            self._engine.retire(self._installed)
        if self._missing:  # on workers of a group that got less of it, too: all must ask for the same next time
            self._base_id = None
        if self._touched:
            if self._base is not None:
                self._base_id = None
            self._refusal = f"the last sync_weights failed ({why}) and left no complete weights; call sync_weights"
        self._end()

    def _name(self) -> str:
        return f"sync-{self._count}"

    def _install_adapter(self) -> None:
        offer = self._offer
        if offer is not None and offer.adapter and self._installed is None:
            config: Mapping[str, Any] = offer.peft_config or {}
            self._engine.receive_version(self._name(), config, self._adapter.complete())
            self._installed = self._name()

    def _end(self) -> None:
        self._offer, self._links, self._missing, self._installed = None, {}, {}, None
        self._adapter, self._touched, self._finished = ReceivedTensors(()), False, False

    # --- memory -------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Free the cache, and move the sampler's own weights to host memory (level 1) or discard them (level 2)."""
        if not isinstance(level, int) or isinstance(level, bool) or level not in (1, 2):
            raise InvalidInputError("level", level, "1 (the weights move to host memory) or 2 (they are discarded)")
        if CACHE not in self._asleep:
            self._engine.free_cache()
        if self._base is not None:
            if level == 1 and WEIGHTS not in self._asleep:
                self._base.to_host()
            elif level == 2 and len(self._base.shared) < len(self._base.names):
                self._base.discard()
                self._base_id = None
                self._refusal = "sleep(level=2) has discarded the sampler's weights; call sync_weights"
        self._asleep = {WEIGHTS, CACHE}

    def wake_up(self, tags: Sequence[str] | None) -> None:
        chosen = [WEIGHTS, CACHE] if tags is None else [tags] if isinstance(tags, str) else list(tags)
        for tag in chosen:
            if tag not in (WEIGHTS, CACHE):
                raise InvalidInputError("tags", tag, f"{WEIGHTS!r}, {CACHE!r}, or None for both")
        if CACHE in chosen and WEIGHTS in self._asleep and WEIGHTS not in chosen:
            raise UserError("wake_up: the weights must wake before or with the cache; add 'weights' to tags")
        if WEIGHTS in chosen and WEIGHTS in self._asleep and self._base is not None:
            self._base.to_device()
        if CACHE in chosen and CACHE in self._asleep:
            self._engine.restore_cache()
        self._asleep -= set(chosen)
