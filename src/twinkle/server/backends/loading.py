"""Load the trainer and the sampler that a model's configuration asks for.

Torch is imported only for the backend that needs it.
"""

import atexit
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle import hub
from twinkle.errors import CapacityError, ConfigError
from twinkle.model.types import VisionSpec
from twinkle.server.backends.backend import ServedModel, TrainingBackend
from twinkle.server.backends.image_reader import SeesImages, image_reader
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.config.applications import ModelArgs, SamplerArgs, ServedModelConfig, base_name
from twinkle.server.config.timings import DEFAULT_TIMINGS, Timings
from twinkle.utils.progress import Progress

if TYPE_CHECKING:
    from twinkle.infra.device_mesh import DeviceMesh
    from twinkle.model import Trainer
    from twinkle.model.full import FullTrainer
    from twinkle.sampler import TorchSampler
    from twinkle.sampler.torch_sampler.jobs import Tokenizer
    from twinkle.sampler.vllm import VllmSampler
    from twinkle.sampler.weight_sets.versions import WeightSource


logger = logging.getLogger(__name__)

_GPU_CHEAP_TOKENS = 2048  # a GPU takes hardly longer for this many tokens than for one


def load_served_model(served: ServedModelConfig, timings: Timings = DEFAULT_TIMINGS) -> ServedModel:
    if served.model.backend == "mock":
        from twinkle.server.backends.mock import mock_model

        mode, seconds = served.model.train_mode, (timings.mock_pass, timings.mock_step, timings.mock_token)
        model = mock_model(served.name, served.aliases, *seconds, mode)
        return replace(model, max_replayed_steps=replayed_steps(served.model))
    return _load_here(served)


def replayed_steps(args: ModelArgs) -> int | None:
    """Return how many optimizer steps of a run may be repeated after a kill; None: as many as there are."""
    return args.max_replayed_steps if args.train_mode == "full" else None


def _load_here(served: ServedModelConfig) -> ServedModel:
    """Load the trainer into this process and, where the configuration asks for one, a sampler."""
    logger.info("loading %s", served.model.model_id)
    args, sampling = served.model, served.sampler
    if sampling is not None and sampling.sampler_type == "vllm":
        _check_vllm(sampling)  # before the slow part
    budget = budget_of(args)
    if args.train_mode == "full":
        whole = load_full_trainer(args, args.compute_device, budget, compiled=args.compiled)
        return _with_full_sampler(served, served_model(served, whole, TrainerFacts.from_trainer(whole)), whole)
    trainer = load_trainer(args, args.compute_device, budget, compiled=args.compiled)
    if sampling is None:
        return served_model(served, trainer, TrainerFacts.from_trainer(trainer), trainer)
    base = trainer if args.backend == "transformers" else _second_base(args, trainer)
    model = served_model(served, trainer, TrainerFacts.from_trainer(trainer), trainer)
    tokenizer = hub.load_tokenizer(args.model_id)
    sampler = _make_sampler(sampling, base, tokenizer, budget, publisher=trainer)
    return replace(model, sampler=sampler, memory=f"{model.memory}; {sampler.memory}", text=HubTextCodec(tokenizer))


@dataclass(frozen=True)
class TrainerFacts:
    """Facts about a trainer that the server needs. They can be sent: the trainer may be in another process.

    ``tokens``: the most tokens of a batch. ``memory``: a sentence for operators, how memory is divided.
    """

    architecture: str
    max_length: int
    tokens: int
    memory: str
    device: str
    shares: int  # into how many parts the rows of a batch are divided: the number of data ranks
    device_bytes: int  # memory for adapters on the device; 0 if that is host memory
    vision: VisionSpec | None  # what the model wants of images; None: it is trained on text only

    @classmethod
    def from_trainer(cls, trainer: "Trainer | FullTrainer") -> "TrainerFacts":
        architecture, memory = trainer.architecture, trainer.memory
        return cls(
            architecture.family,
            architecture.max_length,
            memory.tokens,
            trainer.memory_report(),
            trainer.device.type,
            trainer.data_ranks.size,
            0 if trainer.device.type == "cpu" else memory.adapters,
            trainer.vision,
        )


def served_model(
    served: ServedModelConfig,
    trainer: TrainingBackend,
    facts: TrainerFacts,
    seeing: SeesImages | None = None,
) -> ServedModel:
    """Return the served model without a sampler. ``facts`` describe the first process of its trainer.

    ``seeing``: the same trainer, if it is in this process and may see images.
    """
    processes, folder = served.model.processes, hub.resolve(served.model.model_id).path
    return ServedModel(
        name=served.name,
        aliases=served.aliases,
        trainer=trainer,
        sampler=None,
        architecture=facts.architecture,
        max_context_length=facts.max_length,
        tokens_per_batch=facts.tokens * facts.shares,
        tokenizer_dir=str(folder),
        tokenizer_id=served.public_id,
        memory=facts.memory if processes == 1 else f"{processes} processes, each: {facts.memory}",
        text=None,
        device=facts.device,
        cheap_tokens=_GPU_CHEAP_TOKENS * facts.shares if facts.device == "cuda" else 0,
        train_mode=served.model.train_mode,
        images=image_reader(served.name, facts.vision, folder, seeing),
        max_replayed_steps=replayed_steps(served.model),
    )


def budget_of(args: ModelArgs) -> int | None:
    """Return the bytes of device memory that the trainer may use; None: the trainer takes what is free."""
    return None if args.memory_budget_gib is None else int(args.memory_budget_gib * 2**30)


def load_trainer(
    args: ModelArgs, device: str | None, budget: int | None, *, compiled: bool = False, mesh: "DeviceMesh | None" = None
) -> "Trainer":
    """Load the base model. ``budget`` is in bytes; ``mesh`` is given if this process is one of several that train."""
    if args.backend == "transformers":
        return _load_base(args, device, budget, compiled=compiled, mesh=mesh)
    with Progress("importing torch and megatron-core"):
        from twinkle.model.megatron.trainer import load_trainer as load_onto_mesh

    return load_onto_mesh(
        args.model_id,
        device=device,
        dtype=args.dtype,
        base_name=base_name(args),
        memory_budget_bytes=budget,
        max_tokens_per_batch=args.max_tokens_per_batch,
        compiled=compiled,
        device_mesh=mesh,
    )


def _load_base(
    args: ModelArgs, device: str | None, budget: int | None, *, compiled: bool = False, mesh: "DeviceMesh | None" = None
) -> "Trainer":
    """Load the base model as a model of Transformers, which samplers run on, too."""
    with Progress("importing torch and transformers"):
        from twinkle.model import Trainer

    return Trainer.from_pretrained(
        args.model_id,
        device=device,
        dtype=args.dtype,
        base_name=base_name(args),
        memory_budget_bytes=budget,
        max_tokens_per_batch=args.max_tokens_per_batch,
        compiled=compiled,
        device_mesh=mesh,
    )


def load_full_trainer(
    args: ModelArgs, device: str | None, budget: int | None, *, compiled: bool = False, mesh: "DeviceMesh | None" = None
) -> "FullTrainer":
    """Load the model to train all its parameters. The arguments are those of :func:`load_trainer`.

    CapacityError, with the bytes that are needed, if the state of a run does not fit into memory.
    """
    if args.backend == "megatron":
        with Progress("importing torch and megatron-core"):
            from twinkle.model.megatron.full import load_full_trainer as load_onto_mesh

        assert not compiled, "refused by the rules of the configuration"
        return load_onto_mesh(
            args.model_id,
            device=device,
            dtype=args.dtype,
            base_name=base_name(args),
            memory_budget_bytes=budget,
            max_tokens_per_batch=args.max_tokens_per_batch,
            device_mesh=mesh,
            share_optimizer=True,
        )
    with Progress("importing torch and transformers"):
        from twinkle.model.full import FullTrainer

    return FullTrainer.from_pretrained(
        args.model_id,
        device=device,
        dtype=args.dtype,
        base_name=base_name(args),
        memory_budget_bytes=budget,
        max_tokens_per_batch=args.max_tokens_per_batch,
        compiled=compiled,
        device_mesh=mesh,
    )


def _second_base(args: ModelArgs, trainer: "Trainer") -> "Trainer":
    """Load the base model a second time, for a sampler beside a trainer whose model only trains.

    The copy gets half of the memory that the trainer has for adapters. CapacityError: it does not fit there.
    """
    needed, left = trainer.memory.weights, trainer.memory.adapters // 2
    _require_second_base(needed, left, f"backend: {args.backend}")
    trainer.set_aside(left)
    return _load_base(args, str(trainer.device), left)


def _require_second_base(needed: int, left: int, beside: str) -> None:
    if needed >= left:
        raise CapacityError(
            f"sampling beside {beside} needs a second copy of the base model, {needed} bytes "
            f"({needed / 2**30:.2f} GiB), and training leaves {left} bytes; raise memory_budget_gib, lower "
            "max_tokens_per_batch, give the sampler devices of its own (device_group on Ray), or serve no sampler"
        )


def _with_full_sampler(served: ServedModelConfig, model: ServedModel, trainer: "FullTrainer") -> ServedModel:
    """Return the model with a sampler of complete sets of weights, where the configuration asks for one.

    What the server samples from is always a copy: the sampler has its own base model, which is never trained, in the
    memory that training leaves.
    """
    args, sampling = served.model, served.sampler
    if sampling is None:
        return model
    needed, left = trainer.memory.weights, trainer.memory.adapters
    _require_second_base(needed, left, "train_mode: full")
    base = _load_base(args, str(trainer.device), left)
    tokenizer = hub.load_tokenizer(args.model_id)
    sampler = _full_sampler(base, tokenizer, sampling, lambda _run_id: trainer.compute_weights())
    return replace(model, sampler=sampler, memory=f"{model.memory}; {sampler.memory}", text=HubTextCodec(tokenizer))


def _full_sampler(
    base: "Trainer", tokenizer: "Tokenizer | None", args: SamplerArgs, source: "WeightSource | None"
) -> "TorchSampler":
    """Make a sampler whose versions are complete sets of weights. ``source``: None if another process trains."""
    from twinkle.sampler import TorchSampler
    from twinkle.sampler.weight_sets import WeightVersions

    with Progress("preparing the sampler"):
        return TorchSampler(base, tokenizer, versions=WeightVersions(base, source, args.max_weight_sets))


def load_sampling_engine(served: ServedModelConfig, device: str, gpus: int) -> "TorchSampler | VllmSampler":
    """Load a sampler with its own copy of the base model, in a process that has its devices to itself.

    ``gpus``: the number of GPUs over which vLLM divides the model, unless ``engine_args`` say otherwise.
    """
    args, sampler, budget = served.model, served.sampler, None
    assert sampler is not None, "there is something to load"
    if sampler.sampler_type == "vllm":
        engine_args = {**({"tensor_parallel_size": gpus} if gpus > 1 else {}), **(sampler.engine_args or {})}
        sampler = sampler.model_copy(update={"engine_args": engine_args})
        _check_vllm(sampler)
        if device == "cuda":
            from twinkle.sampler.vllm.engine_args import memory_beside

            budget = memory_beside(engine_args)
    trainer = _load_base(args, device, budget)
    if args.train_mode == "full":
        return _full_sampler(trainer, hub.load_tokenizer(args.model_id), sampler, None)
    return _make_sampler(sampler, trainer, hub.load_tokenizer(args.model_id), budget)


def _make_sampler(
    args: SamplerArgs,
    trainer: "Trainer",
    tokenizer: "Tokenizer | None",
    budget: int | None,
    publisher: "Trainer | None" = None,
) -> "TorchSampler | VllmSampler":
    """Make a sampler.

    ``torch`` samples with the trainer's own weights; ``vllm`` runs in processes of its own, which end with this one.
    ``publisher`` has the adapters that are published; None: another process has them.
    """
    if args.sampler_type == "torch":
        from twinkle.sampler import TorchSampler

        with Progress("preparing the sampler"):
            return TorchSampler(trainer, tokenizer, publisher=publisher)
    if trainer.device.type == "cuda" and budget is None:
        raise ConfigError("memory_budget_gib", None, "GiB of the GPU for the trainer, where the sampler is vLLM")
    from twinkle.sampler.vllm import VllmSampler
    from twinkle.sampler.vllm.vllm_sampler import MEMORY_DIR

    logger.info("starting vLLM")
    memory_dir: Path = args.memory_dir or MEMORY_DIR
    with Progress("starting vLLM"):
        sampler = VllmSampler(
            trainer, tokenizer, engine_args=args.engine_args, memory_dir=memory_dir, publisher=publisher
        )
    atexit.register(sampler.close)
    return sampler


def _check_vllm(args: SamplerArgs) -> None:
    """Raise InvalidInputError for engine arguments that vLLM does not have or the configuration may not set."""
    from twinkle.sampler.vllm.engine_args import check_engine_args

    check_engine_args(args.engine_args or {})
