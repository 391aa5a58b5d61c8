"""The weights of a decoder by the names that its checkpoints use.

:func:`~twinkle.model.decoder.layers.install` and the fused norms rename parameters of the modules they replace. The
functions here undo that, so that weights can be read from, and written to, a model that an engine runs.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.model.decoder.layers import TenantLayer
from twinkle.model.decoder.lora.lora import LoraLinear
from twinkle.model.decoder.lora.split import SplitLoraLinear
from twinkle.model.decoder.norms import FusedRmsNorm

__all__ = ["named_weights", "put_weights"]

_OF_LINEAR = {"weight_OI": "weight", "bias_O": "bias"}
_OWN_NAMES = {LoraLinear: _OF_LINEAR, SplitLoraLinear: _OF_LINEAR, FusedRmsNorm: {"weight_H": "weight"}}


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in a checkpoint. Weights that are tied occur once, under the first name."""
    wrapped = [f"{name}.inner" for name, module in model.named_modules() if isinstance(module, TenantLayer)]
    unwrap = re.compile("|".join(rf"^{re.escape(name)}\." for name in wrapped) or r"(?!)")
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        own_names = _OWN_NAMES.get(type(module), {})
        for own_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = ".".join(filter(None, (module_name, own_names.get(own_name, own_name))))
            found[unwrap.sub(lambda match: match.group().removesuffix("inner."), full)] = parameter
    return found


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
