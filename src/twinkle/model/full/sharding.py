"""A model whose weights are all trained, cut into shards (FSDP2): every process holds a part of each fp32 weight.

A layer is gathered while it runs, in the compute dtype; its gradient is added up over the processes in fp32, and each
keeps that of its part. The output head is no part of autograd's graph, so its gradient is added up here. Where head and
input embedding are tied, each has its own shards, which are made equal after every change of the weights.

Shapes: V vocabulary, H hidden features, C rows of a chunk.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.decoder.head import ChunkedHead
from twinkle.model.decoder.products import add_outer_products
from twinkle.model.full.layout import ParameterLayout
from twinkle.model.full.weights import TrainedWeights, local
from twinkle.model.parallel import Parallelism, Ranks
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.sharding import ShardedHead, decoder_parts


class ShardedWeights(TrainedWeights):
    """Weights of a sharded model. All tensors are this rank's parts."""

    def __init__(
        self,
        layout: ParameterLayout,
        model: PreTrainedModel,
        head_name: str,
        head: ShardedHead,
        parallel: Parallelism,
    ) -> None:
        own = {
            name: parameter for name, parameter in named_weights(model).items() if name.rpartition(".")[0] != head_name
        }
        weight, aliases = f"{head_name}.weight", dict(layout.aliases)
        self._head_copy: tuple[Tensor, Tensor] | None = None  # of a tied head: its part, and that of the embedding
        if weight in aliases:
            self._head_copy = local(head.weight_VH.data), local(own[aliases[weight]].data)
        else:
            own[weight] = head.weight_VH
        if head.bias_V is not None:
            own[f"{head_name}.bias"] = head.bias_V
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        super().__init__(layout, layout.names, [own[name] for name in layout.names], {}, parallel)

    @torch.no_grad()
    def refresh(self) -> None:
        super().refresh()
        if self._head_copy is not None:
            self._head_copy[0].copy_(self._head_copy[1])
        for module in self._modules:
            module.reshard()  # after a pass without gradients, torch may keep gathered weights, which are old now


def shard_model(
    engine: Engine, model: PreTrainedModel, mesh: TorchMesh, *, dtype: torch.dtype, reshard_after_forward: bool
) -> ShardedHead:
    """Cut the fp32 model of an engine into shards on the mesh's device, and return the module with the head's weights.

    Layers are gathered in the compute ``dtype``.
    """
    spec = engine.head.spec
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        spec = dataclasses.replace(spec, weight_VH=spec.weight_VH.clone())
    head = ShardedHead(spec)
    parent, _, name = engine.architecture.head.name.rpartition(".")
    setattr(model.get_submodule(parent), name, head)  # replaces the layer that holds the whole weights
    nowhere = dataclasses.replace(spec, weight_VH=torch.empty(0, dtype=dtype), bias_V=None)
    engine.head = ChunkedHead(nowhere, engine.head.chunk_rows)
    engine.architecture = dataclasses.replace(engine.architecture, head_spec=nowhere)
    del spec
    model.base_model.requires_grad_(True)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for module in (*engine.layers, model.get_input_embeddings()):
        fully_shard(module, **options, reshard_after_forward=reshard_after_forward)
    for module in (*decoder_parts(model), head):
        fully_shard(module, **options, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it adds
    engine.sharded_head = head
    return head


class ShardedGradient:
    """The gradient of the request that is being computed, with the methods of ``RequestGradient``.

    torch adds up the parts of all layers in the parameters' ``grad``; the whole gradient of the head is added up here.
    """

    def __init__(self, weights: ShardedWeights, head: ShardedHead, head_name: str, shards: Ranks) -> None:
        self._weights = weights
        self._shards = shards
        self._shapes = [each.shape for each in (head.weight_VH, head.bias_V) if each is not None]
        aliases = dict(weights.layout.aliases)
        names = [f"{head_name}.weight", f"{head_name}.bias"][: len(self._shapes)]
        self._numbers = [weights.layout.names.index(aliases.get(name, name)) for name in names]
        self._device = local(head.weight_VH).device
        self._head: list[Tensor] | None = None  # weight and bias, whole

    def add(self, dlogits_CV: Tensor, hidden_CH: Tensor) -> None:
        """Add the gradient of the head's weights, as its chunks compute it."""
        weight_VH, *bias = self._whole_head()
        add_outer_products(weight_VH, dlogits_CV, hidden_CH)
        for each in bias:
            each.add_(dlogits_CV.sum(0, dtype=torch.float32))

    def _whole_head(self) -> list[Tensor]:
        if self._head is None:
            self._head = [torch.zeros(shape, device=self._device) for shape in self._shapes]
        return self._head

    @torch.no_grad()
    def finish(self) -> None:
        """Add up the head's gradient over the shards, and let each keep its part. All ranks call this."""
        for number, gradient in zip(self._numbers, self._whole_head(), strict=True):
            self._shards.add_up(gradient)
            self._own(number).add_(self._weights.part(number, gradient))
        self._head = None

    def finite(self) -> bool:
        return bool(torch.stack([each.sum() for each in self._all()]).isfinite().all())

    def take(self) -> list[Tensor]:
        gradient = self._all()
        self.drop()
        return gradient

    def drop(self) -> None:
        self._head = None
        for parameter in self._weights.parameters:
            parameter.grad = None

    def _all(self) -> list[Tensor]:
        return [self._own(number) for number in range(len(self._weights.parameters))]

    def _own(self, number: int) -> Tensor:
        """Return this rank's part of a parameter's gradient; it starts from zero."""
        parameter = self._weights.parameters[number]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.data)
        return local(parameter.grad)
