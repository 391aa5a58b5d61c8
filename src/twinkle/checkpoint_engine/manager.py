"""``sync_weights``: the weights of a model go to a sampler, tensor by tensor, in buckets.

The model offers its weights, the sampler says which of them it needs, and these are sent bucket by bucket. In one
process the sampler shares the model's own tensors where it can, and they are not sent. Under torchrun every process has
its own model and sampler, and all call :meth:`CheckpointEngineManager.sync_weights`.

After an error the sampler either still has all its old weights, or it refuses to sample until the next synchronisation
succeeds. It never samples with some old and some new weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from twinkle.checkpoint_engine.broadcast import Broadcasts
from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, TwinkleError, UnknownNameError, UnsupportedError
from twinkle.infra.lazy_result import LazyResult
from twinkle.infra.proxy import RemoteProxy
from twinkle.model.parallel import ALONE, Ranks
from twinkle.model.weights.buckets import Bucket, TensorMeta, plan_buckets
from twinkle.model.weights.offer import WeightsOffer

__all__ = ["CheckpointEngineManager", "SendsWeights", "SyncsWeights"]

T = TypeVar("T")

_MIB = 1 << 20
_PLATFORMS = ("GPU", "CPU", "NPU")


class SendsWeights(Protocol):
    """A model, or its proxy, from which weights are synchronised. With several processes all make the same calls."""

    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> WeightsOffer:
        """Return what can be sent: an adapter, or the whole model, with the adapter merged into it if so asked."""
        ...

    def send_weights(self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta]) -> Bucket:
        """Return the numbers of these pieces, which are of tensors that were offered."""
        ...


class SyncsWeights(Protocol):
    """A sampler, or its proxy, that receives weights. The methods are called in the order in which they stand here."""

    def prepare_weights(self, offer: WeightsOffer) -> tuple[TensorMeta, ...]:
        """Return the tensors that must be sent. Raise if the weights do not fit, before anything changes."""
        ...

    def receive_bucket(self, bucket: Bucket) -> None: ...

    def finish_weights(self) -> str:
        """Sample with the new weights from now on. Return their name."""
        ...

    def abandon_weights(self, why: str, *, finishing: bool = False) -> None:
        """End a synchronisation that failed: go on with the old weights, or refuse to sample if some are lost.

        finishing: whether it failed in :meth:`finish_weights`. Other processes that receive the same weights may have
        failed while this one has finished, and it refuses to sample then, too.
        """
        ...


class CheckpointEngineManager:
    """Synchronises the weights of a model to a sampler.

    model: a :class:`~twinkle.model.TransformersModel`, a :class:`~twinkle.model.MultiLoraTransformersModel`, or one of
    Megatron's models.
    sampler: a :class:`~twinkle.sampler.LocalSampler` or :class:`~twinkle.sampler.vLLMSampler`.
    Each is an object of this process or on a worker group. Between groups whose workers all have GPUs of their own,
    weights travel over NCCL, otherwise through Ray's object store.
    platform: "GPU" or "CPU"; the devices are those of the model and the sampler. There is no backend for "NPU".
    bucket_size_mb: the size of a bucket in MiB; None: ``TWINKLE_SYNC_BUCKET_MB`` (default 512).
    """

    def __init__(
        self, model: SendsWeights, sampler: SyncsWeights, platform: str = "GPU", *, bucket_size_mb: float | None = None
    ) -> None:
        if platform not in _PLATFORMS:
            raise UnknownNameError("platform", platform, _PLATFORMS)
        if platform == "NPU":
            raise UnsupportedError("platform: got 'NPU', allowed: 'GPU' or 'CPU'; there is no backend for NPUs")
        size = read_environment().sync_bucket_mb if bucket_size_mb is None else bucket_size_mb
        if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < float("inf"):
            raise InvalidInputError("bucket_size_mb", size, "a number of MiB > 0")
        for field, given, verb, allowed in (
            ("model", model, "offer_weights", "a TransformersModel or a MultiLoraTransformersModel"),
            ("sampler", sampler, "prepare_weights", "a LocalSampler or a vLLMSampler"),
        ):
            if not hasattr(given, verb):
                raise InvalidInputError(field, given, allowed)
        self.model = model
        self.sampler = sampler
        self._bucket_bytes = max(16, int(size * _MIB))
        self._from_workers = isinstance(model, RemoteProxy)
        self._to_workers = isinstance(sampler, RemoteProxy)
        self._broadcasts: Broadcasts | None = None
        if self._from_workers and self._to_workers:
            self._broadcasts = Broadcasts.between(model, sampler)
        # A model on a worker group keeps its own processes together; other processes of a mesh are our peers.
        self._ranks: Ranks = ALONE if self._from_workers else cast("Any", model).ranks

    def sync_weights(self, merge_and_sync: object = True, *, adapter_name: str | None = None) -> str:
        """Give the sampler the model's present weights; return the name that they have in its responses.

        merge_and_sync: whether an adapter is merged into the weights that are sent. If not, the adapter is sent by
        itself, and the sampler draws with it unless another one is named. No effect on a model without adapters.
        adapter_name: None: the model's active adapter.
        """
        merge = bool(merge_and_sync)  # existing programs also pass the name of an adapter, which means True
        offer = self._together(lambda: self.model.offer_weights(adapter_name=adapter_name, merge_and_sync=merge))
        finishing = False
        try:
            self._send(offer)
            finishing = True
            return self._together(self.sampler.finish_weights)
        except BaseException as error:
            self.sampler.abandon_weights(f"{type(error).__name__}: {error}", finishing=finishing)
            raise

    def _send(self, offer: WeightsOffer) -> None:
        wanted = self._together(lambda: self.sampler.prepare_weights(offer))
        if self._broadcasts is not None:
            self._broadcasts.send(offer, plan_buckets(wanted, self._bucket_bytes))
            return
        # Half of a bucket at a time through the object store, because there may be three at once: packed by the model,
        # in the store, and read by the sampler.
        through_store = self._from_workers or self._to_workers
        buckets = plan_buckets(wanted, max(16, self._bucket_bytes // 2) if through_store else self._bucket_bytes)
        if self._from_workers:
            self._send_from_workers(offer, buckets)
        else:
            for pieces in buckets:
                self._receive(self.model.send_weights(offer.adapter_name, offer.merged, pieces))

    def _send_from_workers(self, offer: WeightsOffer, buckets: Sequence[Sequence[TensorMeta]]) -> None:
        """Send buckets from the model's workers, each while the sampler copies from the one before.

        A bucket is a promise here: its numbers go from worker to worker, and are freed with it.
        """
        before: Bucket | None = None
        for pieces in buckets:
            bucket = self.model.send_weights(offer.adapter_name, offer.merged, pieces)
            if before is not None:
                self._receive(before)
            before = bucket
            del bucket
        if before is not None:
            self._receive(before)

    def _receive(self, bucket: Bucket) -> None:
        if isinstance(bucket, LazyResult) and not self._to_workers:
            bucket = bucket()
        self._together(lambda: self.sampler.receive_bucket(bucket))

    def _together(self, action: Callable[[], T]) -> T:
        """Run ``action``, as all processes do. An error in one of them is an error in all."""
        if self._ranks.size == 1:
            return action()
        result, error = None, None
        try:
            result = action()
        except Exception as raised:  # noqa: BLE001  # raised again below, after the other processes know of it
            error = raised
        failures = self._ranks.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(failures):
            if text is not None:
                raise TwinkleError(f"sync_weights: process {rank} failed: {text}")
        return cast("T", result)
