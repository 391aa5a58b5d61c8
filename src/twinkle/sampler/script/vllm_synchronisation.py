"""The receiving side of ``sync_weights`` for vLLM: what the sampler samples with, and whether it may.

vLLM replaces its base model in place, so the sampler refuses to sample from the first new weight until the last one,
and after a failure until the next synchronisation succeeds. An adapter always gets a version of its own.
"""

from typing import TYPE_CHECKING

from twinkle.errors import InvalidInputError
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.offer import WeightsOffer
from twinkle.sampler.script.in_one_call import AdapterVersions
from twinkle.sampler.script.synchronisation import ReceivedTensors

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler

__all__ = ["VllmWeightReceiver"]


class VllmWeightReceiver:
    """Receives weights for one vLLM engine, and knows what it samples with.

    ``base_id``: see :class:`~twinkle.model.weights.offer.WeightsOffer`; that of the weights vLLM was started with.
    """

    def __init__(self, engine: "VllmSampler", versions: AdapterVersions, base_id: str | None) -> None:
        self._engine = engine
        self._versions = versions
        self._base_id = base_id
        self.base_name = "base"  # the name of the base model's weights in responses
        self.merged = False  # whether the base model has an adapter merged into it
        self._count = 0  # synchronisations so far, with those that failed; the same number on all workers of a group
        # The synchronisation under way:
        self._offer: WeightsOffer | None = None
        self._wanted: frozenset[str] = frozenset()  # weights of the base model
        self._adapter = ReceivedTensors(())
        self._touched = False  # whether the replacement of the base model has begun
        self._finished = False  # whether the last synchronisation has ended here; it may still fail elsewhere

    def prepare(self, offer: WeightsOffer) -> tuple[TensorMeta, ...]:
        """Return what must be sent. Raise if it does not fit; nothing has changed then."""
        engine = self._engine
        self._count += 1
        self._finished = False
        engine.require_idle_and_awake()
        if offer.adapter:
            engine.check_adapter(offer.peft_config or {})
        known = offer.base_id is not None and offer.base_id == self._base_id
        if not known:
            engine.base.check_tensors(offer.base)
        base = () if known else offer.base
        self._offer, self._touched = offer, False
        self._wanted = frozenset(tensor.name for tensor in base)
        self._adapter = ReceivedTensors(offer.adapter)
        return (*offer.adapter, *base)

    def receive(self, bucket: Bucket) -> None:
        assert self._offer is not None, "prepare comes first"
        of_base = []
        for piece, numbers in bucket:
            if piece.name in self._adapter:
                self._adapter.add(piece, numbers)
            elif piece.name in self._wanted:
                of_base.append((piece, numbers))
            else:
                raise InvalidInputError("bucket", piece.name, "weights that were asked for")
        if of_base:
            self._begin_base()
            pieces, tensors = zip(*of_base, strict=True)
            self._engine.base.receive(Bucket(pieces, tensors))

    def finish(self) -> str:
        offer = self._offer
        assert offer is not None, "prepare comes first"
        adapter = self._adapter.complete()
        name = f"sync-{self._count}"
        if self._wanted:
            self._begin_base()
            self._engine.base.finish()
        if offer.adapter:
            self._engine.receive_version(name, offer.peft_config or {}, adapter)
        self._versions.draw_with(name if offer.adapter else None)
        if self._touched:
            self.base_name = name
        self._base_id, self.merged = offer.base_id, offer.merged
        self._end()
        self._finished = True
        return name

    def abandon(self, why: str, *, finishing: bool) -> None:
        if self._wanted:  # on workers of a group that got less of it, too: all must ask for the same next time
            self._base_id = None
        if self._touched or (finishing and self._finished):  # finished here, but another process failed
            self._base_id = None
            self._engine.base.refuse(
                f"the last sync_weights failed ({why}) and left no complete weights; call sync_weights"
            )
        self._end()

    def forget_base(self) -> None:
        """Ask for the base model at the next synchronisation, because its weights are gone."""
        self._base_id = None

    def _begin_base(self) -> None:
        if not self._touched:
            self._touched = True  # before, because nothing of the old weights can be relied on once it has begun
            self._versions.forget_all()
            self._engine.begin_base()

    def _end(self) -> None:
        self._offer, self._wanted, self._adapter = None, frozenset(), ReceivedTensors(())
        self._touched = self._finished = False
