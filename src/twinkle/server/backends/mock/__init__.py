"""A trainer and a sampler without a model, for tests of everything around them: numpy only, and deterministic where
requests have seeds.
"""

from twinkle.server.backends.backend import ServedModel, TrainMode
from twinkle.server.backends.mock.sampler import MockSampler, MockTextCodec
from twinkle.server.backends.mock.trainer import MockTrainer

__all__ = ["MockSampler", "MockTrainer", "mock_model"]


def mock_model(
    name: str = "mock",
    aliases: tuple[str, ...] = (),
    pass_seconds: float = 0.0,
    step_seconds: float = 0.0,
    token_seconds: float = 0.0,
    train_mode: TrainMode = "lora",
) -> ServedModel:
    """Return a served model that needs no files and hardly any memory.

    Every batch of passes takes at least ``pass_seconds``, plus ``token_seconds`` for each of its tokens, and every step
    of its sampler at least ``step_seconds``.
    """
    trainer = MockTrainer(pause=pass_seconds, token_pause=token_seconds, full=train_mode == "full")
    sampler = MockSampler(trainer, pause=step_seconds)
    return ServedModel(
        name=name,
        aliases=aliases,
        trainer=trainer,
        sampler=sampler,
        architecture="mock",
        max_context_length=trainer.max_length,
        tokens_per_batch=4096,
        cheap_tokens=256,
        tokenizer_dir=None,
        tokenizer_id=None,
        memory="mock: no model is loaded",
        text=MockTextCodec(trainer.vocab_size, sampler.end_token),
        train_mode=train_mode,
    )
