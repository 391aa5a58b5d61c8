"""Loads a base model onto a mesh of processes, and makes a Trainer of it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from twinkle import hub
from twinkle.errors import InvalidInputError
from twinkle.hub.resolution import loadable_name
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters.cuts import AdapterCuts, ExpertRanks, ModelCuts, place_targets
from twinkle.model.decoder.head import ChunkedHead, HeadGradient, HeadSpec
from twinkle.model.decoder.layers import run_layer
from twinkle.model.decoder.precision import read_dtype
from twinkle.model.megatron.engine import MegatronEngine, make_engine
from twinkle.model.megatron.head import VocabParallelHead
from twinkle.model.megatron.mesh import MegatronMesh, join_mesh
from twinkle.model.megatron.sizes import check_compilable, read_sizes
from twinkle.model.megatron.stage import Stage, build_stage
from twinkle.model.parallel import Parallelism, own_device
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.memory import available_bytes, divide, head_chunk_rows, measure_per_token, parameter_bytes
from twinkle.model.trainer.preparation import PreparedModel, named_end_tokens
from twinkle.model.trainer.probe import (
    COMPILED_PROBES,
    PROBE_RANK,
    PROBE_TOKENS,
    TokenCost,
    probe_adapters,
    probe_parts,
)
from twinkle.model.trainer.trainer import Trainer
from twinkle.utils.progress import Progress

__all__ = ["join", "load_trainer", "make_cuts", "make_head", "make_trainer", "measure_cost", "parallelism"]


def load_trainer(
    model_id: str | PathLike[str],
    *,
    device_mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    base_name: str | None = None,
    memory_budget_bytes: int | None = None,
    max_tokens_per_batch: int | None = None,
    compiled: bool = False,
) -> Trainer:
    """Load a model by its id onto the processes of a mesh; all of them call this. Each reads its cut of the weights.

    The arguments are those of :meth:`Trainer.from_pretrained`. ``max_tokens_per_batch`` is that of one micro-batch.
    ``compiled``: only where layers do not communicate, without tensor and expert parallelism.
    """
    if compiled and device_mesh is not None:
        check_compilable(read_sizes(device_mesh))
    place = join(device_mesh, device, dtype, max_tokens_per_batch)
    return make_trainer(
        build_stage(hub.resolve(model_id), *place),
        model_id,
        base_name=base_name,
        memory_budget_bytes=memory_budget_bytes,
        max_tokens_per_batch=max_tokens_per_batch,
        compiled=compiled,
    )


def join(
    device_mesh: DeviceMesh | None,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    max_tokens_per_batch: int | None,
) -> tuple[MegatronMesh, torch.dtype, torch.device]:
    """Check the options of a trainer, and join the mesh. Return this process's place in it; all processes call this."""
    if max_tokens_per_batch is not None and max_tokens_per_batch < 1:
        raise InvalidInputError("max_tokens_per_batch", max_tokens_per_batch, "an integer ≥ 1 or None")
    chosen = own_device(device, device_mesh)
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidInputError("device", str(chosen), "cpu or cuda")
    return join_mesh(device_mesh, chosen), read_dtype(dtype, chosen), chosen


def make_trainer(
    stage: Stage,
    model_id: str | PathLike[str],
    *,
    base_name: str | None = None,
    memory_budget_bytes: int | None = None,
    max_tokens_per_batch: int | None = None,
    compiled: bool = False,
) -> Trainer:
    """Make a trainer of this process's stage of a model. The arguments are those of :func:`load_trainer`."""
    generation_config = read_generation_config(hub.resolve(model_id).path)
    with Progress(f"preparing {model_id}") as progress:
        engine = make_engine(stage, make_head(stage) if stage.is_last else None)
        if compiled:
            progress.doing("compiling the decoder layers")
            _compile_layers(engine, make_cuts(stage))
        progress.doing("measuring the memory of a training step")
        prepared = prepare_stage(engine, generation_config, memory_budget_bytes, max_tokens_per_batch)
    return Trainer.from_prepared(prepared, model_id=model_id, base_name=base_name or loadable_name(model_id))


def prepare_stage(
    engine: MegatronEngine,
    generation_config: Mapping[str, Any],
    memory_budget_bytes: int | None,
    max_tokens_per_batch: int | None,
) -> PreparedModel:
    """Make a stage ready for a Trainer. All ranks get the same memory plan: that of the rank with the least memory."""
    stage = engine.stage
    mesh, device = stage.mesh, stage.device
    cuts, weights = make_cuts(stage), parameter_bytes(stage.model)
    free = available_bytes(device, mesh.world.size)
    if memory_budget_bytes is not None:
        free = min(free, memory_budget_bytes - weights)
    adapters = probe_adapters(stage.architecture, device, stage.dtype, [PROBE_RANK], head=True, cuts=cuts)
    cost = measure_cost(engine, lambda tokens: probe_parts(stage.architecture, adapters, [tokens]))
    memory = divide(
        weights=weights,
        free=mesh.world.smallest(free),
        per_token=cost.kept,
        per_token_recomputed=cost.recomputed,
        max_tokens=max_tokens_per_batch,
        device=device,
    )
    return PreparedModel(
        passes=engine,
        pipeline=engine.pipeline,
        architecture=stage.architecture,
        end_tokens=named_end_tokens([generation_config, stage.hf_config.to_dict()]),
        device=device,
        dtype=stage.dtype,
        parallel=parallelism(mesh),
        cuts=cuts,
        memory=memory,
        has_budget=memory_budget_bytes is not None or device.type != "cpu",
        remote=engine.remote,
    )


def parallelism(mesh: MegatronMesh) -> Parallelism:
    """Return how a mesh divides training. Ranks that hold the same cut have different data."""
    return Parallelism(ranks=mesh.world, data=mesh.dp, replicas=mesh.dp, model=mesh.model)


def make_cuts(stage: Stage) -> AdapterCuts:
    """Return how adapters are cut: like the layers that they are on."""
    mesh, count = stage.mesh, stage.architecture.layer_count
    size = count // mesh.pp.size
    stages = [range(start, start + size) for start in range(0, count, size)]
    place = place_targets(stage.architecture, stages)
    spread = mesh.spreads_experts
    counted = mesh.same_experts.number == 0 if spread else mesh.tp.number < mesh.ep.size
    holders = mesh.world if spread else mesh.model
    experts = ExpertRanks(mesh.ep, mesh.same_experts, holders, counted, spread)
    return ModelCuts(place, tensor=mesh.tp, pipeline=mesh.pp, model=mesh.model, data=mesh.dp, experts=experts)


def make_head(stage: Stage, gradient: HeadGradient | None = None) -> ChunkedHead:
    """Return the head of the last stage, with this rank's rows of its weights.

    ``gradient``: adds up the gradient of these rows; None: they are frozen.
    """
    assert stage.head_weight_VH is not None, "only the last stage has the head"
    weight_VH, whole = stage.head_weight_VH.detach(), stage.architecture.head_spec
    spec = HeadSpec(weight_VH, None, whole.scale, whole.softcap)
    chunk_rows = head_chunk_rows(stage.device, len(weight_VH))
    tp = stage.mesh.tp
    if tp.size == 1:
        return ChunkedHead(spec, chunk_rows, gradient)
    return VocabParallelHead(spec, chunk_rows, tp, stage.architecture.head.out_features, gradient)


def _compile_layers(engine: MegatronEngine, cuts: AdapterCuts) -> None:
    """Compile the layers of a stage by training temporary adapters."""
    stage = engine.stage
    compiled = torch.compile(run_layer, dynamic=True)
    for layer in stage.layers:
        layer.compiled = compiled
    for lengths, rank in COMPILED_PROBES:
        ranks = [rank] * len(lengths)
        adapters = probe_adapters(stage.architecture, stage.device, stage.dtype, ranks, cuts=cuts)
        engine.forward_backward(probe_parts(stage.architecture, adapters, lengths), recompute=False)
    engine.freeze_compilation()


def measure_cost(
    engine: MegatronEngine, make_parts: Callable[[int], Sequence[Part]], after: Callable[[], None] = lambda: None
) -> TokenCost:
    """Return the bytes per token of a forward and backward pass, on the rank that needs most.

    make_parts: returns requests with so many tokens. after: frees what a pass leaves. The first stages of a pipeline
    hold the activations of several micro-batches at once; what they need is divided among all tokens of one.
    """
    stage = engine.stage
    small, large = PROBE_TOKENS[stage.device.type]
    in_flight = stage.mesh.pp.size - stage.mesh.pp.number

    def measure(recompute: bool) -> int:
        def run(tokens: int) -> None:
            engine.forward_backward(make_parts(tokens), recompute=recompute)
            after()

        return measure_per_token(run, stage.device, small, large) * in_flight

    with _head_chunks(engine, small):
        kept, recomputed = measure(False), measure(True)
    engine.finish()
    world = stage.mesh.world
    return TokenCost(-world.smallest(-kept), -world.smallest(-min(recomputed, kept)))


@contextmanager
def _head_chunks(engine: MegatronEngine, rows: int) -> Iterator[None]:
    """Limit the head's chunks, so that the head takes the same memory in passes of different lengths."""
    head = engine.head
    if head is None:
        yield
        return
    before = head.chunk_rows
    head.chunk_rows = min(rows, before)
    try:
        yield
    finally:
        head.chunk_rows = before


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """Return the contents of a model's generation_config.json; empty if it has none."""
    path = folder / "generation_config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}
