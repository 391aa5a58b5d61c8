"""From a model id to a frozen Hugging Face decoder on a device, with packed attention where possible."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from twinkle import hub
from twinkle.errors import UnsupportedError
from twinkle.images.processing import PROCESSOR, VISION_FAMILIES
from twinkle.model.decoder.architecture import (
    TESTED_FAMILIES,
    mixes_by_attention_alone,
    read_architecture,
    state_is_known,
)
from twinkle.model.decoder.attention import PACKED, Packing, register
from twinkle.model.decoder.experts import forward as experts
from twinkle.model.decoder.experts.mxfp4 import is_mxfp4, load_mxfp4
from twinkle.utils.progress import Progress

AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)


def load_model(
    local: hub.LocalModel, dtype: torch.dtype, device: torch.device, *, images: bool = False
) -> PreTrainedModel:
    """Load a model. With ``images``, one whose images we place has its vision tower, if its folder can prepare images.

    Otherwise a model has a tower only if Transformers has no class for its text alone.
    """
    with Progress(f"loading {local.model_id}", detail=lambda: f"weights as {dtype}, to {device}") as progress:
        config = AutoConfig.from_pretrained(local.path)
        chosen = auto_class(config, images=images and (local.path / PROCESSOR).is_file())
        if is_mxfp4(config):
            model = load_mxfp4(chosen, config, local.path, dtype, device, progress)
        elif local.random_seed is None:
            with counted_weights(progress):
                model = chosen.from_pretrained(local.path, dtype=dtype)
            model = model.to(device)
        else:
            model = _random_model(chosen, config, local.random_seed, dtype, device)
    return adopt_model(model)


@contextmanager
def counted_weights(progress: Progress) -> Iterator[None]:
    """Let Transformers say how many weights it has loaded, where it would draw a progress bar."""

    def bar(make: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        if not arguments:
            return make(**options)
        items, *others = arguments
        total = len(items) if hasattr(items, "__len__") else None
        unit = "weights" if "weights" in str(options.get("desc")) else "steps"
        return make(progress.count(items, unit, total), *others, **{"total": total, **options})

    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:  # an older release
        yield
        return
    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def auto_class(config: PreTrainedConfig, *, images: bool = False) -> Any:
    """Return the class that loads a model: the one for text, or where there is none, the one with a vision tower.

    With ``images`` it is the one with a tower for families whose images we place.
    """
    if images and config.model_type in VISION_FAMILIES:
        return AutoModelForImageTextToText
    alone, with_tower = (type(config) in auto._model_mapping for auto in AUTO_CLASSES)
    return AutoModelForImageTextToText if with_tower and not alone else AutoModelForCausalLM


def adopt_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that was built elsewhere ready for a Trainer: frozen, in eval mode, packed where possible.

    A model that cannot run packed keeps its own attention and runs padded.
    """
    register()
    model.requires_grad_(False).eval()
    architecture = read_architecture(model)  # raises for models that are not supported, before anything runs
    if architecture.experts:
        experts.register()
        model.config._experts_implementation = experts.TENANTS  # Transformers 5.5 has a setter for its own names only
    own = model.config.get_text_config()._attn_implementation
    if state_is_known(model):
        set_attention(model, PACKED)
    elif mixes_by_attention_alone(model):
        set_attention(model, PACKED)
        if model.config.model_type not in TESTED_FAMILIES and not _bounds_arrive(model):
            set_attention(model, own)
    return model


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the decoder; a vision tower keeps its own."""
    text = model.config.get_text_config()
    parts = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def _bounds_arrive(model: PreTrainedModel) -> bool:
    """Return whether the model passes the arguments of its forward on to attention, and makes no mask of its own."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model.get_decoder()(input_ids=token, use_cache=False, packing=Packing.from_lengths((1,), model.device))
    except (TypeError, UnsupportedError):  # TypeError: its forward does not accept the argument
        return False
    return True


def _random_model(
    chosen: Any, config: PreTrainedConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Make a model with random weights. They are drawn on the device, where an 8B model takes seconds."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = chosen.from_config(config, dtype=dtype)
    return model
