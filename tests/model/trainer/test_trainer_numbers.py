"""The trainer's statistics: adapters on and off the device, rows of tokens and of padding."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem

LENGTHS = (3, 8, 5)


def items(adapter_id: str) -> list[TrainItem]:
    rows = [np.arange(1, length + 1) for length in LENGTHS]
    return [TrainItem(adapter_id, [Datum(row, row) for row in rows])]


@pytest.mark.parametrize(
    ("family", "padding"), [("llama", 0), ("qwen3_5", 0), ("lfm2", 3 * max(LENGTHS) - sum(LENGTHS))]
)
def test_rows(family: str, padding: int) -> None:
    """Packed sequences have no padding; other sequences are padded to the longest of their batch."""
    trainer = tiny_trainer(tiny_model(family))
    trainer.create_adapter("a", LoraSpec(4, seed=1))
    before = trainer.numbers()  # includes the trial run that measures memory
    for passes in (trainer.forward, trainer.forward_backward):
        passes(items("a"))
    after = trainer.numbers()
    assert after.token_rows - before.token_rows == 2 * sum(LENGTHS)
    assert after.padding_rows - before.padding_rows == 2 * padding
    assert after.memory is None  # this trainer computes in host memory


def test_adapters(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer()
    for name in ("a", "b"):
        trainer.create_adapter(name, LoraSpec(4, seed=1))
    assert (trainer.numbers().resident_adapters, trainer.numbers().paged_adapters) == (0, 2)
    trainer.forward_backward(items("a"))
    assert (trainer.numbers().resident_adapters, trainer.numbers().paged_adapters) == (1, 1)
