"""Trains all parameters of a model on a mesh of processes: loads the stages, and makes a FullTrainer of them."""

from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from twinkle import hub
from twinkle.hub.resolution import loadable_name
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.decoder.layers import install
from twinkle.model.full.assembly import TrainedModel, model_files
from twinkle.model.full.gradients import HeadWeightGradient
from twinkle.model.full.memory import StateBytes, divide_memory, random_part, require_state
from twinkle.model.full.trainer import FullTrainer
from twinkle.model.full.weights import read_layout
from twinkle.model.megatron.engine import make_engine
from twinkle.model.megatron.full_weights import CutGradient, CutWeights, OwnWeight, own_weights
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.random_weights import meta_model
from twinkle.model.megatron.stage import Stage, empty_stage, read_weights
from twinkle.model.megatron.trainer import join, make_head, measure_cost, parallelism
from twinkle.model.parallel import together
from twinkle.model.trainer.memory import available_bytes, parameter_bytes
from twinkle.model.trainer.preparation import read_end_tokens
from twinkle.utils.progress import Progress

__all__ = ["load_full_trainer", "load_stage", "make_full_trainer"]


def load_full_trainer(
    model_id: str | PathLike[str],
    *,
    device_mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    base_name: str | None = None,
    memory_budget_bytes: int | None = None,
    max_tokens_per_batch: int | None = None,
    share_optimizer: bool = False,
) -> FullTrainer:
    """Load a model by its id onto the processes of a mesh; all of them call this. Each trains its cut of the weights.

    share_optimizer: divide master weights and optimizer state among the data ranks, which otherwise have the same. The
    other arguments are those of :meth:`FullTrainer.from_pretrained`. ``memory_budget_bytes`` is that of each process,
    ``max_tokens_per_batch`` that of one micro-batch.
    """
    place = join(device_mesh, device, dtype, max_tokens_per_batch)
    return make_full_trainer(
        load_stage(hub.resolve(model_id), *place),
        model_id,
        base_name=base_name,
        memory_budget_bytes=memory_budget_bytes,
        max_tokens_per_batch=max_tokens_per_batch,
        share_optimizer=share_optimizer,
    )


def make_full_trainer(
    stage: Stage,
    model_id: str | PathLike[str],
    *,
    base_name: str | None = None,
    tokenizer_id: str | PathLike[str] | None = None,
    memory_budget_bytes: int | None = None,
    max_tokens_per_batch: int | None = None,
    share_optimizer: bool = False,
) -> FullTrainer:
    """Make a trainer of a stage that :func:`load_stage` has loaded. The arguments are those of the trainer.

    tokenizer_id: the model whose tokenizer is copied into checkpoints; None: this model's.
    """
    local = hub.resolve(model_id)
    model = meta_model(stage.hf_config, stage.dtype)
    if (local.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(local.path)
    with Progress(f"preparing {model_id}") as progress:
        progress.doing("measuring the memory of a training step")
        assembled = assemble_stage(
            stage,
            model,
            base_name=base_name or loadable_name(model_id),
            tokenizer_id=tokenizer_id or model_id,
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            share_optimizer=share_optimizer,
        )
    return FullTrainer.from_assembled(assembled, model_id=model_id)


def load_stage(
    local: hub.LocalModel, mesh: MegatronMesh, dtype: torch.dtype, device: torch.device, *, images: bool = False
) -> Stage:
    """Build this process's stage of a model, and read its cut of the weights. ``images``: as for ``read_weights``.

    Its parameters are fp32, with the precision of the model's files. The weights of ``random://`` models have the
    compute ``dtype``, so that they are those of a sampler on the same model id.
    """
    stage = empty_stage(AutoConfig.from_pretrained(local.path), mesh, dtype, device)
    if local.random_seed is None:
        for parameter in stage.model.parameters():
            parameter.data = torch.empty_like(parameter.data, dtype=torch.float32)
    with Progress(f"loading {local.model_id}", detail=lambda: f"a cut of its weights, to {device}") as progress:
        read_weights(stage, local, progress, images=images)
    return stage


def assemble_stage(
    stage: Stage,
    model: PreTrainedModel,
    *,
    base_name: str,
    tokenizer_id: str | PathLike[str] | None,
    memory_budget_bytes: int | None,
    max_tokens_per_batch: int | None,
    share_optimizer: bool,
) -> TrainedModel:
    """Put together what a trainer runs on this process's stage. ``model``: the whole model, without memory.

    All ranks get the same plan of tokens: that of the rank with the least memory.
    """
    mesh, device = stage.mesh, stage.device
    if stage.architecture.has_linear_attention:  # our layers have their weights in another order than Transformers'
        install(model, stage.architecture)
    layout, parallel = read_layout(model), parallelism(mesh)
    own = own_weights(stage, layout, shared=share_optimizer)
    held, count = parameter_bytes(stage.model), sum(each.parameter.numel() for each in own)
    weight_bytes = count * stage.dtype.itemsize
    trained = sum(each.share(each.view).numel() for each in own)
    state = StateBytes.for_parameters(
        trained, separate_master=stage.dtype != torch.float32, base=held if device.type == "cpu" else 0
    )
    # Until it is added up, a gradient is that of the whole cut.
    state = replace(state, gradient=StateBytes.for_parameters(count, separate_master=False, base=0).gradient)
    free = available_bytes(device, mesh.world.size) + held - weight_bytes
    if memory_budget_bytes is not None:
        free = min(free, memory_budget_bytes - weight_bytes)
    together(mesh.world, lambda: require_state(state, weight_bytes, free))
    weights = CutWeights(layout, own, _split_masters(stage, own), mesh, parallel)
    if state.base:
        state = replace(state, base=weights.base_bytes)
    gradient = CutGradient(own)
    engine = make_engine(stage, make_head(stage, _head_gradient(stage, own, gradient)) if stage.is_last else None)
    cost = measure_cost(engine, lambda tokens: [random_part(stage.architecture, tokens)], gradient.drop)
    least = mesh.world.smallest(free - state.total)
    memory = divide_memory(
        weights=weight_bytes,
        free=least + state.total,
        state=state,
        cost=cost,
        max_tokens=max_tokens_per_batch,
        device=device,
    )
    return TrainedModel(
        architecture=stage.architecture,
        device=device,
        dtype=stage.dtype,
        end_tokens=read_end_tokens(model),
        passes=engine,
        weights=weights,
        gradient=gradient,
        memory=memory,
        files=model_files(model, base_name, stage.dtype, tokenizer_id),
        parallel=parallel,
        pipeline=engine.pipeline,
    )


def _split_masters(stage: Stage, own: list[OwnWeight]) -> dict[str, Tensor]:
    """Convert the parameters to the compute dtype, and return fp32 master weights by name; none if that is fp32."""
    masters: dict[str, Tensor] = {}
    for each in own:
        if stage.dtype != torch.float32:
            cut = each.parameter.data.float()[: each.rows]
            masters[each.name] = each.share(cut).clone() if each.sharers.size > 1 else cut
            each.parameter.data = each.parameter.data.to(stage.dtype)
    return masters


def _head_gradient(stage: Stage, own: list[OwnWeight], gradient: CutGradient) -> HeadWeightGradient:
    number = next(number for number, each in enumerate(own) if each.parameter is stage.head_weight_VH)
    return HeadWeightGradient(gradient, number, None)
