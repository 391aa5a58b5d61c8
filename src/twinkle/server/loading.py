"""From a model's configuration to the engines that serve it. Torch is imported only for the backend that needs it."""

import sys

from twinkle.server.backend import ServedModel
from twinkle.server.config.serving import ServedModelConfig, is_path


def load_served_model(served: ServedModelConfig) -> ServedModel:
    if served.model.backend == "mock":
        from twinkle.server.mock import mock_model

        return mock_model(served.name, served.aliases)
    return _load_transformers(served)


def _load_transformers(served: ServedModelConfig) -> ServedModel:
    """The trainer and, where the configuration asks for one, the sampler on the trainer's own weights."""
    print(f"loading {served.model.model_id}", file=sys.stderr, flush=True)
    from twinkle import hub
    from twinkle.model import Trainer
    from twinkle.sampler import TorchSampler

    args = served.model
    budget = None if args.memory_budget_gib is None else int(args.memory_budget_gib * 2**30)
    trainer = Trainer.from_pretrained(
        args.model_id,
        device=args.compute_device,
        dtype=args.dtype,
        memory_budget_bytes=budget,
        max_tokens_per_batch=args.max_tokens_per_batch,
        compiled=args.compiled,
    )
    folder = str(hub.resolve(args.model_id).path)
    sampler = None if served.sampler is None else TorchSampler(trainer, hub.load_tokenizer(args.model_id))
    scheme, _, name = args.model_id.rpartition("://")
    return ServedModel(
        name=served.name,
        aliases=served.aliases,
        trainer=trainer,
        sampler=sampler,
        architecture=trainer.architecture.family,
        max_context_length=trainer.architecture.max_length,
        tokens_per_batch=trainer.memory.tokens,
        tokenizer_dir=folder,
        tokenizer_id=name if scheme in ("", "hf") and not is_path(args.model_id) else None,
        memory=str(trainer.memory) if sampler is None else f"{trainer.memory}; {sampler.memory}",
    )
