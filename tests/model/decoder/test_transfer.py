"""Copies between host and device, also of tensors whose elements share memory, like positions of padded batches."""

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_numbers_close, random_datum
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, TrainItem, TrainResult
from twinkle.model.decoder.transfer import to_device


def test_an_expanded_tensor_is_pinned_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning refuses a tensor whose elements share memory. Here it only notes what it gets, and the copy stays."""
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
    """Its positions are one row for all sequences."""
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
