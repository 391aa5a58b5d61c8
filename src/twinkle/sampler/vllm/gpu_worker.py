"""vLLM's worker for GPUs, with our drawing. vLLM loads the class by its name (``worker_cls``, see engine_args)."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from twinkle.sampler.vllm import samplers, server_watch


class DrawingGpuWorker(Worker):  # type: ignore[misc]  # without vLLM it is Any
    """A worker that ends with the server and draws tokens as the torch sampler does."""

    def init_device(self) -> None:
        server_watch.end_with_server(self.vllm_config.additional_config)
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.vllm_config.model_config.hf_config.model_type == "gpt_oss":
            _rename_experts_of_gpt_oss()
        super().load_model(load_dummy_weights=load_dummy_weights)
        samplers.install(self)


def _rename_experts_of_gpt_oss() -> None:
    """Let vLLM load gpt-oss in bf16.

    In vLLM 0.24 experts have their weights in a module ``routed_experts``. It looks for them there in mxfp4, but in
    bf16 it looks where they were before, and ends with a KeyError. Names that are right already stay as they are.
    """
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.models.gpt_oss import GptOssModel

    load = getattr(GptOssModel, "_load_weights_other", None)
    rename = getattr(weight_utils, "remap_moe_expert_weights", None)
    if load is None or rename is None or hasattr(load, "renames"):
        return  # another version of vLLM, or a second model in this process

    def load_renamed(
        model: Any,
        ep_rank_end: int,
        ep_rank_start: int,
        heads_per_rank: int,
        head_start: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        stacked_params_mapping: list[tuple[str, ...]],
    ) -> set[str]:
        renamed = rename(weights, dict(model.named_parameters()))
        loaded: set[str] = load(
            model, ep_rank_end, ep_rank_start, heads_per_rank, head_start, renamed, stacked_params_mapping
        )
        return loaded

    load_renamed.renames = True  # type: ignore[attr-defined]
    GptOssModel._load_weights_other = load_renamed
