"""A language model with a value head: one number for each token instead of logits.

A checkpoint of a value model is a Hugging Face folder like any other, except that the weight of its head has one row.
That row tells such a folder from one of a language model.

Shapes: V vocabulary, H hidden features.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.decoder.loading import AUTO_CLASSES
from twinkle.model.transformers.loading import load_for_training, model_class
from twinkle.utils.unsafe import trust_remote_code


def load_value_model(
    model_id: str | PathLike[str] | None,
    model_cls: object,
    config: PreTrainedConfig | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    """Load a value model from its own checkpoint, or a language model whose head is replaced by a new value head.

    The arguments are those of :func:`load_for_training`.
    """
    if model_id is None:
        return _with_new_head(load_for_training(model_id, model_cls, config, device, options))
    local = hub.resolve(model_id)
    if config is None:
        trust = options.get("trust_remote_code", trust_remote_code())
        config = AutoConfig.from_pretrained(local.path, trust_remote_code=trust)
    chosen = model_class(model_cls, config)
    if local.random_seed is None and _has_value_head(local.path, chosen, config):
        return load_for_training(model_id, _with_value_head(chosen, config), config, device, options)
    return _with_new_head(load_for_training(model_id, model_cls, config, device, options))


def _with_new_head(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the head by Linear(H, 1) with weight and bias 0: at first every value is 0."""
    old = _linear_head(model)
    head = nn.Linear(old.in_features, 1, bias=True, device=old.weight.device, dtype=old.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    # The config is saved with a checkpoint. With tied weights, loading it would overwrite the head.
    for each in (model.config, model.config.get_text_config()):
        each.tie_word_embeddings = False
    if _linear_head(model) is not head:
        raise UnsupportedError(f"{type(model).__name__}: its output embedding cannot be replaced by a value head")
    return model


def _linear_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InvalidInputError("model_cls", type(model).__name__, "a model whose output embedding is a linear layer")
    return head


def _with_value_head(chosen: Any, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return a subclass of a model class that is constructed with a value head, to load a value model's weights into.

    It has the name of its base class, which is the name that a checkpoint records.
    """
    base: Any = chosen._model_mapping[type(config)] if chosen in AUTO_CLASSES else chosen

    def construct(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        _with_new_head(self)

    made: type[PreTrainedModel] = type(base.__name__, (base,), {"__init__": construct, "__module__": base.__module__})
    return made


def _has_value_head(folder: Path, chosen: Any, config: PreTrainedConfig) -> bool:
    """Return whether the head in a folder has one output. Only headers of the weights are read."""
    with torch.device("meta"):
        from_config = chosen.from_config if chosen in AUTO_CLASSES else chosen._from_config
        skeleton = from_config(config)
    head = skeleton.get_output_embeddings()
    name = next((f"{name}.weight" for name, module in skeleton.named_modules() if module is head), "")
    file = _file_with(folder, name)
    if file is None:
        return False
    with safe_open(file, "pt") as reader:
        return name in reader.keys() and reader.get_slice(name).get_shape()[0] == 1  # noqa: SIM118  # not a dict


def _file_with(folder: Path, tensor: str) -> Path | None:
    """Return the safetensors file of a folder that may hold a tensor."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        name = json.loads(index.read_text())["weight_map"].get(tensor)
        return None if name is None else folder / name
    whole = folder / SAFE_WEIGHTS_NAME
    return whole if whole.exists() else None
