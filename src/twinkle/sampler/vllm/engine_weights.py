"""The weights of the base model in a running vLLM engine, and their replacement by new ones.

New weights go first into the copy of the model that this process holds, which scores prompts and with which vLLM is
compared, and from there, as soon as a tensor is complete, to vLLM's workers through a file in memory. Both are replaced
in place. So from the first new tensor until the last one neither can be used, and after a failure neither can be used
until a later replacement is complete: :meth:`EngineWeights.require_whole` raises.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from twinkle.errors import CapacityError, InvalidInputError, TwinkleError, TwinkleServerError, UserError
from twinkle.model.decoder.base_weights import as_in_files, named_weights
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.sampler.vllm.engine import Engine

_FILE = "base.safetensors"
_SPARE_BYTES = 2**20
_CACHE_SECONDS = 60.0  # how long cancelled requests may hold cached prompts


class EngineWeights:
    """Replaces the weights of the base model in vLLM and in the copy ``model``.

    directory: a directory in memory that vLLM's workers can read. changed: told when the copy has new weights.
    check: raises if vLLM does not compute what the copy computes.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        directory: Path,
        changed: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._model = model
        self._own = named_weights(model)
        self._file = directory / _FILE
        self._changed = changed
        self._check = check
        self._missing: Counter[str] = Counter()  # numbers of each tensor that have not arrived
        self._refusal: str | None = None

    @property
    def names(self) -> list[str]:
        return list(self._own)

    def require_whole(self) -> None:
        """Raise if the weights are not complete, so that nothing may be sampled."""
        if self._refusal is not None:
            raise UserError(f"sample: {self._refusal}")

    def refuse(self, why: str) -> None:
        """Let nothing be sampled until the next replacement is complete."""
        self._refusal = why

    def check_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        """Raise if these are not exactly the tensors of the base model."""
        for tensor in tensors:
            if tensor.name in self._own and tensor.shape != tuple(self._own[tensor.name].shape):
                allowed = f"{tuple(self._own[tensor.name].shape)}, as in the sampler's model"
                raise InvalidInputError(tensor.name, f"a weight of shape {tensor.shape}", allowed)
        names = {tensor.name for tensor in tensors}
        if names != self._own.keys():
            different = ", ".join(sorted(names ^ self._own.keys())[:4])
            allowed = f"the {len(self._own)} weights of the sampler's model; only one of the two has {different}"
            raise InvalidInputError("weights", f"{len(names)} weights of the base model", allowed)

    def begin(self) -> None:
        """Begin a replacement, or begin again after one that failed."""
        self._refusal = "the sampler's weights are being replaced, and that has not ended; call sync_weights"
        self._missing = Counter({name: tensor.numel() for name, tensor in self._own.items()})
        self._engine.call_workers("twinkle_begin_weights")

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Take pieces of tensors. The pieces of a tensor must not overlap."""
        complete = []
        for piece, numbers in bucket:
            self._own[piece.name].view(-1)[piece.start : piece.stop].copy_(numbers)
            self._missing[piece.name] -= piece.count
            if self._missing[piece.name] == 0:
                complete.append(piece.name)
        if complete:
            self._send(complete)

    def finish(self) -> None:
        """End the replacement. Raise, and refuse to sample, if vLLM does not compute the same as the copy."""
        missing = sorted(name for name, count in self._missing.items() if count)
        if missing:
            raise TwinkleError(f"the replacement of weights is not complete: {len(missing)} are missing: {missing[:4]}")
        self._engine.call_workers("twinkle_finish_weights")
        self._reset_cache()
        self._engine.reset_encoder_cache()  # features of the old vision tower
        self._changed()
        self._check()
        self._refusal = None

    def _send(self, names: Sequence[str]) -> None:
        converted = as_in_files(self._model, {name: self._own[name].detach() for name in names})
        tensors = {name: tensor.contiguous() for name, tensor in converted.items()}
        size, free = sum(each.nbytes for each in tensors.values()), shutil.disk_usage(self._file.parent).free
        if size + _SPARE_BYTES > free:
            raise CapacityError(
                f"{self._file.parent.parent} has {free / 2**20:.0f} MiB left, {size / 2**20:.0f} are needed to send "
                "weights to vLLM: name a larger memory_dir, or use smaller buckets"
            )
        try:
            save_file(tensors, self._file)
            self._engine.call_workers("twinkle_load_weights", str(self._file))
        finally:
            self._file.unlink(missing_ok=True)

    def _reset_cache(self) -> None:
        """Drop vLLM's cached prompts, which it refuses as long as requests that were cancelled still hold some."""
        end = time.monotonic() + _CACHE_SECONDS
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > end:
                raise TwinkleServerError("vLLM does not drop its cached prompts, which belong to the old weights")
            time.sleep(0.05)
