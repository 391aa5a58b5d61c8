"""The weights of a decoder by the names that Transformers gives them.

:func:`~twinkle.model.decoder.layers.install` and the fused norms rename parameters of the modules they replace. The
functions here undo that, so that weights can be read from, and written to, a model that an engine runs. The files of a
checkpoint may have other names and forms: :func:`as_in_files`.
"""

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, revert_weight_conversion

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.model.decoder.fused.norms import CenteredRmsNorm, FusedRmsNorm, GatedRmsNorm
from twinkle.model.decoder.layers import TenantLayer
from twinkle.model.decoder.lora.lora import LoraLinear
from twinkle.model.decoder.lora.split import SplitLoraLinear

__all__ = ["as_in_files", "named_constants", "named_weights", "put_weights"]

_OF_LINEAR = {"weight_OI": "weight", "bias_O": "bias"}
_OF_NORM = {"weight_H": "weight"}
_OWN_NAMES: dict[type[nn.Module], dict[str, str]] = {
    LoraLinear: _OF_LINEAR,
    SplitLoraLinear: _OF_LINEAR,
    FusedRmsNorm: _OF_NORM,
    CenteredRmsNorm: _OF_NORM,
    GatedRmsNorm: _OF_NORM,
}


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by Transformers' names. Weights that are tied occur once, under the first name."""
    unwrap = _unwrap(model)
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        own_names = _OWN_NAMES.get(type(module), {})
        for own_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            found[unwrap(".".join(filter(None, (module_name, own_names.get(own_name, own_name)))))] = parameter
    return found


def named_constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that checkpoints have beside the weights, and that no step changes: persistent buffers."""
    unwrap = _unwrap(model)
    return {
        unwrap(".".join(filter(None, (module_name, own_name)))): buffer
        for module_name, module in model.named_modules()
        for own_name, buffer in module.named_buffers(recurse=False)
        if own_name not in module._non_persistent_buffers_set
    }


def _unwrap(model: nn.Module) -> Callable[[str], str]:
    """Return what turns a name in the model into the name without our layers around those of Transformers."""
    wrapped = [f"{name}.inner" for name, module in model.named_modules() if isinstance(module, TenantLayer)]
    pattern = re.compile("|".join(rf"^{re.escape(name)}\." for name in wrapped) or r"(?!)")
    return lambda name: pattern.sub(lambda match: match.group().removesuffix("inner."), name)


@torch.no_grad()
def put_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy weights into the model's parameters, in place, and return the names of those that were copied.

    The model may be used only after all of its weights were copied: an error leaves a part of them replaced.
    """
    own = named_weights(model)
    done: set[str] = set()
    for name, tensor in weights:
        if name not in own:
            raise UnknownNameError("weight", name, sorted(own))
        if own[name].shape != tensor.shape:
            raise InvalidInputError(name, f"a weight of shape {tuple(tensor.shape)}", f"{tuple(own[name].shape)}")
        own[name].copy_(tensor)
        done.add(name)
    return done


def as_in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names and shapes that they have in the files that a model was published in.

    Transformers joins some weights when it loads a model: most checkpoints have each expert by itself. Programs that
    read the files without Transformers, such as vLLM, know only the weights of the files. Where Transformers reads a
    weight in both orders of its dimensions, as those of Qwen3-VL's experts, it does not turn it back; vLLM reads one.
    """
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    turned = _turned_when_loaded(model)
    return {
        name: next((tensor.transpose(*dims) for pattern, dims in turned if pattern.search(name)), tensor)
        for name, tensor in converted.items()
    }


def _turned_when_loaded(model: PreTrainedModel) -> list[tuple[re.Pattern[str], tuple[int, int]]]:
    """Return patterns of names, and the two dimensions of these weights that Transformers swaps if a file needs it."""
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    return [
        (re.compile(pattern), (operation.dim0, operation.dim1))
        for conversion in conversions
        for operation in getattr(conversion, "operations", None) or ()
        if isinstance(operation, Transpose) and getattr(operation, "check_dims", False)
        for pattern in conversion.source_patterns
    ]
