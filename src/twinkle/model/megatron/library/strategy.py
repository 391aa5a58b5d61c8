"""How a Megatron model is spread over processes, and what its constructor was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, ClassVar

import torch
from transformers import AutoConfig

from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.decoder.precision import read_dtype
from twinkle.model.library.parallel_options import choose_precision
from twinkle.model.megatron.config import DecoderShape, check_sizes, read_shape
from twinkle.model.megatron.library.options import check_ddp_config, check_recompute, check_transformer_options
from twinkle.model.megatron.mesh import MegatronMesh, join_mesh
from twinkle.model.megatron.sizes import MeshSizes, read_sizes
from twinkle.model.parallel import own_device
from twinkle.model.types import MAX_LOGITS
from twinkle.utils.logger import note_once

__all__ = ["MegatronStrategy", "ModelOptions"]


@dataclass(frozen=True)
class MegatronStrategy:
    """A mesh for models of Megatron: which ranks hold which cut, and which have the same rows.

    Ranks are numbered along tp first, then dp, then pp. ``order`` is Megatron's name for this.
    """

    device_mesh: DeviceMesh | None = None
    mixed_precision: str | None = None
    use_distributed_optimizer: bool = True

    order: ClassVar[str] = "tp-cp-ep-dp-pp"
    calculate_per_token_loss: ClassVar[bool] = True  # losses are sums over tokens, divided once a step
    variable_seq_lengths: ClassVar[bool] = True

    @property
    def sizes(self) -> MeshSizes:
        """Return the sizes of the mesh; raise for what no Megatron model here can do."""
        return MeshSizes() if self.device_mesh is None else read_sizes(self.device_mesh)

    @property
    def sequence_parallel(self) -> bool:
        return self.device_mesh is not None and self.device_mesh.sequence_parallel and self.sizes.tp > 1

    def for_shape(self, shape: DecoderShape) -> "MegatronStrategy":
        """Return the strategy for a model: one with experts is sequence parallel wherever it is tensor parallel.

        Raise for sizes that do not divide the model.
        """
        check_sizes(shape, self.sizes)
        mesh = self.device_mesh
        if mesh is None or mesh.sequence_parallel or shape.experts is None or self.sizes.tp == 1:
            return self
        note_once("sequence_parallel: switched on, because the model has experts and is tensor parallel")
        return replace(self, device_mesh=replace(mesh, sequence_parallel=True))


@dataclass(frozen=True)
class ModelOptions:
    """The arguments of a Megatron model's constructor, which both models have."""

    model_id: str | PathLike[str]
    config: object
    ddp_config: Mapping[str, Any] | None
    strategy: MegatronStrategy
    load_weights: bool
    tokenizer_id: str | PathLike[str] | None = None
    device: str | torch.device | None = None
    seed: int | None = None
    memory_budget_bytes: int | None = None
    max_tokens_per_batch: int | None = None
    max_logits: int = MAX_LOGITS
    recompute: tuple[str | None, str | None, int | None, list[str] | None] = ("full", "uniform", 1, None)
    transformer: Mapping[str, Any] = field(default_factory=dict)  # fields of megatron-core's TransformerConfig

    def check(self) -> None:
        """Raise for options that no Megatron model here has."""
        if self.model_id is None:
            raise InvalidInputError("model_id", None, "the id of a model or a local directory")
        if self.config is not None:
            raise UnsupportedError("config: a Megatron model is loaded as its own configuration says")
        if self.load_weights is not True:
            raise UnsupportedError(
                f"load_weights: got {self.load_weights!r}, allowed: True; a folder of random weights has an id too"
            )
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise InvalidInputError("seed", self.seed, "an integer or None")
        if not isinstance(self.strategy.use_distributed_optimizer, bool):
            raise InvalidInputError(
                "use_distributed_optimizer", self.strategy.use_distributed_optimizer, "True or False"
            )
        check_ddp_config(self.ddp_config)
        check_recompute(*self.recompute)

    def checked_strategy(self) -> MegatronStrategy:
        """Check the options before processes wait for each other, and return the strategy for this model."""
        self.check()
        device, dtype = self._device_and_dtype()
        if device.type not in ("cpu", "cuda"):
            raise InvalidInputError("device", str(device), "cpu or cuda")
        shape = read_shape(AutoConfig.from_pretrained(hub.resolve(self.model_id).path))
        strategy = self.strategy.for_shape(shape)
        mesh = MegatronMesh(sizes=strategy.sizes, sequence_parallel=strategy.sequence_parallel)
        check_transformer_options(self.transformer, shape, mesh, dtype)
        return strategy

    def place(self, strategy: MegatronStrategy) -> tuple[MegatronMesh, torch.dtype, torch.device]:
        """Join the other processes, and return where this one's stage is and what it computes with."""
        device, dtype = self._device_and_dtype()
        return join_mesh(strategy.device_mesh, device), dtype, device

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        device = own_device(self.device, self.strategy.device_mesh)
        return device, read_dtype(choose_precision(self.strategy.mixed_precision, device), device)
