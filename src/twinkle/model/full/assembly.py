"""Puts together what a trainer of all parameters runs: engine, weights, gradient, memory plan."""

import dataclasses
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub.model_id import id_text
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.decoder.architecture import Architecture, find_layers, read_architecture
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.decoder.head import ChunkedHead
from twinkle.model.decoder.layers import run_layer
from twinkle.model.full.checkpoint import ModelFiles
from twinkle.model.full.gradients import CollectedGradient, HeadWeightGradient, RequestGradient
from twinkle.model.full.memory import (
    FullMemoryPlan,
    StateBytes,
    divide_memory,
    measure_cost,
    random_part,
    require_state,
)
from twinkle.model.full.sharding import ShardedGradient, ShardedWeights, shard_model
from twinkle.model.full.weights import TrainedWeights, read_layout, split_masters
from twinkle.model.parallel import Parallelism, own_device, read_mesh
from twinkle.model.trainer.call import Pipeline
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.lockstep import Lockstep
from twinkle.model.trainer.memory import available_bytes, head_chunk_rows, parameter_bytes
from twinkle.model.trainer.preparation import CountedPasses, read_end_tokens
from twinkle.model.trainer.self_check import check_engine, plain_logprobs
from twinkle.utils.progress import Progress

# The batches to compile for: the lengths of their sequences. There are two, so that the compiler treats no size as a
# constant.
_PROBES = ((384, 256), (160, 96, 384))


@dataclass(frozen=True)
class TrainedModel:
    """A model all of whose parameters are trained."""

    architecture: Architecture
    device: torch.device
    dtype: torch.dtype  # what it computes with
    end_tokens: frozenset[int]
    passes: CountedPasses
    weights: TrainedWeights
    gradient: RequestGradient
    memory: FullMemoryPlan
    files: ModelFiles
    parallel: Parallelism
    engine: Engine | None = None  # what runs the passes of a model of Transformers
    pipeline: Pipeline | None = None  # what runs several micro-batches at once, instead of ``passes``


def assemble(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    base_name: str,
    tokenizer_id: str | PathLike[str] | None,
    memory_budget_bytes: int | None,
    max_tokens_per_batch: int | None,
    compiled: bool,
    device_mesh: DeviceMesh | None,
    reshard_after_forward: bool,
) -> TrainedModel:
    """Take over a model that ``adopt_model`` has prepared. The arguments are those of ``FullTrainer``."""
    if max_tokens_per_batch is not None and max_tokens_per_batch < 1:
        raise InvalidInputError("max_tokens_per_batch", max_tokens_per_batch, "an integer ≥ 1 or None")
    device = model.device
    if device_mesh is not None and device_mesh.fsdp_world_size > 1:  # the model is in host memory
        device = own_device(device_mesh.device_type, device_mesh)
    parallel = read_mesh(device_mesh, device)
    if compiled and parallel.sharded:
        raise UnsupportedError("compiled: the layers of a sharded model are not compiled, allowed: False")
    end_tokens, files = read_end_tokens(model), model_files(model, base_name, dtype, tokenizer_id)
    needs = _needs(model, dtype, device, parallel, memory_budget_bytes, reshard_after_forward)
    require_state(needs.state, needs.weights, needs.free)
    with Progress(f"preparing {base_name}") as progress:
        masters = split_masters(model, torch.float32 if parallel.sharded else dtype)
        architecture = read_architecture(model)
        progress.doing("one pass with Transformers' own layers, to compare ours with")
        reference = plain_logprobs(model, architecture, with_adapters=False)
        engine = Engine(model, architecture, device, head_chunk_rows(device, architecture.vocab_size))
        weights, gradient = _take_weights(engine, model, masters, dtype, parallel, reshard_after_forward)
        progress.doing("the same pass with our layers")
        check_engine(engine, reference)
        if compiled:
            progress.doing("compiling the decoder layers")
            _compile(engine)
        progress.doing("measuring the memory of a training step")
        cost = measure_cost(engine, gradient.drop)
    state = needs.state
    if state.base:
        state = dataclasses.replace(state, base=weights.base_bytes)
    memory = divide_memory(
        weights=needs.weights,
        free=parallel.ranks.smallest(needs.free),
        state=state,
        cost=cost,
        max_tokens=max_tokens_per_batch,
        device=device,
    )
    return TrainedModel(
        engine.architecture,
        device,
        dtype,
        end_tokens,
        Lockstep(engine, parallel.shards) if parallel.sharded else engine,
        weights,
        gradient,
        memory,
        files,
        parallel,
        engine,
    )


def _take_weights(
    engine: Engine,
    model: PreTrainedModel,
    masters: dict[str, Tensor],
    dtype: torch.dtype,
    parallel: Parallelism,
    reshard_after_forward: bool,
) -> tuple[TrainedWeights, RequestGradient]:
    """Return all weights of the model and the gradient of a request, which the engine's passes add up from now on."""
    layout = read_layout(model)
    if parallel.shard_mesh is None:
        weights = TrainedWeights(layout, layout.names, list(named_weights(model).values()), masters, parallel)
        gradient = CollectedGradient(list(named_weights(model).values()))
        head_gradient = _head_gradient(model, weights, gradient)
        engine.head = ChunkedHead(engine.head.spec, engine.head.chunk_rows, head_gradient)
        return weights, gradient
    head_name = engine.architecture.head.name
    head = shard_model(engine, model, parallel.shard_mesh, dtype=dtype, reshard_after_forward=reshard_after_forward)
    shards = ShardedWeights(layout, model, head_name, head, parallel)
    sharded = ShardedGradient(shards, head, head_name, parallel.shards)
    engine.head = ChunkedHead(engine.head.spec, engine.head.chunk_rows, sharded)
    return shards, sharded


@dataclass(frozen=True)
class _Needs:
    """Bytes of the weights that the model computes with, of a run's state, and those free for state and activations."""

    weights: int
    state: StateBytes
    free: int


def _needs(
    model: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallelism,
    budget: int | None,
    reshard_after_forward: bool,
) -> _Needs:
    count, held, shards = sum(each.numel() for each in model.parameters()), parameter_bytes(model), parallel.shards.size
    if parallel.sharded:
        layers, head = _layer_sizes(model), model.get_output_embeddings().weight.numel()
        # The next layer is gathered while one runs, and each rank adds up the whole gradient of the head.
        gathered = 2 * max(layers) if reshard_after_forward else sum(layers)
        weights = (gathered + head) * dtype.itemsize + 4 * head
    else:
        weights = count * dtype.itemsize
    on_cpu = device.type == "cpu"
    state = StateBytes.for_parameters(
        -(-count // shards),
        separate_master=parallel.sharded or dtype != torch.float32,
        base=held // shards if on_cpu else 0,
    )
    released = held if model.device.type == device.type else 0  # the model's tensors become weights and master weights
    free = available_bytes(device, parallel.ranks.size) + released - weights
    return _Needs(weights, state, free if budget is None else min(free, budget - weights))


def _layer_sizes(model: PreTrainedModel) -> list[int]:
    layers = model.get_submodule(find_layers(model))
    return [sum(each.numel() for each in layer.parameters()) for layer in layers]


def _head_gradient(model: PreTrainedModel, weights: TrainedWeights, gradient: CollectedGradient) -> HeadWeightGradient:
    head = model.get_output_embeddings()
    numbers = {id(parameter): index for index, parameter in enumerate(weights.parameters)}
    return HeadWeightGradient(gradient, numbers[id(head.weight)], None if head.bias is None else numbers[id(head.bias)])


def _compile(engine: Engine) -> None:
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in engine.layers:
        layer.compiled = compiled
    for lengths in _PROBES:
        engine.forward_backward([random_part(engine.architecture, length) for length in lengths], recompute=False)
    engine.freeze_compilation()


def model_files(
    model: PreTrainedModel, base_name: str, dtype: torch.dtype, tokenizer_id: str | PathLike[str] | None
) -> ModelFiles:
    """Return what checkpoints of a model hold beside its weights."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    generation = model.generation_config if model.can_generate() else None
    return ModelFiles(
        base_name,
        config.to_json_string(),
        None if generation is None else generation.to_json_string(),
        None if tokenizer_id is None else id_text(tokenizer_id),
    )
