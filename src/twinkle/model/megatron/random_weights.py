"""Weights of ``random://`` models, drawn one module at a time, the same as transformers draws for the whole model.

Every process draws all weights and keeps its cut of them, so the numbers do not depend on the mesh. transformers draws
in this order, which is repeated here: the decoder's modules as torch's constructors draw them, then again as the family
initializes them; then the same for the head. A module's weights are freed before the next module's are drawn.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

__all__ = ["draw_weights", "meta_model"]


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without memory for its weights (on torch's meta device)."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def draw_weights(
    config: PreTrainedConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a random model by their names in transformers' model. A tied head is not among them.

    Nothing else may draw random numbers between two of them.
    """
    model = meta_model(config, dtype)
    inside = set(model.get_decoder().modules())
    modules = [(name, module) for name, module in model.named_modules() if _has_parameters(module)]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        for is_decoder in (True, False):
            group = [(name, module) for name, module in modules if (module in inside) is is_decoder]
            for _, module in group:
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()
                    module.to("meta")
            for name, module in group:
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)
                for own_name, parameter in module.named_parameters(recurse=False):
                    if is_decoder or not config.tie_word_embeddings:
                        yield f"{name}.{own_name}", parameter.detach()
                module.to("meta")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
