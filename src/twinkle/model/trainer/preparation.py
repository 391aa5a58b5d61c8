"""Prepares a base model for training adapters: replaces its layers, checks them, and plans the memory."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import ImageProcessing
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.adapters.cuts import AdapterCuts, WholeAdapters
from twinkle.model.decoder.architecture import Architecture, read_architecture
from twinkle.model.parallel import Parallelism, own_device, read_mesh
from twinkle.model.trainer.call import Passes, Pipeline, RemoteRequests
from twinkle.model.trainer.engine import Engine
from twinkle.model.trainer.lockstep import Lockstep
from twinkle.model.trainer.memory import MemoryPlan, available_bytes, divide, head_chunk_rows, parameter_bytes
from twinkle.model.trainer.pass_graphs import BUCKETS, capture_passes
from twinkle.model.trainer.probe import compare_captured_passes, compile_layers, measure_token_cost
from twinkle.model.trainer.self_check import check_engine, plain_logprobs
from twinkle.model.trainer.sharding import shard_engine
from twinkle.model.vision.feature_store import FeatureStore
from twinkle.model.vision.tower import Tower
from twinkle.utils.progress import Progress

logger = logging.getLogger(__name__)

_FEATURE_PART = 16  # at most 1 / 16 of the free memory is for the features of images
_MOST_FEATURE_BYTES = 4 * 2**30
# Of the free memory, for the activations of captured passes: usually, and where all batches are captured then.
_CAPTURED_SHARE = 1 / 8
_LARGEST_CAPTURED_SHARE = 1 / 5


class CountedPasses(Passes, Protocol):
    """Passes that count the rows they have computed so far."""

    @property
    def token_rows(self) -> int: ...

    @property
    def padding_rows(self) -> int: ...


@dataclass(frozen=True)
class PreparedModel:
    """A frozen base model that is ready to train adapters: all that a Trainer needs of it.

    ``memory`` is the same on all ranks, because all must cut calls into the same micro-batches.
    """

    passes: CountedPasses
    architecture: Architecture
    end_tokens: frozenset[int]  # that end a turn or a text
    device: torch.device
    dtype: torch.dtype
    parallel: Parallelism
    cuts: AdapterCuts
    memory: MemoryPlan
    has_budget: bool  # whether adapters must stay within the memory plan; else the host's memory limits them
    engine: Engine | None = None  # None: no sampler can run on this model
    pipeline: Pipeline | None = None  # what runs several micro-batches at once, instead of ``passes``
    features: FeatureStore | None = None  # of images; None: the model reads text only
    remote: RemoteRequests | None = None  # what computes for requests of other ranks; None: nothing does


def prepare_model(
    model: PreTrainedModel,
    *,
    name: str,
    memory_budget_bytes: int | None,
    max_tokens_per_batch: int | None,
    compiled: bool,
    device_mesh: DeviceMesh | None,
    reshard_after_forward: bool,
    progress: Progress,
    processing: ImageProcessing | None = None,
) -> PreparedModel:
    """Prepare a model of Transformers. ``name``: that of the model, for the log. The rest is as for a Trainer.

    A sharded model reads text only: its embeddings are gathered for a pass alone.
    """
    device: torch.device = model.device
    if device_mesh is not None and device_mesh.fsdp_world_size > 1:  # the model is in host memory
        device = own_device(device_mesh.device_type, device_mesh)
    dtype: torch.dtype = model.dtype
    if max_tokens_per_batch is not None and max_tokens_per_batch < 1:
        raise InvalidInputError("max_tokens_per_batch", max_tokens_per_batch, "an integer ≥ 1 or None")
    parallel = read_mesh(device_mesh, device)
    weight_bytes = parameter_bytes(model)
    free_bytes = available_bytes(device, parallel.ranks.size)
    architecture = read_architecture(model)
    end_tokens = read_end_tokens(model)
    progress.doing("one pass with Transformers' own layers, to compare ours with")
    reference = plain_logprobs(model, architecture)
    engine = Engine(model, architecture, device, head_chunk_rows(device, architecture.vocab_size))
    if parallel.shard_mesh is not None:
        if compiled:
            raise UnsupportedError("compiled: the layers of a sharded base are not compiled, allowed: False")
        gathered = shard_engine(engine, model, parallel.shard_mesh, reshard_after_forward)
        weight_bytes = weight_bytes // parallel.shards.size + gathered
        free_bytes = available_bytes(device, parallel.ranks.size) - gathered
    if memory_budget_bytes is not None:
        free_bytes = min(free_bytes, memory_budget_bytes - weight_bytes)
    if architecture.vision is not None and not parallel.sharded:
        feature_bytes = min(free_bytes // _FEATURE_PART, _MOST_FEATURE_BYTES)
        free_bytes -= feature_bytes
        engine.features = FeatureStore(
            Tower(model, architecture.vision),
            processing,
            device_bytes=feature_bytes,
            host_bytes=feature_bytes if device.type == "cpu" else _host_feature_bytes(parallel.ranks.size),
        )
    progress.doing("the same pass with our layers")
    check_engine(engine, reference)
    if compiled:
        progress.doing("compiling the decoder layers")
        compile_layers(engine, dtype)
    progress.doing("measuring the memory of a training step")
    cost = measure_token_cost(engine, dtype)
    if parallel.ranks.size == 1 and device.type == "cuda":
        progress.doing("capturing passes of few rows")
        rows = rows_to_capture(architecture, free_bytes, cost.kept, max_tokens_per_batch)
        free_bytes -= _capture(engine, dtype, rows, name)
    free_bytes = parallel.ranks.smallest(free_bytes)

    def plan(max_tokens: int | None) -> MemoryPlan:
        return divide(
            weights=weight_bytes,
            free=free_bytes,
            per_token=cost.kept,
            per_token_recomputed=cost.recomputed,
            max_tokens=max_tokens,
            device=device,
        )

    memory = plan(max_tokens_per_batch)
    if max_tokens_per_batch is None and engine.graphs is not None:
        memory = plan(most_tokens_of_a_batch(architecture, memory.tokens, engine.graphs.most_rows))
    return PreparedModel(
        passes=Lockstep(engine, parallel.shards) if parallel.sharded else engine,
        architecture=engine.architecture,
        end_tokens=end_tokens,
        device=device,
        dtype=dtype,
        parallel=parallel,
        cuts=WholeAdapters(parallel.ranks),
        memory=memory,
        has_budget=memory_budget_bytes is not None or device.type != "cpu",
        engine=engine,
        features=engine.features,
    )


def _host_feature_bytes(processes: int) -> int:
    """Return how much host memory the features of images take at most, beside those on the GPU."""
    return min(_MOST_FEATURE_BYTES, available_bytes(torch.device("cpu"), processes) // _FEATURE_PART)


def _capture(engine: Engine, dtype: torch.dtype, most_rows: int, name: str) -> int:
    """Capture passes of up to ``most_rows`` rows, where that is possible; return the bytes of memory they take."""
    before = available_bytes(engine.device)
    engine.graphs = capture_passes(engine, dtype, most_rows)
    if engine.graphs is not None:
        difference = compare_captured_passes(engine, dtype)
        if not difference.is_small:
            logger.error(
                "%s trains without CUDA graphs: they give other numbers than its layers (relative difference %.2g, "
                "allowed: %.2g)",
                name,
                difference.found,
                difference.allowed,
            )
            engine.graphs = None
    return before - available_bytes(engine.device)


def rows_to_capture(architecture: Architecture, free: int, per_row: int, max_tokens: int | None) -> int:
    """Return how many rows captured passes have at most, given the free memory and what a row needs.

    They take more memory than usual where all batches are captured then: in models with experts, and where
    ``max_tokens`` limits batches. Passes larger than the batches are not captured.
    """
    usual, most = (int(free * share) // per_row for share in (_CAPTURED_SHARE, _LARGEST_CAPTURED_SHARE))
    if max_tokens is None:
        return most if _has_experts(architecture) else usual
    enough = next((bucket.rows for bucket in BUCKETS if bucket.rows >= max_tokens), None)
    return usual if enough is None or enough > most else enough


def most_tokens_of_a_batch(architecture: Architecture, tokens: int, captured: int) -> int | None:
    """Return the limit that captured passes of up to ``captured`` tokens set for batches; None: they set none.

    ``tokens``: what a batch would have otherwise. A model with experts launches four times as many kernels as others.
    So its larger passes wait for the host, too: two captured passes are faster than one of up to twice as many tokens.
    The memory that batches leave is for adapters. Longer sequences than ``captured`` are computed twice.
    """
    return captured if _has_experts(architecture) and captured < tokens <= 2 * captured else None


def _has_experts(architecture: Architecture) -> bool:
    return bool(architecture.experts) or architecture.has_other_experts


def read_end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a turn or a text; a model's configurations may name one, several or none."""
    configs = (model.generation_config, model.config, model.config.get_text_config())
    return named_end_tokens([config.to_dict() for config in configs if config is not None])


def named_end_tokens(configs: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the tokens that configurations name as the end of a turn or a text."""
    named = [config.get("eos_token_id") for config in configs]
    ids = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in ids if token is not None)
