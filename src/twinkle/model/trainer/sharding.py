"""A model cut into shards (FSDP2): every process holds a part of each weight, and gathers a layer while it runs it.

Adapters of a Trainer are not parameters of the model, so they are not sharded: every rank has the whole adapter.

Gathering a layer needs all processes that hold a part of it, so they must run the same layers in the same order,
forward and backward.

Shapes: V vocabulary, H hidden features.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from twinkle.model.decoder.head import ChunkedHead, HeadSpec
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.memory import parameter_bytes

T = TypeVar("T")


class ShardedHead(nn.Module):
    """Holds the weights of a head. They are gathered for the time of one call, which computes all rows."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.weight_VH = nn.Parameter(spec.weight_VH, requires_grad=False)
        self.bias_V = None if spec.bias_V is None else nn.Parameter(spec.bias_V, requires_grad=False)

    def forward(self, head: ChunkedHead, walk: Callable[[ChunkedHead], T]) -> T:
        spec = dataclasses.replace(head.spec, weight_VH=self.weight_VH, bias_V=self.bias_V)
        return walk(ChunkedHead(spec, head.chunk_rows, head.gradient))


def shard_engine(engine: Engine, model: PreTrainedModel, mesh: TorchMesh, reshard_after_forward: bool) -> int:
    """Cut the frozen model of an engine into shards, and move the shards to the device of the mesh.

    Returns the most bytes of gathered layers and head that are expected at the same time.
    """
    spec = engine.head.spec
    layers = [parameter_bytes(layer) for layer in engine.layers]
    held = 2 * max(layers) if reshard_after_forward else sum(layers)  # the next layer is gathered while one runs
    held += spec.weight_VH.numel() * spec.weight_VH.itemsize
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied:  # the head gets a copy: embedding and head are sharded separately, and frozen weights stay equal
        spec = dataclasses.replace(spec, weight_VH=spec.weight_VH.clone())
    head = ShardedHead(spec)
    parent, _, name = engine.architecture.head.name.rpartition(".")
    setattr(model.get_submodule(parent), name, head)  # replaces the layer that holds the whole weights
    nowhere = dataclasses.replace(spec, weight_VH=torch.empty(0, dtype=spec.weight_VH.dtype), bias_V=None)
    engine.head = ChunkedHead(nowhere, engine.head.chunk_rows)
    engine.architecture = dataclasses.replace(engine.architecture, head_spec=nowhere)
    del spec
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    for module in (*engine.layers, model.get_input_embeddings()):
        fully_shard(module, **options)
    for module in decoder_parts(model):
        fully_shard(module, mesh=mesh)
    fully_shard(head, mesh=mesh, reshard_after_forward=True)
    engine.sharded_head = head
    engine.layers[0].opens_gradient = True  # the backward pass must go through all layers, on all ranks
    return held


def decoder_parts(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the decoder and, if there is also a vision tower, what holds both: passes call the decoder alone."""
    decoder, whole_model = model.get_decoder(), model.base_model
    return (decoder, whole_model) if hasattr(whole_model, "language_model") else (whole_model,)


def shard_trained(
    root: nn.Module,
    layers: Iterable[nn.Module],
    mesh: TorchMesh,
    *,
    reshard_after_forward: bool,
    apart: set[nn.Parameter],
) -> None:
    """Cut a model that is trained into shards, except for the parameters in ``apart``.

    The gradient of a shard is the sum over ranks, not the mean.
    """
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=apart)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it adds


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is sharded.

    All ranks must call this for the same tensors in the same order.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor in the form of its parameter: same dtype and device and, if sharded, this rank's shard."""
    if not isinstance(parameter, DTensor):
        return tensor.to(parameter)
    moved = tensor.to(device=parameter.device, dtype=parameter.dtype)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with all sharded tensors gathered. All ranks must call this."""
    entries = state["state"].items()
    return {**state, "state": {key: {k: _whole_value(v) for k, v in entry.items()} for key, entry in entries}}


def sharded_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's part of a gathered state_dict, for an optimizer of the same parameters.

    This is the inverse of :func:`whole_state`.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(numbers) != len(parameters):
        return state  # load_state_dict raises an error that explains it
    owners = dict(zip(numbers, parameters, strict=True))
    entries = {
        number: {name: _like_value(value, owners[number]) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _whole_value(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) else value


def _like_value(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a moment, which has the shape of its parameter; counters stay as they are."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not isinstance(parameter, DTensor):
        return value
    return like(value, parameter)
