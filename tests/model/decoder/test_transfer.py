"""Copies between host and device, also of tensors whose elements share memory, like positions of padded batches."""

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_numbers_close, random_datum
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, TrainItem, TrainResult
from twinkle.model.decoder.transfer import to_device


def test_an_expanded_tensor_is_pinned_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """pin_memory refuses expanded tensors. This one records its argument, and the tensor stays where it is."""
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    moved = to_device(torch.arange(4).expand(3, 4), torch.device("cuda"))
    assert moved.tolist() == [[0, 1, 2, 3]] * 3
    assert pinned[0].is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_padded_batch_on_a_gpu() -> None:
    """In a padded batch, all sequences share one row of positions."""
    logprobs = []
    for device in ("cuda", "cpu"):
        model = tiny_model("lfm2")
        trainer = tiny_trainer(model.to(device))
        assert trainer.architecture.padded
        trainer.create_adapter("a", LoraSpec(8, seed=1))
        data = [random_datum(model.cpu(), "cross_entropy", length, seed=length) for length in (9, 4, 7)]
        (result,) = trainer.forward_backward([TrainItem("a", data)])
        assert isinstance(result, TrainResult), result
        logprobs.append(np.concatenate(result.logprobs))
    assert_numbers_close(*logprobs)
