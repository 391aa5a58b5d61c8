"""The base model of a script's sampler: its own copy of the weights, or the tensors of a model that is trained.

A sampler that is made for a model has modules of its own, because training and sampling change a model in different
ways (PEFT, FSDP). Their parameters are the model's own tensors where both have the same dtype, are on the same device,
and the model is not cut into shards. Otherwise they are copies.
"""

import copy
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.decoder.head import HeadSpec
from twinkle.model.weights.buckets import TensorMeta
from twinkle.model.weights.offer import LiveWeights

__all__ = ["BaseWeights", "empty_clone"]

_PEFT_PARTS = re.compile(r"\.(base_layer|original_module)(?=\.|$)")


class BaseWeights:
    """The parameters of a sampler's base model, by the names of its checkpoint.

    Each is either shared with a model that is trained, or the sampler's own.
    """

    def __init__(self, model: PreTrainedModel, head: HeadSpec, shared: Iterable[str] = ()) -> None:
        """head: the head that samples are computed with, which holds the model's weights apart from its modules."""
        self._model = model
        self._head = head
        self._parameters = named_weights(model)
        self._shapes = {name: each.shape for name, each in self._parameters.items()}
        self._shared = set(shared)
        self._addresses = self._present_addresses()
        self._device = next(iter(self._parameters.values())).device

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    @property
    def shared(self) -> frozenset[str]:
        return frozenset(self._shared)

    @property
    def own_bytes(self) -> int:
        """Return the bytes that the sampler's own weights take on its device now."""
        own = [each for name, each in self._parameters.items() if name not in self._shared]
        return sum(each.nbytes for each in own if each.device == self._device)

    def check(self, offered: Iterable[TensorMeta]) -> None:
        """Raise unless the offered weights are those of this model."""
        shapes = {tensor.name: tensor.shape for tensor in offered}
        for name, shape in shapes.items():
            if name not in self._parameters:
                raise UnknownNameError("weight of the sampler's model", name, self.names)
            if shape != tuple(self._parameters[name].shape):
                allowed = f"{tuple(self._parameters[name].shape)}, as the sampler's"
                raise InvalidInputError(name, f"a weight of shape {shape}", allowed)
        missing = [name for name in self._parameters if name not in shapes]
        if missing:
            raise InvalidInputError("weights", f"none named {missing[0]!r}", "all weights of the sampler's model")

    def can_share(self, name: str, tensor: Tensor | None) -> bool:
        own = self._parameters[name]
        return tensor is not None and (tensor.dtype, tensor.device) == (own.dtype, own.device)

    def share(self, name: str, tensor: Tensor) -> None:
        """Compute with this tensor from now on. The sampler's own copy, if there is one, is freed."""
        self._parameters[name].data = tensor
        self._shared.add(name)

    @torch.no_grad()
    def write(self, piece: TensorMeta, numbers: Tensor) -> None:
        """Copy a piece into the sampler's own weights; one that was shared is replaced by a copy of its own first."""
        own = self._parameters[piece.name]
        if piece.name in self._shared:
            own.data = torch.empty(own.shape, dtype=own.dtype, device=own.device)
            self._shared.discard(piece.name)
        own.data.view(-1)[piece.start : piece.stop].copy_(numbers)

    def settle(self) -> bool:
        """Let the head use the present weights. Return whether any weight has moved since the last call."""
        head = self._model.get_output_embeddings()
        self._head.weight_VH.data = head.weight.data
        if self._head.bias_V is not None:
            self._head.bias_V.data = head.bias.data
        before, self._addresses = self._addresses, self._present_addresses()
        return before != self._addresses

    def to_host(self) -> None:
        """Move the sampler's own weights to host memory until :meth:`to_device`."""
        self._replace(lambda own: own.cpu())

    def to_device(self) -> None:
        self._replace(lambda own: own.to(self._device))
        for name, parameter in self._parameters.items():
            if parameter.shape != self._shapes[name]:  # its numbers were discarded
                parameter.data = parameter.data.new_zeros(self._shapes[name])
        self.settle()

    def discard(self) -> None:
        """Free the sampler's own weights. :meth:`to_device` takes memory for them again, filled with zeros."""
        self._replace(lambda own: own.new_empty(0))

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if name not in self._shared:
                parameter.data = change(parameter.data)
        self.settle()

    def _present_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters.values()]


def empty_clone(live: LiveWeights, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, set[str]]:
    """Return a model like ``live``'s, without adapters and shards, and the names of the weights that both share.

    Weights that cannot be shared are zero.
    """
    module = live.module
    # "cuda" is not equal to "cuda:0", the device that a tensor on it has.
    device = torch.empty(0, device=device).device
    config = copy.deepcopy(module.config)
    with torch.device("meta"):
        clone = type(module)._from_config(config, dtype=dtype)
    clone.tie_weights()
    originals = {_PEFT_PARTS.sub("", name): each for name, each in module.named_modules() if ".lora_" not in name}
    made: dict[int, nn.Parameter] = {}
    shared: set[str] = set()
    for module_name, each in clone.named_modules():
        for own_name, parameter in list(each.named_parameters(recurse=False, remove_duplicate=False)):
            full_name = f"{module_name}.{own_name}" if module_name else own_name
            if id(parameter) not in made:  # a tied weight is made once, under its first name
                tensor = live.tensors.get(full_name)
                if tensor is not None and (tensor.dtype, tensor.device) == (dtype, device):
                    shared.add(full_name)
                else:
                    tensor = torch.zeros(parameter.shape, dtype=dtype, device=device)
                made[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            each.register_parameter(own_name, made[id(parameter)])
        _copy_other_tensors(originals[module_name], each, device)
    clone.generation_config = copy.deepcopy(module.generation_config)
    return clone.eval(), shared


def _copy_other_tensors(original: nn.Module, clone: nn.Module, device: torch.device) -> None:
    """Copy buffers, and tensors that are plain attributes, such as the frequencies of rotary embeddings."""
    for name, buffer in original.named_buffers(recurse=False):
        if name in clone._buffers:
            clone._buffers[name] = buffer.detach().to(device, copy=True)
    for name, value in vars(clone).items():
        if isinstance(value, Tensor) and value.is_meta:
            setattr(clone, name, vars(original)[name].detach().to(device, copy=True))
