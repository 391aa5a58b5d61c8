"""From a model id to a frozen Hugging Face decoder on a device, checked against its own forward pass when it is new to us."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle import hub
from twinkle.model.architecture import needs_padding
from twinkle.model.attention import PACKED, register


def load_model(local: hub.LocalModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Frozen, in eval mode, with packed attention wherever the architecture allows it."""
    register()
    config = AutoConfig.from_pretrained(local.path)
    attention = "sdpa" if needs_padding(config) else PACKED
    if local.random_seed is None:
        model = AutoModelForCausalLM.from_pretrained(local.path, dtype=dtype, attn_implementation=attention).to(device)
    else:
        model = _random_model(config, local.random_seed, dtype, device, attention)
    return model.requires_grad_(False).eval()


def adopt_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that was built elsewhere ready for a Trainer."""
    register()
    model.set_attn_implementation("sdpa" if needs_padding(model.config) else PACKED)
    return model.requires_grad_(False).eval()


def _random_model(
    config: AutoConfig, seed: int, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """Weights drawn on the device: an 8B model takes seconds there."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
