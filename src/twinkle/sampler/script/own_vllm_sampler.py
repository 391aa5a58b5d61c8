"""vLLM as a script's own sampler: the server's vLLM engine, used in one call.

Weights come by ``sync_weights``, by ``receive_weights`` or from directories. Every change of an adapter makes a new
version, so that vLLM's prefix cache never mixes prompts computed with different weights. Prompt scores are computed by
a second copy of the base model; vLLM is also compared with that copy when it starts and whenever it gets weights.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twinkle.data_format import SampleResponse
from twinkle.errors import InvalidInputError, UserError
from twinkle.extras import missing
from twinkle.hub.model_id import id_text
from twinkle.infra import DeviceMesh, remote_class, remote_function
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS
from twinkle.model.library.components import build_template
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.channel import WeightChannel
from twinkle.model.weights.offer import WeightsOffer, pretrained_id
from twinkle.sampler.script.features import as_sampling_params
from twinkle.sampler.script.in_one_call import (
    AdapterVersions,
    Inputs,
    Params,
    TrainerAdapters,
    own_prompts,
    sample_in_one_call,
)
from twinkle.sampler.script.synchronisation import MERGED
from twinkle.sampler.script.vllm_options import VllmOptions
from twinkle.sampler.script.vllm_synchronisation import VllmWeightReceiver
from twinkle.utils.logger import get_logger

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["vLLMSampler"]

_at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)
_RESERVE = 0.02  # share of a GPU's memory that neither vLLM nor the copy of the model accounts for


@remote_class()
class vLLMSampler(WeightChannel):  # noqa: N801 - the name that scripts use
    """A sampler that generates with a base model and with adapters for it, using vLLM.

    engine_args: vLLM's own arguments by name; see :mod:`twinkle.sampler.vllm.engine_args`. On a GPU,
    ``gpu_memory_utilization`` is required: it is the share that vLLM takes, and the copy of the model gets the rest.
    With ``memory_budget_bytes``, ``kv_cache_memory_bytes`` may be given instead. ``enable_lora``, ``logprobs_mode`` and
    ``max_logprobs``: see :class:`~twinkle.sampler.script.vllm_options.VllmOptions`.
    For a vision model, ``limit_mm_per_prompt`` says how many images a prompt may have, and ``mm_processor_kwargs`` must
    not change their sizes.
    device_mesh: how workers share the inputs; every worker has its own engine on all devices that it sees.
    template: encodes trajectories, and joins prompt and completion.
    dtype: "bf16" or "fp32", like the trainer's.
    memory_budget_bytes: the memory of the model's copy, if it should differ from the rest of the GPU.
    memory_dir: a directory in memory (a tmpfs) that holds the versions of adapters for vLLM's processes.
    """

    def __init__(
        self,
        model_id: str | PathLike[str],
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        template: "Template | type[Template] | str" = "Template",
        dtype: str | None = None,
        memory_budget_bytes: int | None = None,
        memory_dir: str | Path | None = None,
    ) -> None:
        if not has_vllm():
            raise missing("vllm", "vLLMSampler")
        from twinkle.sampler.vllm import VllmSampler
        from twinkle.sampler.vllm.vllm_sampler import MEMORY_DIR

        self.model_id = id_text(model_id)
        self.device_mesh = device_mesh
        self.set_template(template)
        self._options = VllmOptions.read(engine_args or {})
        told = dict(self._options.engine_args)
        budget = memory_budget_bytes
        if torch.cuda.is_available():
            budget = _rest_of_gpu(told) if budget is None else budget
            told.setdefault("tensor_parallel_size", torch.cuda.device_count())
        trainer = Trainer.from_pretrained(model_id, dtype=dtype, memory_budget_bytes=budget)
        self._memory_dir = MEMORY_DIR if memory_dir is None else Path(memory_dir)
        self.engine = VllmSampler(
            trainer,
            self.template.tokenizer,
            engine_args=told,
            memory_dir=self._memory_dir,
            adapters=self._options.adapters,
        )
        atexit.register(self.engine.close)
        self.weights_device = trainer.device
        self._can_sleep = bool(told.get("enable_sleep_mode"))
        self._versions = AdapterVersions(self.engine, TrainerAdapters(self.engine, trainer))
        self._receiver = VllmWeightReceiver(self.engine, self._versions, pretrained_id(self.model_id))

    @_at_once
    def set_template(self, template_cls: "Template | type[Template] | str", **options: Any) -> None:
        """Set the template. A class or a name is instantiated with these keywords.

        ``model_id`` defaults to the sampler's own model.
        """
        if isinstance(template_cls, str | type):
            options.setdefault("model_id", self.model_id)
        self.template: Template = build_template(template_cls, options)

    @_at_once
    def receive_weights(self, adapter_name: str, weights: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
        """Sample with these weights for ``adapter_name`` from now on, until this method is called again.

        weights and peft_config are the results of a model's ``get_state_dict`` and ``get_peft_config_dict``.
        """
        directory = Path(tempfile.mkdtemp(prefix="twinkle-received-", dir=self._memory_dir))
        try:
            (directory / CONFIG).write_text(json.dumps(dict(peft_config), default=sorted))  # PEFT has sets of names
            save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, directory / WEIGHTS)
            self._versions.receive(adapter_name, lambda version: self.engine.load_version(version, str(directory)))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @remote_function(dispatch=own_prompts, collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Inputs,
        sampling_params: Params = None,
        adapter_name: str | None = "",
        adapter_path: str | PathLike[str] | None = None,
        *,
        return_encoded: bool = False,
        use_base_model: bool = False,
    ) -> list[SampleResponse]:
        """Sample as :meth:`LocalSampler.sample` does, with an adapter that was received or that is in a directory.

        An adapter that vLLM does not apply as the model's copy does is an error. Without one, the adapter that
        ``sync_weights`` has sent is used, if it sent one by itself; otherwise the base model.

        use_base_model: use no adapter, even if one is named or was sent. return_encoded: accepted and ignored;
        responses always hold the encoded feature.
        """
        params = as_sampling_params(sampling_params)
        self._options.check(params)
        if isinstance(inputs, Sequence) and not inputs:  # a worker without inputs: fewer inputs than workers
            return []
        if self._receiver.merged and not use_base_model and (adapter_name or adapter_path is not None):
            raise UserError(MERGED)
        base_name = self._receiver.base_name
        named = self._versions.chosen(adapter_name, adapter_path, use_base_model=use_base_model, base_name=base_name)
        with named as chosen:
            return sample_in_one_call(self.engine, self.template, inputs, params, chosen, vision=self.engine.vision)

    # --- weight synchronisation: CheckpointEngineManager calls these, in this order -----------------------------------

    @_at_once
    def prepare_weights(self, offer: WeightsOffer) -> tuple[TensorMeta, ...]:
        """Return the tensors of ``offer`` that must be sent. Raise if they do not fit this sampler."""
        return self._receiver.prepare(offer)

    @_at_once
    def receive_bucket(self, bucket: Bucket) -> None:
        self._receiver.receive(bucket)

    @_at_once
    def finish_weights(self) -> str:
        """Sample with the weights that were sent, and return their name."""
        return self._receiver.finish()

    @_at_once
    def abandon_weights(self, why: str, *, finishing: bool = False) -> None:
        """End a synchronisation that failed: keep the old weights, or refuse to sample if they are not whole.

        finishing: whether it failed in :meth:`finish_weights`, here or on another worker.
        """
        self._receiver.abandon(why, finishing=finishing)

    @_at_once
    def get_state_keys(self) -> list[str]:
        """Return the names of the base model's weights that :meth:`prepare_weights` knows."""
        return self.engine.base.names

    # --- memory -------------------------------------------------------------------------------------------------------

    @_at_once
    def reset_prefix_cache(self) -> None:
        """Forget the cached beginnings of earlier prompts. Results do not depend on it."""
        self.engine.reset_prefix_cache()

    @_at_once
    def reset_mm_cache(self) -> None:
        """Drop the preprocessed images that vLLM keeps."""
        self.engine.reset_mm_cache()

    @_at_once
    def reset_encoder_cache(self) -> None:
        """Drop the outputs of vLLM's image encoder that it keeps."""
        self.engine.reset_encoder_cache()

    @_at_once
    def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of vLLM's cache and weights until :meth:`wake_up`; the copy of the model stays.

        level 1: the weights move to host memory. level 2: they are discarded, and after :meth:`wake_up` the sampler
        needs ``sync_weights``. Needs ``engine_args={"enable_sleep_mode": True}``; without it nothing happens.
        """
        if not isinstance(level, int) or isinstance(level, bool) or level not in (1, 2):
            raise InvalidInputError("level", level, "1 (the weights move to host memory) or 2 (they are discarded)")
        if self._sleeps("sleep"):
            self.engine.sleep(level)
            if level > 1:
                self._receiver.forget_base()

    @_at_once
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what :meth:`sleep` freed: "weights", "kv_cache", or both (None)."""
        from twinkle.sampler.vllm.vllm_sampler import WAKE_TAGS

        chosen = WAKE_TAGS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
        for tag in chosen:
            if tag not in WAKE_TAGS:
                raise InvalidInputError("tags", tag, f"{', '.join(map(repr, WAKE_TAGS))}, or None for both")
        if self._sleeps("wake_up"):
            self.engine.wake_up(chosen)

    def _sleeps(self, method: str) -> bool:
        if not self._can_sleep:
            get_logger().warning(
                f"vLLMSampler.{method} does nothing, because vLLM was started without its sleep mode: "
                'construct the sampler with engine_args={"enable_sleep_mode": True}'
            )
        return self._can_sleep

    @_at_once
    def shutdown(self) -> None:
        """End vLLM's processes. The sampler cannot be used afterwards."""
        atexit.unregister(self.engine.close)
        self.engine.close()


def _rest_of_gpu(engine_args: Mapping[str, Any]) -> int:
    """Return how many bytes vLLM leaves free on this process's GPU, less a reserve of 2 %."""
    share = engine_args.get("gpu_memory_utilization")
    if not isinstance(share, float) or not 0 < share < 1 - _RESERVE:
        allowed = f"a number between 0 and {1 - _RESERVE}, so that a copy of the model fits beside it"
        raise InvalidInputError("engine_args.gpu_memory_utilization", share, allowed)
    _, total = torch.cuda.mem_get_info()
    return int((1 - share - _RESERVE) * total)


def has_vllm() -> bool:
    """Return whether vLLM is installed.

    A folder named ``vllm`` on the path is found as a namespace package, too, but that has no file of origin.
    """
    found = find_spec("vllm")
    return found is not None and found.origin is not None
