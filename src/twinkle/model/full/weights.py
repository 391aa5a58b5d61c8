"""All weights of a model that is trained: fp32 master weights, the copy that the model computes with, and the base.

In fp32 the master weights are the model's own parameters. In bf16 the model computes with a rounded copy, which
:meth:`TrainedWeights.refresh` brings up to date. In a sharded model the parameters are fp32 and sharded, and torch
rounds each layer when it gathers it, so that there is no second copy either.

The weights of the base model are kept in host memory, so that a run that ends can be replaced by a fresh one without
reading files, which may have changed or gone meanwhile. They take 2 bytes per parameter where bf16 holds them exactly,
else 4.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle.model.adapters.optimizer import norm_in_fp64
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.full.layout import ParameterLayout
from twinkle.model.parallel import Parallelism, add_up_all
from twinkle.model.types import FloatArray


def split_masters(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the model's parameters to ``dtype``, and return fp32 master weights by name; empty if dtype is fp32.

    Called before an engine replaces the model's layers.
    """
    masters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if dtype != torch.float32:
            masters[name] = parameter.data.float()
        parameter.data = parameter.data.to(dtype)
    return masters


def read_layout(model: PreTrainedModel) -> ParameterLayout:
    """Return the parameters of a model whose layers an engine may have replaced, but not sharded yet."""
    own = named_weights(model)
    first_names = {id(parameter): name for name, parameter in own.items()}
    aliases = []
    head, head_name = model.get_output_embeddings(), "lm_head"
    for name, module in model.named_modules():
        if module is head:
            head_name = name
    for kind, parameter in head.named_parameters(recurse=False):
        name = f"{head_name}.{kind}"
        if first_names[id(parameter)] != name:
            aliases.append((name, first_names[id(parameter)]))
    used = {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    return ParameterLayout(
        tuple(own),
        tuple(tuple(parameter.shape) for parameter in own.values()),
        tuple(sorted(aliases)),
        frozenset(name for name, parameter in own.items() if id(parameter) not in used),
    )


class TrainedWeights:
    """The weights of one model. Lists have a tensor for each of ``names``, the parameters that this rank holds.

    These are all parameters of ``layout``, in its order. Tensors of a sharded model are this rank's parts.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        masters: Mapping[str, Tensor],
        parallel: Parallelism,
    ) -> None:
        """Take over the weights of a model.

        parameters: what the model computes with. masters: separate master weights by name; empty: the parameters
        themselves are the master weights. parallel: the first of its ranks gets whole tensors.
        """
        self.layout = layout
        self.names = tuple(names)
        self._parallel = parallel
        self.parameters = list(parameters)
        self._separate = bool(masters)
        own = [masters[name] for name in self.names] if masters else [local(each.data) for each in parameters]
        self.masters: list[Tensor] = own
        self._base: list[Tensor] = [_compact_copy(master) for master in own]
        self.changed = False  # whether they differ from the base

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what the model computes with up to date with the master weights."""
        self.changed = True
        if self._separate:
            torch._foreach_copy_([each.data for each in self.parameters], self.masters)

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Replace the master weights by whole tensors, one for each of ``names``."""
        for index, tensor in enumerate(tensors):
            self.masters[index].copy_(self.part(index, tensor))
        self.refresh()

    def reset(self) -> None:
        """Put the weights of the base model back."""
        if not self.changed:
            return
        torch._foreach_copy_(self.masters, self._base)
        self.refresh()
        self.changed = False

    def part(self, index: int, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that has the shape of a parameter."""
        parameter = self.parameters[index]
        if not isinstance(parameter, DTensor):
            return tensor
        rank, count = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
        size = -(-len(tensor) // count)  # FSDP2 cuts the first dimension into equal parts, of which the last are short
        return tensor[rank * size : (rank + 1) * size]

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank has a part. All ranks call this in the same order."""
        parameter = self.parameters[index]
        if not isinstance(parameter, DTensor):
            return tensor
        gathered = DTensor.from_local(
            tensor,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return gathered.full_tensor()

    def wholes(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the whole of each tensor, in the order of the layout. All ranks must iterate to the end."""
        for index, tensor in enumerate(tensors):
            yield self.whole(index, tensor)

    def compute_wholes(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the whole of what the model computes with, which has this dtype, as :meth:`wholes` does."""
        for index, master in enumerate(self.masters):
            yield self.whole(index, master.to(dtype))

    def gathered(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield tensors, one for each parameter, whole on the first rank; others take part, and yield nothing."""
        for whole in self.wholes(tensors):
            if self._parallel.ranks.number == 0:
                yield whole.detach()

    def row(self, tensors: Sequence[Tensor]) -> FloatArray:
        """Return tensors as one row; an empty one on all ranks but the first."""
        if self._parallel.ranks.number == 0:
            return self.layout.row(self.gathered(tensors))
        for _ in self.gathered(tensors):
            pass
        return np.empty(0, np.float32)

    def arrays(self, tensors: Sequence[Tensor]) -> dict[str, FloatArray]:
        """Return copies of tensors by the parameters' names; nothing on all ranks but the first."""
        pairs = zip(self.layout.names, self.gathered(tensors), strict=False)
        return {name: tensor.cpu().numpy().copy() for name, tensor in pairs}

    def on_host(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of tensors in host memory; nothing on all ranks but the first."""
        host = torch.device("cpu")
        return [each.to(host, dtype, copy=True).contiguous() for each in self.gathered(tensors)]

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def held_whole(self) -> bool:
        """Return whether this rank has all weights of the model as a whole."""
        return not self._parallel.sharded

    @property
    def adds_up(self) -> bool:
        """Return whether a gradient is the sum of what several ranks have computed of it."""
        return self._parallel.replicas.size > 1

    def counted_once(self, gradient: list[Tensor]) -> list[Tensor] | None:
        """Return what this rank keeps of a gradient that several ranks have, before each of them adds to its own.

        One of them keeps it, or it would count several times.
        """
        return gradient if self._parallel.replicas.number == 0 else None

    def add_up(self, gradient: list[Tensor]) -> None:
        """Add up the parts of a gradient that ranks have computed, in place. All ranks call this."""
        add_up_all(self._parallel.replicas, gradient)

    def norm(self, gradient: list[Tensor], norm_type: float) -> float:
        """Return the norm of a gradient whose parts were added up. All ranks call this, and get the same number."""
        own, shards = tensors_norm(gradient, norm_type), self._parallel.shards
        return own if shards.size == 1 else joint_norm(shards.gather(own), norm_type)

    @property
    def base_bytes(self) -> int:
        """Return the bytes of host memory that the base model's weights take."""
        return sum(each.nbytes for each in self._base)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_norm(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Return the norm of all numbers of some tensors."""
    on_cpu = tensors[0].device.type == "cpu"
    norms = (
        [norm_in_fp64(each, norm_type) for each in tensors] if on_cpu else torch._foreach_norm(list(tensors), norm_type)
    )
    return float(torch.linalg.vector_norm(torch.stack(tuple(norms)).double(), norm_type))


def joint_norm(norms: Sequence[float], norm_type: float) -> float:
    """Return the norm of all numbers of several groups, from the norm of each."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _compact_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, as bf16 if that loses nothing."""
    rounded = tensor.to(torch.bfloat16)
    exact = torch.equal(rounded.to(tensor.dtype), tensor)
    return (rounded if exact else tensor).cpu() if tensor.is_cuda or exact else tensor.clone()
