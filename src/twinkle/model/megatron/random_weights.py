"""Weights of ``random://`` models, drawn one module at a time, the same as transformers draws for the whole model.

Every process draws all weights and keeps its cut of them, so the numbers do not depend on the mesh. transformers draws
in this order, which is repeated here: the modules of a model within the model (the vision tower, the decoder) as
torch's constructors draw them, then again as the family initializes them; then the same for what is outside, such as
the head. A module's weights are freed before the next module's are drawn.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from twinkle.model.decoder.linear_attention.layer import is_delta_net
from twinkle.model.types import text_name

__all__ = ["draw_weights", "meta_model"]


def meta_model(config: PreTrainedConfig, dtype: torch.dtype, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a model without memory for its weights (on torch's meta device)."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
    return model


def draw_weights(
    model: PreTrainedModel, seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a random model by their names in a model for text alone. A tied head is not among them.

    Nothing else may draw random numbers between two of them. ``model``: without memory for its weights.
    """
    tied = model.config.get_text_config().tie_word_embeddings
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device), _default_dtype(dtype):
        torch.manual_seed(seed)
        for family, modules in _models(model, ""):
            heads = {net.conv1d: net.num_v_heads for net in _delta_nets(modules.values())}
            for module in modules.values():
                if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv3d):
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()
                    module.to("meta")
                if module in heads:  # the constructor of a delta net draws decays behind its convolution
                    torch.empty(heads[module]).uniform_(0.01, 16)
            for name, module in modules.items():
                if next(module.parameters(recurse=False), None) is None:
                    continue
                module.to_empty(device=device, recurse=False)
                family._init_weights(module)
                for own_name, parameter in module.named_parameters(recurse=False):
                    if not (tied and module is model.get_output_embeddings()):
                        yield text_name(f"{name}.{own_name}"), parameter.detach()
                module.to("meta")


def _models(model: PreTrainedModel, name: str) -> Iterator[tuple[PreTrainedModel, dict[str, nn.Module]]]:
    """Yield the models inside a model, then the model itself, each with the modules by name that no other one has.

    Children come before their parents, as initialization goes through them.
    """
    own: dict[str, nn.Module] = {}

    def go_through(parent: nn.Module, prefix: str) -> Iterator[tuple[PreTrainedModel, dict[str, nn.Module]]]:
        for child_name, child in parent.named_children():
            path = f"{prefix}.{child_name}" if prefix else child_name
            if isinstance(child, PreTrainedModel):
                yield from _models(child, path)
            else:
                yield from go_through(child, path)
        own[prefix] = parent

    yield from go_through(model, name)
    yield model, own


def _delta_nets(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if is_delta_net(module)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
