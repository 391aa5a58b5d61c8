"""One pipeline stage of a decoder, with this process's cut of its weights.

Shapes: T tokens, N rows that a rank has between layers (T; with sequence parallel its part of them), V vocabulary, H
hidden features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from twinkle import hub
from twinkle.images.processing import PROCESSOR
from twinkle.model.decoder.architecture import Architecture, read_architecture
from twinkle.model.decoder.attention import PACKED, register
from twinkle.model.decoder.layers import LayerBatch, TenantLayer
from twinkle.model.decoder.loading import auto_class
from twinkle.model.megatron.config import (
    DecoderShape,
    StageSpec,
    check_sizes,
    read_rope,
    read_shape,
    stage_config,
    text_config,
)
from twinkle.model.megatron.layers import CenteredFinalNorm, DecoderLayer, FinalNorm, rotary_tables
from twinkle.model.megatron.mcore import GPTModel, ModuleSpec, TransformerBlockSubmodules, TransformerConfig
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.random_weights import draw_weights, meta_model
from twinkle.model.megatron.regions import gather_rows, leave_cut
from twinkle.model.megatron.weights import (
    CheckpointFiles,
    Piece,
    layer_pieces,
    load_pieces,
    put_weights,
    vocabulary_piece,
)
from twinkle.utils.progress import Progress

__all__ = ["Stage", "build_stage", "empty_stage", "read_weights"]


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of a decoder whose base weights are frozen.

    ``architecture`` is that of the whole model, as one process has it; its weights are on torch's meta device.
    ``layers`` are the stage's own decoder layers; the ``index`` of each is its number in the whole model. ``config`` is
    megatron-core's, for its schedules; ``hf_config`` is the decoder's own. Embedding and head have this rank's rows of
    the vocabulary, with padding; they are None on stages that have none, and one parameter where they are tied and on
    the same stage.
    """

    model: Any  # megatron-core's GPTModel
    mesh: MegatronMesh
    architecture: Architecture
    config: TransformerConfig
    hf_config: PreTrainedConfig
    shape: DecoderShape
    layers: tuple[TenantLayer, ...]
    device: torch.device
    dtype: torch.dtype
    embedding_weight_VH: nn.Parameter | None
    head_weight_VH: nn.Parameter | None
    _frequencies_F: Tensor
    _rope_scaling: float

    @property
    def is_first(self) -> bool:
        return self.mesh.is_first

    @property
    def is_last(self) -> bool:
        return self.mesh.is_last

    def hidden_states(self, ids_or_hidden: Tensor, position_ids: Tensor, layer_batch: LayerBatch) -> Tensor:
        """Run the stage's layers on a packed batch.

        ids_or_hidden: token ids (1, T) on the first stage, on others what the stage before has returned. position_ids:
        (1, T), on every stage. The result is (T, H) on the last stage, after the final norm, the same on all its ranks;
        its gradient must be the whole one, the same on all ranks. On other stages it is (N, 1, H), for the next stage.
        """
        positions_T = position_ids[0]
        rotary = rotary_tables(self._frequencies_F, self._rope_scaling, positions_T, self.dtype)
        x_NH = self._embed(ids_or_hidden[0]) if self.is_first else ids_or_hidden[:, 0]
        for layer in self.layers:
            x_NH = layer(x_NH, batch=layer_batch, rotary=rotary)
        if not self.is_last:
            return x_NH.unsqueeze(1)
        x_NH = self.model.decoder.final_layernorm(x_NH)
        return gather_rows(x_NH, self.mesh.tp, len(positions_T)) if self.mesh.sequence_parallel else x_NH

    def _embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens. A rank has those of its part of the vocabulary; the others are 0 there."""
        weight_VH, tp = self.embedding_weight_VH, self.mesh.tp
        assert weight_VH is not None, "only the first stage has the embedding"
        if tp.size == 1:
            return F.embedding(ids_T, weight_VH)
        own_T = ids_T - tp.number * len(weight_VH)
        absent_T = (own_T < 0) | (own_T >= len(weight_VH))
        x_TH = F.embedding(own_T.masked_fill(absent_T, 0), weight_VH).masked_fill(absent_T[:, None], 0)
        return leave_cut(x_TH, tp, by_rows=self.mesh.sequence_parallel)

    def pieces(self, *, fused_experts: bool = False) -> Iterator[Piece]:
        """Yield this process's pieces of the model's weights.

        ``fused_experts``: with the names of a checkpoint that has the experts of a layer as one tensor.
        """
        tp, vocabulary = self.mesh.tp, self.shape.vocabulary
        embedding = "model.embed_tokens.weight"
        if self.embedding_weight_VH is not None:
            yield vocabulary_piece(embedding, self.embedding_weight_VH, vocabulary, tp)
        for layer in self.layers:
            assert isinstance(layer.inner, DecoderLayer)
            prefix = f"{self.architecture.layers_path}.{layer.index}"
            yield from layer_pieces(layer.inner, prefix, tp, fused_experts=fused_experts)
        if self.is_last:
            yield Piece("model.norm.weight", self.model.decoder.final_layernorm.weight_H)
        if self.head_weight_VH is not None and self.head_weight_VH is not self.embedding_weight_VH:
            name = embedding if self.shape.tied else "lm_head.weight"
            yield vocabulary_piece(name, self.head_weight_VH, vocabulary, tp)


def build_stage(
    local: hub.LocalModel, mesh: MegatronMesh, dtype: torch.dtype, device: torch.device, *, images: bool = True
) -> Stage:
    """Build this process's stage of a model, and read its cut of the weights. ``images``: see :func:`read_weights`."""
    stage = empty_stage(AutoConfig.from_pretrained(local.path), mesh, dtype, device)
    what = Progress(f"loading {local.model_id}", detail=lambda: f"a cut of its weights as {dtype}, to {device}")
    with what as progress:
        read_weights(stage, local, progress, images=images)
    return stage


def read_weights(stage: Stage, local: hub.LocalModel, progress: Progress, *, images: bool) -> None:
    """Read this process's cut of the model's weights from its files; for a ``random://`` model, draw it.

    ``images``: as for :func:`twinkle.model.decoder.loading.load_model`. With a vision tower, which is not kept, the
    decoder of a ``random://`` model has other numbers.
    """
    if local.random_seed is None:
        files = CheckpointFiles(local.path)
        pieces = list(stage.pieces(fused_experts=files.fused_experts))
        load_pieces(progress.count(pieces, "weights", len(pieces)), files)
    else:
        config = AutoConfig.from_pretrained(local.path)
        chosen = auto_class(config, images=images and (local.path / PROCESSOR).is_file())
        model = meta_model(config, stage.dtype, chosen)
        drawn = draw_weights(model, local.random_seed, stage.dtype, stage.device)
        put_weights(stage.pieces(fused_experts=True), progress.count(drawn, "weights"))


def empty_stage(hf_config: PreTrainedConfig, mesh: MegatronMesh, dtype: torch.dtype, device: torch.device) -> Stage:
    """Build this process's stage of a model with uninitialized weights; raise for a mesh that cannot hold it."""
    shape = read_shape(hf_config)
    check_sizes(shape, mesh.sizes)
    hf_config = text_config(hf_config)
    frequencies_F, rope_scaling = read_rope(hf_config)
    spec = StageSpec(shape, mesh, dtype, device)
    config = stage_config(spec)
    per_stage = shape.layers // mesh.pp.size
    own = range(mesh.pp.number * per_stage, (mesh.pp.number + 1) * per_stage)
    slots = [ModuleSpec(module=DecoderLayer, params={"spec": spec, "index": index}) for index in own]
    with torch.device(device):
        model = GPTModel(
            config,
            TransformerBlockSubmodules(slots, CenteredFinalNorm if shape.centered_norms else FinalNorm),
            vocab_size=shape.padded_vocabulary(mesh.tp.size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=mesh.is_first,
            post_process=mesh.is_last,
            position_embedding_type="none",  # our layers get their rotary tables as an argument
            share_embeddings_and_output_weights=shape.tied and mesh.pp.size == 1,
            pg_collection=mesh.process_groups(),
        )
    model.requires_grad_(False).eval()
    _forget_groups(model)
    layers = tuple(TenantLayer(layer, index) for layer, index in zip(model.decoder.layers, own, strict=True))
    model.decoder.layers = nn.ModuleList(layers)
    if mesh.is_first and mesh.pp.size > 1:
        layers[0].opens_gradient = True  # later stages send gradients back, also where this one has no adapters
    embedding_VH = model.embedding.word_embeddings.weight if mesh.is_first else None
    head_VH = model.output_layer.weight if mesh.is_last else None
    if mesh.is_last and head_VH is None:  # megatron-core leaves it out where it is the embedding
        head_VH = embedding_VH
    return Stage(
        model=model,
        mesh=mesh,
        architecture=_architecture(hf_config, dtype),
        config=config,
        hf_config=hf_config,
        shape=shape,
        layers=layers,
        device=device,
        dtype=dtype,
        embedding_weight_VH=embedding_VH,
        head_weight_VH=head_VH,
        _frequencies_F=frequencies_F.to(device),
        _rope_scaling=rope_scaling,
    )


def _forget_groups(model: nn.Module) -> None:
    """Drop the process groups that megatron-core's modules have stored. They are containers of weights here.

    A group ends only when nothing refers to it (:func:`twinkle.model.parallel.in_step`).
    """
    for module in model.modules():
        for name in ("pg_collection", "tp_group", "pp_group", "cp_group", "embd_group"):
            if hasattr(module, name):
                setattr(module, name, None)


def _architecture(config: PreTrainedConfig, dtype: torch.dtype) -> Architecture:
    """Return the architecture of the whole model, read from a model without memory for its weights."""
    register()
    model = meta_model(config, dtype)
    model.set_attn_implementation(PACKED)
    # On Megatron, adapters are on attention alone.
    return read_architecture(model)
