"""Compiled layers of a stage: one graph serves every batch and gives the numbers of eager layers."""

import functools
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from tests.model.megatron import trainer_programs
from tests.support.models.reference import assert_tensors_close
from twinkle.errors import UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import Trainer, TrainFailure
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.lora import lora
from twinkle.model.megatron import layers
from twinkle.model.megatron.trainer import load_trainer

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2")
    trainer_programs.make_model("qwen2").save_pretrained(made)
    return made


def dense_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, *_: object) -> Tensor:
    """Compute what the CUDA kernel does, in a form that compiles on CPU: bounds are a tensor, not a list."""
    places = torch.arange(query.shape[2])
    sequence = torch.searchsorted(packing.ends_N1, places, right=True)
    allowed = (sequence[:, None] == sequence) & (places[:, None] >= places)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1000, 8], ids=["kept", "recomputed"])
def test_one_graph_serves_every_batch(folder: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "attend_packed", dense_attention)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    options = {"device": "cpu", "dtype": "fp32", "max_tokens_per_batch": tokens}
    eager = gradients(load_trainer(folder, **options))
    torch._dynamo.utils.counters.clear()
    trainer = load_trainer(folder, compiled=True, **options)
    monkeypatch.setattr(lora, "_LoraLinear", None)  # eager layers fail from here on
    compiled = gradients(trainer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name in eager:
        assert_tensors_close(compiled[name], eager[name])


def gradients(trainer: Trainer) -> dict[str, dict[str, object]]:
    trainer_programs.add_tenants(trainer, "qwen2")
    for requests in trainer_programs.make_calls(trainer_programs.make_model("qwen2"), "qwen2")[:2]:
        results = trainer.forward_backward([request.item for request in requests])
        assert not [result for result in results if isinstance(result, TrainFailure)]
    return {name: trainer.gradients(name) for name in trainer.adapter_ids()}


def test_layers_that_communicate_are_not_compiled(folder: Path) -> None:
    mesh = DeviceMesh.from_sizes(world_size=2, tp_size=2, device_type="cpu")
    with pytest.raises(UnsupportedError, match=r"compiled: got True with dp_size=1, tp_size=2.*allowed: False"):
        load_trainer(folder, device="cpu", device_mesh=mesh, compiled=True)
