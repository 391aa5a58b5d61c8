"""Loads a Hugging Face model for plain training: its own class and weights, with no layer replaced."""

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.decoder.experts.mxfp4 import is_mxfp4, load_mxfp4
from twinkle.model.decoder.loading import AUTO_CLASSES, auto_class, counted_weights
from twinkle.utils.progress import Progress
from twinkle.utils.unsafe import trust_remote_code


def load_for_training(
    model_id: str | PathLike[str] | None,
    model_cls: object,
    config: PreTrainedConfig | None,
    device: torch.device,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    """Load a model, with weights in fp32 unless ``options`` name another dtype.

    Without a model id, or if the id's folder has a random seed instead of weights, the weights are random. ``options``
    are further arguments of ``from_pretrained``.
    """
    options = dict(options)
    if "torch_dtype" in options:  # the older name, which transformers ignores beside "dtype"
        options["dtype"] = options.pop("torch_dtype")
    given = {"dtype": torch.float32, **options}
    if model_id is None:
        if config is None:
            raise InvalidInputError("model_id", None, "the id of a model or a local directory; or a config")
        model = _blank(model_class(model_cls, config), config, given)
        return model.to(device)
    local = hub.resolve(model_id)
    trust = {"trust_remote_code": options.get("trust_remote_code", trust_remote_code())}
    if config is None:
        config = AutoConfig.from_pretrained(local.path, **trust)
    chosen = model_class(model_cls, config)
    with Progress(f"loading {local.model_id}") as progress:
        if is_mxfp4(config) and set(options) <= {"dtype", "trust_remote_code"}:  # mxfp4 layers cannot be trained
            return load_mxfp4(chosen, config, local.path, _dtype(given["dtype"], config), device, progress)
        if local.random_seed is None:
            with counted_weights(progress):
                model = chosen.from_pretrained(local.path, config=config, **{**trust, **given})
            return model.to(device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(local.random_seed)
        return _blank(chosen, config, given)


def _dtype(given: object, config: PreTrainedConfig) -> torch.dtype:
    """Return a dtype that is given as ``from_pretrained`` takes it: by name, or "auto" for that of the config."""
    found = config.get_text_config().dtype or torch.bfloat16 if given == "auto" else given
    found = getattr(torch, found.removeprefix("torch."), None) if isinstance(found, str) else found
    if not isinstance(found, torch.dtype):
        raise InvalidInputError("dtype", given, 'a dtype of torch, its name, or "auto"')
    return found


def _blank(model_cls: Any, config: PreTrainedConfig, options: Mapping[str, Any]) -> PreTrainedModel:
    unused = sorted(set(options) - {"dtype", "trust_remote_code"})
    if unused:
        raise UnsupportedError(f"{', '.join(unused)}: there is nothing to load; only dtype applies")
    options = {"dtype": options["dtype"]}
    if model_cls in AUTO_CLASSES:
        model: PreTrainedModel = model_cls.from_config(config, **options)
        return model
    return model_cls._from_config(config, **options)


def model_class(model_cls: object, config: PreTrainedConfig) -> Any:
    """Return the model class, given as a class or by name.

    Without one it is the class that the config names, or else one of AUTO_CLASSES.
    """
    name = model_cls
    if name is None:
        architectures: list[str] = list(config.architectures or ())
        if not architectures:
            return auto_class(config)
        name = architectures[0]
    if isinstance(name, str):
        found = vars(transformers).get(name) or getattr(transformers, name, None)  # transformers loads names on demand
        if found is None and model_cls is None:  # a class defined in the model's repository
            return auto_class(config)
        name = found
    if not inspect.isclass(name):
        raise InvalidInputError("model_cls", model_cls, "a model class, or the name of one in transformers")
    return name
