"""The arguments of vLLM's engine: those that the configuration may set (``engine_args``), and those that we set.

Names are those of vLLM's own ``AsyncEngineArgs``; values pass through unchanged. The operator has to divide the memory,
because trainer and engine are in separate processes that do not see each other's use. On a GPU, the model's
``memory_budget_gib`` limits the trainer and ``gpu_memory_utilization`` limits the engine. On CPU,
``kv_cache_memory_bytes`` is the size of the engine's cache (default 1 GiB); its copy of the weights comes on top. Where
vLLM's own defaults depend on the use, they are those for throughput (``max_num_seqs``, ``max_num_batched_tokens``).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.sampler.validation import MAX_WIDTH
from twinkle.sampler.vllm import server_watch, worker

_CPU_CACHE_BYTES = 2**30
_SPARE_BYTES = 2**30  # GPU memory that the drivers of two processes take
# max_loras: versions that may share a batch. max_cpu_loras: versions kept in host memory; others are read from files.
_DEFAULTS: dict[str, object] = {"max_loras": 8, "max_cpu_loras": 64, "max_lora_rank": 32}
# The worker classes. Naming them here must not import them: vLLM's worker for CPUs changes torch.
_CPU_WORKER = "twinkle.sampler.vllm.cpu_worker.DrawingCpuWorker"
_GPU_WORKER = "twinkle.sampler.vllm.gpu_worker.DrawingGpuWorker"
_NO_IMAGES = "the model's folder has no image processor, or the model's images cannot be placed"
# Arguments that the configuration cannot set, and why.
_TAKEN = {
    "model": "it is the sampler's model_id",
    "model_weights": "it is the sampler's model_id",
    "tokenizer": "the engine reads and returns token ids only",
    "skip_tokenizer_init": "the engine reads and returns token ids only",
    "dtype": "it is the trainer's, so that both compute the same",
    "enable_lora": "it is always on, because the sampler serves adapter versions",
    "lora_dtype": "it is the trainer's, so that both compute the same",
    "enable_tower_connector_lora": "adapters do not change the vision tower",
    "lora_target_modules": "an adapter is applied whole or not at all",
    "logprobs_mode": "log-probabilities are of the tempered distribution over the whole vocabulary, by our own drawing",
    "logits_processors": "the sampler draws tokens by itself",
    "max_logprobs": "it follows from the sampler's own limits",
    "speculative_config": "it does not work with the sampler's own drawing",
    "generation_config": "each request has its own sampling parameters",
    "override_generation_config": "each request has its own sampling parameters",
    "runner": "the engine only generates",
    "convert": "the engine only generates",
    "disable_log_stats": "the server has its own statistics",
    "additional_config": "the server uses it to pass its process id to vLLM's processes",
    "enable_return_routed_experts": "only the torch sampler returns routes to experts, to requests that ask for them",
    "worker_cls": "the sampler uses it to draw tokens",
    "worker_extension_cls": "the sampler uses it to replace weights",
}


def check_engine_args(given: Mapping[str, object]) -> None:
    """Raise InvalidInputError for a name that vLLM does not have or that the configuration may not set.

    Some names may repeat the values that we set.
    """
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(_DEFAULTS)
            allowed = f"names of vLLM's engine arguments, such as {', '.join(near)}"
            raise InvalidInputError(f"engine_args.{name}", value, allowed)
        if name in _TAKEN and not _is_ours(name, value):
            raise InvalidInputError(f"engine_args.{name}", value, f"nothing: {_TAKEN[name]}")


def make_engine_args(
    given: Mapping[str, object],
    folder: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapters: bool = True,
    tower: bool = False,
    images: bool = False,
) -> AsyncEngineArgs:
    """Return the arguments of an engine for the model in ``folder`` that computes like the trainer on ``device``.

    adapters: whether the engine can apply adapters, which costs memory. tower: whether the model has a vision tower.
    images: whether prompts may have images.
    """
    check_engine_args(given)
    media = _media(given, images=images) if tower else _no_media(given)
    if given.get("enable_sleep_mode") and device.type == "cpu":
        raise UnsupportedError("engine_args.enable_sleep_mode: vLLM has no sleep mode on a CPU, allowed: False")
    defaults = dict(_DEFAULTS) if adapters else {}
    if device.type == "cpu":
        # On a CPU, compiling takes longer than it saves.
        defaults |= {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enforce_eager": True}
    elif not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & given.keys():
        allowed = "a fraction of the GPU that the trainer (memory_budget_gib of the model) leaves free"
        raise InvalidInputError("engine_args.gpu_memory_utilization", None, allowed)
    return AsyncEngineArgs(**{**defaults, **given, **_ours(folder, dtype), **media, "enable_lora": adapters})


def memory_beside(given: Mapping[str, object]) -> int:
    """Return how many bytes an engine with these arguments leaves free on its GPU, less 1 GiB for drivers.

    Nothing else may use the GPU. InvalidInputError without a ``gpu_memory_utilization`` between 0 and 1.
    """
    share = given.get("gpu_memory_utilization")
    if not isinstance(share, int | float) or not 0 < share < 1:
        allowed = (
            "a fraction of the sampler's GPU, less than 1; what is left holds a copy of the model that scores prompts"
        )
        raise InvalidInputError("engine_args.gpu_memory_utilization", share, allowed)
    return int(torch.cuda.mem_get_info()[1] * (1 - share)) - _SPARE_BYTES


def _ours(folder: str, dtype: torch.dtype) -> dict[str, object]:
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    if dtype not in names:
        raise UnsupportedError(f"the vLLM sampler has no {dtype}")
    return {
        "model": folder,
        "dtype": names[dtype],
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_WIDTH,
        "generation_config": "vllm",  # vLLM's defaults, not those of the model's folder
        "disable_log_stats": True,
        "additional_config": {**server_watch.server_config(), **_linear_attention()},
        "worker_cls": _CPU_WORKER if current_platform.is_cpu() else _GPU_WORKER,
        "worker_extension_cls": worker.IMPORT_NAME,
    }


def _linear_attention() -> dict[str, str]:
    """Return the choice of a kernel for linear attention: vLLM takes FlashInfer's on Hopper GPUs, installed or not."""
    return {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}


def _media(given: Mapping[str, object], *, images: bool) -> dict[str, object]:
    """Return the arguments of an engine for a model with a vision tower.

    vLLM needs the tokenizer to make an image processor. What a prompt cannot have costs no memory.
    """
    limits = given.get("limit_mm_per_prompt") or {}
    if not isinstance(limits, Mapping):
        raise InvalidInputError("engine_args.limit_mm_per_prompt", limits, 'a mapping such as {"image": 4}')
    for name, limit in limits.items():
        if limit != 0 and (name != "image" or not images):
            allowed = "0: the sampler reads no video and no audio" if name != "image" else f"0: {_NO_IMAGES}"
            raise InvalidInputError(f"engine_args.limit_mm_per_prompt.{name}", limit, allowed)
    none = {"video": 0} if images else {"video": 0, "image": 0}
    return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {**limits, **none}}


def _no_media(given: Mapping[str, object]) -> dict[str, object]:
    for name in ("limit_mm_per_prompt", "mm_processor_kwargs"):
        if given.get(name):
            raise InvalidInputError(f"engine_args.{name}", given[name], "nothing: the model reads text only")
    return {}


def _is_ours(name: str, value: object) -> bool:
    """Return whether the value is the one that we set anyway: repeating it is not an error."""
    ours = {"enable_lora": True, "logprobs_mode": "processed_logprobs", "enable_tower_connector_lora": False}
    return name in ours and ours[name] == value
