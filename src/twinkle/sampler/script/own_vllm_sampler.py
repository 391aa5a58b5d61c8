"""vLLM as a script's own sampler: the server's vLLM engine, used in one call.

Adapter weights come by ``receive_weights`` or from directories. Every change makes a new version, so that vLLM's prefix
cache never mixes prompts computed with different weights. Prompt scores are computed by a second copy of the base
model; vLLM is also compared with that copy when it starts and whenever it gets a version.
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
from twinkle.errors import InvalidInputError
from twinkle.extras import missing
from twinkle.hub.model_id import id_text
from twinkle.infra import DeviceMesh, remote_class, remote_function
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS
from twinkle.model.library.components import build_template
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler.script.features import as_sampling_params
from twinkle.sampler.script.in_one_call import (
    AdapterVersions,
    Inputs,
    Params,
    TrainerAdapters,
    own_prompts,
    sample_in_one_call,
)

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["vLLMSampler"]

_at_once = remote_function(dispatch="all", collect="first", lazy_collect=False)
_RESERVE = 0.02  # share of a GPU's memory that neither vLLM nor the copy of the model accounts for


@remote_class()
class vLLMSampler:  # noqa: N801 - the name that scripts use
    """A sampler that generates with a base model and with adapters for it, using vLLM.

    engine_args: vLLM's own arguments by name; see :mod:`twinkle.sampler.vllm.engine_args`. On a GPU,
    ``gpu_memory_utilization`` is required: it is the share that vLLM takes, and the copy of the model gets the rest.
    With ``memory_budget_bytes``, ``kv_cache_memory_bytes`` may be given instead.
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
        told = dict(engine_args or {})
        budget = memory_budget_bytes
        if torch.cuda.is_available():
            budget = _rest_of_gpu(told) if budget is None else budget
            told.setdefault("tensor_parallel_size", torch.cuda.device_count())
        trainer = Trainer.from_pretrained(model_id, dtype=dtype, memory_budget_bytes=budget)
        self._memory_dir = MEMORY_DIR if memory_dir is None else Path(memory_dir)
        self.engine = VllmSampler(trainer, self.template.tokenizer, engine_args=told, memory_dir=self._memory_dir)
        atexit.register(self.engine.close)
        self._versions = AdapterVersions(self.engine, TrainerAdapters(self.engine, trainer))

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
            (directory / CONFIG).write_text(json.dumps(dict(peft_config)))
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

        An adapter that vLLM does not apply as the model's copy does is an error.

        use_base_model: use no adapter, even if one is named. return_encoded: accepted and ignored; responses always
        hold the encoded feature.
        """
        params = as_sampling_params(sampling_params)
        if isinstance(inputs, Sequence) and not inputs:  # a worker without inputs: fewer inputs than workers
            return []
        with self._versions.chosen(adapter_name, adapter_path, use_base_model=use_base_model) as chosen:
            return sample_in_one_call(self.engine, self.template, inputs, params, chosen)

    @_at_once
    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Results do not depend on it, because each version has a cache of its own."""
        self.engine.reset_prefix_cache()

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
