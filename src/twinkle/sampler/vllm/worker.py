"""What vLLM's worker processes do to replace the weights of the base model.

vLLM adds the class to its own worker class when it starts (``worker_extension_cls``), so that the engine can call the
methods in every worker. They drive vLLM's layer-wise reload, because a worker does not keep the weights as the
checkpoint has them: it fuses projections, on a CPU packs them for its kernels, and with tensor parallelism holds only
its own part. vLLM's own ``load_weights`` of the model does all that.

Weights are replaced layer by layer, in place, and nothing can take that back: after a failure the worker's weights are
a mixture, and :class:`~twinkle.sampler.vllm.vllm_sampler.VllmSampler` does not sample from it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# The import name under which vLLM loads the class.
IMPORT_NAME = f"{__name__}.BaseWeightsWorker"
# It warns of layers that got no weights: tied ones, and those that a checkpoint has none for. We know what was sent.
_reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class BaseWeightsWorker:
    """Methods that vLLM's worker class inherits; ``self`` is vLLM's worker."""

    vllm_config: Any
    device: torch.device
    model_runner: Any

    def twinkle_begin_weights(self) -> None:
        """Prepare for new weights. An earlier transfer that did not finish is given up."""
        with self._twinkle_checkpoint_form() as model:
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            initialize_layerwise_reload(model)

    def twinkle_load_weights(self, file: str) -> None:
        """Load a part of the weights, named as in the model's checkpoint, from a safetensors file.

        The file may be removed afterwards: until its layer is complete, a tensor keeps its own mapping of the file.
        """
        with self._twinkle_checkpoint_form() as model:
            load: Any = model.load_weights  # models of vLLM have it
            load(iter(load_file(file).items()))

    def twinkle_finish_weights(self) -> None:
        """Process what is left. Call it after the last weight."""
        with self._twinkle_checkpoint_form() as model:
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _process_tied(model)
        reset_lora = getattr(self.model_runner, "reset_lora_state", None)  # newer versions of vLLM have it
        if reset_lora is not None:
            reset_lora()

    @contextmanager
    def _twinkle_checkpoint_form(self) -> Iterator[nn.Module]:
        """Yield the model with its plain layers, whose names are those of the checkpoint, without the LoRA around."""
        model: nn.Module = self.model_runner.get_model()
        wrapped = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if isinstance(layer, BaseLayerWithLoRA)
        ]
        with torch.no_grad(), torch.device(self.device), set_current_vllm_config(self.vllm_config):
            for parent, name, layer in wrapped:
                setattr(parent, name, layer.base_layer)
            before = _reload_logger.level
            _reload_logger.setLevel(logging.ERROR)
            try:
                yield model
            finally:
                _reload_logger.setLevel(before)
                for parent, name, layer in wrapped:
                    setattr(parent, name, layer)


def _process_tied(model: nn.Module) -> None:
    """Prepare the weights of layers that share a parameter with another layer, such as a head with the embeddings.

    A checkpoint has a shared weight once, so vLLM's reload sees a new weight for one of the layers only. On a CPU, each
    of them has its own packed copy.
    """
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
