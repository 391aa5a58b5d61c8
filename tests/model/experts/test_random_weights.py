"""The weights of ``random://`` models with experts are drawn where they stay, in the model's dtype."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from twinkle import hub
from twinkle.model.decoder.loading import load_model


class LargestFp32(TorchDispatchMode):
    """Records how many elements the largest fp32 tensor had that any operation returned."""

    largest = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else (output,):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                self.largest = max(self.largest, each.numel())
        return output


def test_nothing_is_drawn_in_fp32_first() -> None:
    with LargestFp32() as seen:
        model = load_model(hub.resolve("random://qwen3-moe-tiny"), torch.bfloat16, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert 0 < seen.largest <= 64  # the frequencies of the rotary embedding


def test_the_real_shape_has_61_gigabytes() -> None:
    config = AutoConfig.from_pretrained(hub.resolve("random://qwen3-30b-a3b").path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.nbytes for parameter in model.parameters()) == 61_064_245_248
    experts = model.model.layers[47].mlp.experts
    assert experts.gate_up_proj.shape == (128, 2 * 768, 2048)
