"""Adapters on experts in the tables of captured passes, compared with passes that are not captured.

They run on CUDA, and without it in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

from tests.support.models.reference import relative_error
from tests.support.models.sampling import toy_trainer
from tests.support.models.tiny_models import tiny_model
from twinkle.model import LoraSpec
from twinkle.model.decoder.experts.forward import experts_forward
from twinkle.model.decoder.experts.on_device import DeviceExperts, experts_on_device
from twinkle.sampler.torch_sampler.binding import LoraBinder
from twinkle.sampler.torch_sampler.lora.slot_lora import SlotLora
from twinkle.sampler.torch_sampler.prompts.lora import PromptLora

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = {
    "a": LoraSpec(rank=5, seed=1),
    "attention": LoraSpec(rank=16, seed=2, train_mlp=False),
    "c": LoraSpec(rank=32, seed=3, train_attn=False),
}
ROWS = {"a": 3, "attention": 2, "c": 17, None: 1}


class Case:
    """The experts of one layer, and rows of several versions."""

    def __init__(self) -> None:
        self.trainer = toy_trainer(SPECS, tiny_model("qwen3_moe").to(DEVICE))
        self.versions: dict[Any, Any] = {name: self.trainer.pool.freeze(name) for name in SPECS} | {None: None}
        self.trainer.pool.make_resident([self.versions[name] for name in SPECS])
        layer = self.trainer.engine.layers[-1]
        self.experts = layer.experts[0]
        self.index = layer.index
        torch.manual_seed(0)
        rows, (count, hidden, _) = sum(ROWS.values()), self.experts.down_proj.shape
        self.x_TH = torch.randn(rows, hidden, device=DEVICE)
        self.chosen_TK = torch.rand(rows, count, device=DEVICE).argsort(1)[:, :2]
        self.weights_TK = torch.rand(rows, 2, device=DEVICE)

    @torch.no_grad()
    def plain(self) -> Tensor:
        """Return the outputs of a pass that is not captured."""
        runs = [(self.versions[name], count) for name, count in ROWS.items()]
        self.experts.lora = LoraBinder(self.trainer.architecture).layers(runs)[self.index]
        return experts_forward(self.experts, self.x_TH, self.chosen_TK, self.weights_TK)

    @torch.no_grad()
    def captured(self, adapters: DeviceExperts | None) -> Tensor:
        assert adapters is not None
        return experts_on_device(self.experts, self.x_TH, self.chosen_TK, self.weights_TK, adapters)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert relative_error(ours.cpu().numpy(), theirs.cpu().numpy()) <= 1e-5


def test_decoding(case: Case) -> None:
    slots = SlotLora(case.trainer.architecture, 40, DEVICE)
    assert all(slots.takes(case.versions[name]) for name in SPECS)
    rows = len(case.x_TH)
    layer = slots.layers(rows)[case.index]
    slots.bind([(case.versions["c"], rows)], rows)  # other entries, which the next ones replace
    slots.bind([(case.versions[name], count) for name, count in ROWS.items() if name is not None], rows)
    adapters = layer.experts_on_device(case.experts.adapter_name, case.x_TH)
    assert_close(case.captured(adapters), case.plain())


def test_prompts(case: Case) -> None:
    prompts = PromptLora(case.trainer.architecture, DEVICE)
    assert all(prompts.takes(case.versions[name]) for name in SPECS)
    prompts.bind([case.versions[name] for name in SPECS])
    numbers = torch.tensor([*range(len(SPECS)), 16], dtype=torch.int32, device=DEVICE)
    version_T = numbers.repeat_interleave(torch.tensor(list(ROWS.values()), device=DEVICE))
    layer = prompts.layers(torch.zeros(1, 4, dtype=torch.int32, device=DEVICE), 32, version_T)[case.index]
    adapters = layer.experts_on_device(case.experts.adapter_name, case.x_TH)
    assert_close(case.captured(adapters), case.plain())
